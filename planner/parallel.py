"""Work on a second core, in a forked child, when forking is safe.

A fork has all data read and built so far without copying a byte; only the result is pickled. But it has one thread, and
locks held by others stay locked. So a child begins only once it is certain that no other threads existed: after its
parent has looked at its own threads after the fork (OpenBLAS ends its pool for one, and may be counted before). Until
then it waits for a byte, without needing a lock. Without `/proc`, a second core or that certainty nothing is forked,
and the work is done on request of its result. The same happens after any failure in the child: an error is raised in
the caller's place, and a dead child costs only time. Results must not depend on the process.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

from shardwright.planner.tuning import PARALLEL_POLL_S, PARALLEL_TIMEOUT_S
from shardwright.processes import die_with_parent

T = TypeVar("T")

#: Libraries broken by a fork, with or without threads.
_THREADED_LIBRARIES = ("jaxlib", "tensorflow", "torch")

_THREADS_FOLDER = Path("/proc/self/task")


class ForkedFuture(Generic[T]):
    """The result of `work`, computed in a child from now on, or here on request.

    is_over: whether the child is not to be waited for any more; `work` is then expected to be short.
    """

    def __init__(
        self,
        work: Callable[[], T],
        *,
        patience_s: float = PARALLEL_TIMEOUT_S,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self._work, self._is_over = work, is_over
        self._timeout_s = patience_s
        self._child = _fork(work) if _may_fork() else None

    @property
    def is_forked(self) -> bool:
        """Whether a child computes it, or did."""
        return self._child is not None

    def result(self) -> T:
        """The return value of `work`. Raises its errors. To be called once."""
        if self._child is not None:
            answer = self._child.answer(self._timeout_s, self._is_over)
            self.cancel()
            with suppress(Exception):  # a failed child has written nothing, or half of it
                value: T = pickle.loads(answer)
                return value
        return self._work()

    def cancel(self) -> None:
        """End the child, if any: its result is not needed."""
        if self._child is not None:
            self._child.end()
            self._child = None


class _Child:
    """A forked process that writes one answer to `pipe`."""

    def __init__(self, pid: int, pipe: int) -> None:
        self.pid = pid
        self.pipe = pipe

    def answer(self, patience_s: float, is_over: Callable[[], bool]) -> bytes:
        """All bytes it writes until its end; empty after a timeout, or once `is_over`."""
        received = bytearray()
        end_s = time.monotonic() + patience_s
        while (left_s := end_s - time.monotonic()) > 0 and not is_over():
            if not select.select([self.pipe], [], [], min(left_s, PARALLEL_POLL_S))[0]:
                continue
            block = os.read(self.pipe, 1 << 20)
            if not block:
                return bytes(received)
            received += block
        return b""

    def end(self) -> None:
        """Kill it and wait for it: no child outlives its result."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        os.close(self.pipe)


def _may_fork() -> bool:
    """Whether forking seems safe, judged before the fork."""
    return (
        sys.platform == "linux"
        and len(os.sched_getaffinity(0)) > 1
        and threading.active_count() == 1
        and not any(name in sys.modules for name in _THREADED_LIBRARIES)
    )


def _fork(work: Callable[[], Any]) -> _Child | None:
    """A child running `work`; None if other threads turn up."""
    pipe, writing = os.pipe()
    waiting, start = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.close(pipe)
        os.close(start)
        _run_child(work, parent, waiting, writing)
    os.close(writing)
    os.close(waiting)
    child = _Child(pid, pipe)
    is_alone = len(list(_THREADS_FOLDER.iterdir())) == 1
    with suppress(BrokenPipeError):
        os.write(start, b"!" if is_alone else b"")
    os.close(start)
    if is_alone:
        return child
    child.end()
    return None


def _run_child(work: Callable[[], Any], parent: int, waiting: int, writing: int) -> None:
    """Answer and end; without an answer after any failure, or when nobody waits for it."""
    try:
        if os.read(waiting, 1) == b"!":
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            die_with_parent(parent)
            _write(writing, pickle.dumps(work()))
    finally:
        os._exit(0)


def _write(pipe: int, answer: bytes) -> None:
    view = memoryview(answer)
    while view:
        view = view[os.write(pipe, view) :]
