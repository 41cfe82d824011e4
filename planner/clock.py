"""The time that planning may take. Once there is a plan, a deadline ends the search wherever it is."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from shardwright.errors import PlanError

#: Seconds that what cannot do without has, however late it is.
LEAST_S = 0.5


class OutOfTimeError(PlanError):
    """The deadline came in the middle of a search; there is a plan to take already."""


@dataclass(slots=True)
class Clock:
    """Runs from when it is made.

    deadline_s: seconds from then on; None for no end. interrupts: whether there is a plan to take when it is late.
    """

    deadline_s: float | None = None
    interrupts: bool = False
    _start_s: float = field(default_factory=time.perf_counter)

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._start_s

    @property
    def is_late(self) -> bool:
        return self.deadline_s is not None and self.elapsed_s > self.deadline_s

    def within(self, limit_s: float) -> float:
        """Of so many seconds those that are left; some, however late it is."""
        return limit_s if self.deadline_s is None else min(limit_s, max(self.deadline_s - self.elapsed_s, LEAST_S))

    def check(self) -> None:
        """Raises OutOfTimeError where there is a plan and no time for a better one."""
        if self.interrupts and self.is_late:
            raise OutOfTimeError("not searched to the end: the deadline came first")
