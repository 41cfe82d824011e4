"""How long steps take, as their caller waits."""

from __future__ import annotations

import statistics
from collections import deque
from typing import TYPE_CHECKING

from shardwright.client.limits import MEASURED_STEPS

if TYPE_CHECKING:
    from shardwright.client.step_result import StepResult


class StepTimes:
    """Seconds of steps, as their caller waits: from the answer before, or from being sent, to the answer."""

    def __init__(self, count: int = MEASURED_STEPS, *, skipped: int = 0) -> None:
        self._count = count
        self._to_skip = skipped
        self._waiting: deque[tuple[StepResult, float]] = deque()
        self._last_end_s = 0.0
        self._seconds: list[float] = []

    def add(self, result: StepResult, sent_s: float) -> None:
        """A step that was sent then, by the monotonic clock."""
        self._waiting.append((result, sent_s))
        self._collect()

    def median_s(self, count: int | None = None) -> float | None:
        """None until `count` steps have ended, by default all that are to be measured."""
        self._collect()
        return statistics.median(self._seconds) if len(self._seconds) >= (count or self._count) else None

    def _collect(self) -> None:
        while self._waiting and self._waiting[0][0].is_done:
            result, sent_s = self._waiting.popleft()
            took_s = result.finished_s - max(sent_s, self._last_end_s)
            self._last_end_s = result.finished_s
            if self._to_skip:
                self._to_skip -= 1
            elif result.error is None and len(self._seconds) < self._count:
                self._seconds.append(took_s)
