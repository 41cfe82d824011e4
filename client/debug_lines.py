"""What steps say by `jax.debug`, said in this process: in the order of the steps, by one thread of a session.

Values come with a step's results; the thread waits for each step and makes its calls: before a program has read a
result of that step, returns from `jax.effects_barrier()`, or ends its session.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardwright.client.debug_calls import DebugCall, Level, make_calls
from shardwright.client.limits import DEBUG_THREAD_S
from shardwright.errors import DebugCallbackError, ShardwrightError
from shardwright.xla import private

if TYPE_CHECKING:
    from shardwright.client.arrays import RemoteArray
    from shardwright.client.step_result import StepResult

_log = logging.getLogger("shardwright")


@dataclass(frozen=True, slots=True)
class _Spoken:
    """What one step says.

    number: its first one, which stays where it runs again after a loss. arrays: handles of its values.
    """

    number: int
    result: StepResult
    level: Level
    arrays: Sequence[RemoteArray]


class DebugLines:
    """Of one session. Thread-safe; without a step that says something there is no thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[_Spoken] = deque()
        self._added = self._said = 0  # steps so far
        self._thread: threading.Thread | None = None
        self._error: DebugCallbackError | None = None
        self._failed: set[tuple[str, type[BaseException]]] = set()  # lines of the source, and what they raised

    def add(self, result: StepResult, level: Level, arrays: Sequence[RemoteArray]) -> None:
        """A step that was sent, whose calls are to be made when it has run."""
        with self._changed:
            self._waiting.append(_Spoken(result.number, result, level, arrays))
            self._added += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._say_all, name="shardwright-debug", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        private.wait_at_barrier(self, self.finish)

    def latest(self) -> Callable[[], None] | None:
        """Waits until all steps so far have said what they say; None where there is nothing to wait for."""
        count = self._added
        return None if self._said >= count else lambda: self.wait(count)

    def wait(self, count: int | None = None, timeout_s: float | None = None) -> None:
        """Returns when the first `count` steps have said what they say, by default all; at once in a call of theirs."""
        if threading.current_thread() is self._thread:
            return
        with self._changed:
            count = self._added if count is None else count
            self._changed.wait_for(lambda: self._said >= count, timeout_s)

    def finish(self) -> None:
        """`wait` for all; raises what `raise_error` raises."""
        self.wait()
        self.raise_error()

    def take_error(self) -> DebugCallbackError | None:
        """What the first callback raised that is not told yet; a line's errors of one type are told once."""
        error, self._error = self._error, None
        return error

    def raise_error(self) -> None:
        """Raises `take_error`."""
        error = self.take_error()
        if error is not None:
            raise error

    # ---- the thread ------------------------------------------------------------------

    def _say_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting, DEBUG_THREAD_S)
                if not self._waiting:
                    self._thread = None
                    return
                spoken = self._waiting[0]
            try:
                self._say(spoken)
            finally:
                del spoken
                with self._changed:
                    self._waiting.popleft()
                    self._said += 1
                    self._changed.notify_all()

    def _say(self, spoken: _Spoken) -> None:
        spoken.result.wait_for_outcome()
        step = f"step {spoken.number} ({spoken.result.name})"
        if spoken.result.error is not None:
            _log.warning("%s failed: what it would have said by jax.debug is lost", step)
            return
        try:
            arrays = [np.asarray(array) for array in spoken.arrays]
        except ShardwrightError as error:
            _log.warning("%s: what it says by jax.debug is lost: %s", step, error)
            return
        for call, failure in make_calls(spoken.level, arrays, spoken.number):
            self._note(call, failure, step)

    def _note(self, call: DebugCall, error: BaseException, step: str) -> None:
        if (call.where, type(error)) in self._failed:
            return
        self._failed.add((call.where, type(error)))
        failure = DebugCallbackError(
            f"jax.debug in {step} raised {type(error).__name__}: {error}",
            where=call.where,
            remedy="the step itself has run, and later ones do; this error of this line is told once",
        )
        failure.__cause__ = error
        self._error = self._error or failure
