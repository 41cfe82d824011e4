"""Collectives in the background, in order of submission."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from shardwright.errors import CollectiveError, OptionError, RankLostError


class Handle:
    """A running or waiting collective. All ranks must submit theirs in the same order."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def done(self) -> bool:
        """Whether `result` returns at once."""
        return self._future.done()

    def result(self) -> Any:
        """Wait for the collective's result, or raise its error."""
        return self._future.result()


class Dispatcher:
    """Runs collectives one after the other: at once, or on a thread of its own.

    The thread is a daemon: a process at its end does not wait for ranks that never come.
    """

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._last: Future[Any] | None = None
        self._thread: threading.Thread | None = None
        self._turn = threading.RLock()
        self._closed = False
        self._abandoned = False

    def run(self, task: Callable[[], Any]) -> Any:
        """Run a task now, after all waiting ones."""
        last = self._last
        if last is not None and threading.current_thread() is not self._thread:
            last.exception()
        with self._turn:
            return task()

    def submit(self, task: Callable[[], Any]) -> Handle:
        """Run a task on the thread, after all waiting ones."""
        if self._closed:
            raise CollectiveError("the job was left", remedy="call sw.ranks.init() first")
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="shardwright-collectives", daemon=True)
            self._thread.start()
        future: Future[Any] = Future()
        self._last = future
        self._tasks.put((future, task))
        return Handle(future)

    def close(self) -> None:
        """Finish the waiting tasks, and end the thread."""
        self._closed = True
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join()

    def abandon(self) -> None:
        """Drop the waiting tasks: the job is broken."""
        self._closed = self._abandoned = True
        if self._thread is not None:
            self._tasks.put(None)

    def _work(self) -> None:
        while (item := self._tasks.get()) is not None:
            future, task = item
            try:
                if self._abandoned:
                    raise RankLostError("its job was left before it began", remedy="ask for it again")
                with self._turn:
                    result = task()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)


def synchronize(handle: Handle) -> Any:
    """Wait for the result of a collective in the background, or raise its error."""
    return _require_handle(handle).result()


def poll(handle: Handle) -> bool:
    """Whether `synchronize` returns at once."""
    return _require_handle(handle).done()


def _require_handle(handle: Handle) -> Handle:
    if isinstance(handle, Handle):
        return handle
    raise OptionError(
        f"{type(handle).__name__} is no handle", where="handle", remedy="pass what allreduce_async and its like return"
    )
