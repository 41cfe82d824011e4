"""The time that planning may take. Once there is a plan, a deadline ends the search wherever it is; without one it ends
as late as leaves time to write one down, with an error.

What is promised: `GRACE_FRACTION` of the deadline after it, or `GRACE_S`, whichever is more, there is an answer.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace

from shardwright.errors import PlanError

#: Seconds that what cannot do without has, however late it is.
MIN_TIME_S = 0.5

#: What may pass between a deadline and the answer: a part of it, or seconds, whichever is more.
GRACE_FRACTION, GRACE_S = 0.2, 2.0

#: Seconds that writing a plan down takes, for each second that making it took: 0.7 to 1.0 in programs of 30,000 and
#: 60,000 instructions.
WRITE_TIME_RATIO = 1.2


class OutOfTimeError(PlanError):
    """The deadline came in the middle of a search."""


@dataclass(slots=True)
class Clock:
    """Runs from when it is made.

    deadline_s: seconds from then on; None for no end. interrupts: whether there is a plan to take when it is late.
    making_s: seconds that it takes to make a plan of what was decided: what is not interrupted. is_final: whether a
    plan is being written down: that is never interrupted.
    """

    deadline_s: float | None = None
    may_stop: bool = False
    plan_build_s: float = 0.0
    is_final: bool = False
    _start_s: float = field(default_factory=time.perf_counter)

    def renew(self, *, interrupts: bool = False) -> Clock:
        """The same clock, for another search in the same time. interrupts: as above."""
        return replace(self, may_stop=interrupts, plan_build_s=0.0, is_final=False)

    def record_build_time(self, seconds: float) -> None:
        """So long did it take to make a plan, or what takes about as long."""
        self.plan_build_s = max(self.plan_build_s, seconds)

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._start_s

    @property
    def is_expired(self) -> bool:
        """Whether a plan that is known has to do."""
        return self.elapsed_s > self._expiry_s

    @property
    def must_stop(self) -> bool:
        """Whether the search has to end, with a plan or without one."""
        return self.elapsed_s > self._stop_s

    @property
    def _expiry_s(self) -> float:
        return math.inf if self.deadline_s is None else min(self.deadline_s, self._latest_plan_s)

    @property
    def _stop_s(self) -> float:
        if self.may_stop:
            return self._expiry_s
        return math.inf if self.is_final else self._latest_plan_s

    @property
    def _latest_plan_s(self) -> float:
        """When a plan must be known, for it to be written down in time."""
        if self.deadline_s is None:
            return math.inf
        return answer_due_s(self.deadline_s) - WRITE_TIME_RATIO * self.plan_build_s

    def time_left_s(self, limit_s: float) -> float:
        """Of so many seconds those that are left; some, however late it is."""
        return limit_s if self.deadline_s is None else min(limit_s, max(self.deadline_s - self.elapsed_s, MIN_TIME_S))

    def check(self, ahead_s: float = 0.0) -> None:
        """Raises OutOfTimeError where the search has to end (see `must_stop`), or would before something that takes so
        many seconds is done."""
        if self.elapsed_s + ahead_s > self._stop_s:
            raise OutOfTimeError("not searched to the end: the deadline came first")


def answer_due_s(deadline_s: float) -> float:
    """Seconds after which a deadline promises an answer: itself and its grace."""
    return deadline_s + max(GRACE_FRACTION * deadline_s, GRACE_S)


def too_short_error(clock: Clock) -> OutOfTimeError:
    """That a deadline is too short for any plan."""
    return OutOfTimeError(
        f"the deadline of {clock.deadline_s:g} s came before any plan: reading the program and making one plan of it "
        "takes longer",
        where="deadline",
        remedy="give a longer deadline, or none",
    )
