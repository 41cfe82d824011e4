"""The time limit of planning. Once a plan is known, a deadline stops the search anywhere; before that, the search stops
with an error when just enough time is left to write a plan. Where the first plan is asked for, the search stops as soon
as one is known.

Guarantee: an answer at most `GRACE_FRACTION` of the deadline after it, or `GRACE_S`, the larger of the two.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace

from shardwright.errors import PlanError
from shardwright.planner.tuning import GRACE_FRACTION, GRACE_S, MIN_TIME_S, WRITE_TIME_RATIO


class OutOfTimeError(PlanError):
    """The deadline passed during a search."""


@dataclass(slots=True)
class Interruption:
    """The user's wish to have the best plan so far, now: as a deadline that is here. at_s: when it came."""

    at_s: float | None = None

    def begin(self) -> None:
        if self.at_s is None:
            self.at_s = time.perf_counter()


@dataclass(slots=True)
class Clock:
    """Runs from its construction.

    deadline_s: seconds from then on; None without a limit.
    takes_first: whether the search ends with the first feasible plan.
    may_stop: whether a plan to return exists when it expires.
    plan_build_s: seconds to build a plan from its decisions, without interruption.
    is_final: whether a plan is being written; this is never interrupted.
    has_plan: whether a feasible plan was found.
    interruption: shared with the clocks that it is renewed as.
    """

    deadline_s: float | None = None
    takes_first: bool = False
    may_stop: bool = False
    plan_build_s: float = 0.0
    is_final: bool = False
    has_plan: bool = False
    interruption: Interruption = field(default_factory=Interruption)
    _start_s: float = field(default_factory=time.perf_counter)

    def renew(self, *, interrupts: bool = False) -> Clock:
        """The same clock for another search within the same time. interrupts: the new `may_stop`."""
        return replace(self, may_stop=interrupts, plan_build_s=0.0, is_final=False, has_plan=False)

    def record_plan(self) -> None:
        """Record that a feasible plan was found: the search may end with it."""
        self.may_stop = self.has_plan = True

    def record_build_time(self, seconds: float) -> None:
        """Record the seconds to build a plan, or of similar work."""
        self.plan_build_s = max(self.plan_build_s, seconds)

    @property
    def is_hurried(self) -> bool:
        """Whether a first plan is worth its time ahead of the search."""
        return self.takes_first or self._limit_s is not None

    @property
    def is_interrupted(self) -> bool:
        """Whether the user wants the best plan so far."""
        return self.interruption.at_s is not None

    @property
    def end(self) -> str:
        """What ends, or ended, the search."""
        if self.is_interrupted:
            return "the interruption"
        return "the deadline" if self.deadline_s is None else f"the deadline of {self.deadline_s:g} s"

    @property
    def _limit_s(self) -> float | None:
        """Seconds from the start until the deadline, or the user's interruption."""
        at_s = self.interruption.at_s
        if at_s is None:
            return self.deadline_s
        return min(at_s - self._start_s, math.inf if self.deadline_s is None else self.deadline_s)

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._start_s

    @property
    def is_expired(self) -> bool:
        """Whether the best known plan must do."""
        return self.elapsed_s > self._expiry_s

    @property
    def must_stop(self) -> bool:
        """Whether the search has to end, with or without a plan."""
        return self.elapsed_s > self._stop_s

    @property
    def _expiry_s(self) -> float:
        if self.takes_first and self.has_plan:
            return 0.0
        limit_s = self._limit_s
        return math.inf if limit_s is None else min(limit_s, self._latest_plan_s)

    @property
    def _stop_s(self) -> float:
        if self.may_stop:
            return self._expiry_s
        return math.inf if self.is_final else self._latest_plan_s

    @property
    def _latest_plan_s(self) -> float:
        """The latest time of a plan that can still be written in time."""
        limit_s = self._limit_s
        return math.inf if limit_s is None else answer_due_s(limit_s) - WRITE_TIME_RATIO * self.plan_build_s

    def time_left_s(self, limit_s: float) -> float:
        """The seconds left, at most `limit_s`; at least `MIN_TIME_S`."""
        end_s = self._expiry_s if self.takes_first and self.has_plan else self._limit_s
        return limit_s if end_s is None else min(limit_s, max(end_s - self.elapsed_s, MIN_TIME_S))

    def check(self, ahead_s: float = 0.0) -> None:
        """Raises OutOfTimeError when the search has to end (see `must_stop`), or would before the end of a task of
        `ahead_s` seconds."""
        if self.elapsed_s + ahead_s > self._stop_s:
            raise OutOfTimeError(f"not searched to the end: {self.end} came first")


def answer_due_s(deadline_s: float) -> float:
    """Seconds until the guaranteed answer: the deadline and its grace."""
    return deadline_s + max(GRACE_FRACTION * deadline_s, GRACE_S)


def too_short_error(clock: Clock) -> OutOfTimeError:
    """The error of a deadline too short for any plan, or of an interruption that came too early."""
    if clock.is_interrupted:
        return OutOfTimeError("planning was interrupted before there was any plan")
    return OutOfTimeError(
        f"the deadline of {clock.deadline_s:g} s came before any plan: reading the program and making one plan of it "
        "takes longer",
        where="deadline",
        remedy="give a longer deadline, or none",
    )
