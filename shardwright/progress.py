"""Progress of a step's preparation: reports of the planner, and of the servers that compile and load the plan."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from shardwright.tuning import MIN_SHOWN_S, PROGRESS_INTERVAL_S
from shardwright.units import format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanProgress:
    """One report; 0.0: a figure not known yet.

    phase: trace and lower, of the client; queue (other clients plan), parse, rules, search, rewrite (when memory binds)
    or check; stages and programs of a pipeline; cache: an earlier plan is the answer; emit and compile, load: of the
    plan, on the servers; background: what became of a search beside the run.
    detail: in the phase, e.g. the mesh being searched.
    incumbent_s: predicted seconds a step of the best plan so far.
    lower_bound_s: no plan of the search is faster.
    elapsed_s: since planning began.
    """

    phase: str
    detail: str = ""
    incumbent_s: float = 0.0
    lower_bound_s: float = 0.0
    elapsed_s: float = 0.0

    @property
    def gap(self) -> float | None:
        """(incumbent − bound) / incumbent; None until both are known."""
        if not self.incumbent_s or not self.lower_bound_s:
            return None
        return max(0.0, 1.0 - self.lower_bound_s / self.incumbent_s)

    def __str__(self) -> str:
        parts = [f"{self.elapsed_s:.0f} s", self.phase, self.detail]
        if self.incumbent_s:
            parts.append(f"best step {format_seconds(self.incumbent_s)}")
        if self.lower_bound_s:
            parts.append(f"bound {format_seconds(self.lower_bound_s)}")
        if self.gap is not None:
            parts.append(f"gap {self.gap:.1%}")
        return "  ".join(part for part in parts if part)


#: What phases are called in sum, in the order in which they come; all others are the planner's.
STAGES = {"trace": "trace", "lower": "lower", "": "plan", "emit and compile": "compile", "load": "load"}


class StageTimes:
    """Seconds that the stages of a preparation took so far, by their reports."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._spent_s = dict.fromkeys(STAGES.values(), 0.0)
        self._stage, self._since_s = STAGES["lower"], clock()

    def enter(self, phase: str) -> None:
        self._add()
        self._stage = STAGES.get(phase, STAGES[""])

    def _add(self) -> None:
        now_s = self._clock()
        self._spent_s[self._stage] += now_s - self._since_s
        self._since_s = now_s

    def __str__(self) -> str:
        """`trace 1.20 s, plan 3.40 s`: those that took a tenth of a second or more, up to now."""
        self._add()
        shown = {stage: spent_s for stage, spent_s in self._spent_s.items() if spent_s >= MIN_SHOWN_S}
        return ", ".join(f"{stage} {format_seconds(spent_s)}" for stage, spent_s in shown.items())


class ProgressThrottle:
    """Hands reports on, at a readable rate; `flush` hands on the last one held back.

    A search with a thousand improvements a second would else spend its time on reports.
    """

    def __init__(
        self,
        listener: Callable[[PlanProgress], None],
        *,
        interval_s: float = PROGRESS_INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._listener = listener
        self._interval_s = interval_s
        self._clock = clock
        self._told_s = -float("inf")
        self._held: PlanProgress | None = None

    def __call__(self, report: PlanProgress) -> None:
        now_s = self._clock()
        if now_s - self._told_s < self._interval_s:
            self._held = report
            return
        self._told_s, self._held = now_s, None
        self._listener(report)

    def flush(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            self._listener(held)


class BestSoFar:
    """Hands reports on with the least incumbent and the largest bound so far.

    Parts of a search price a plan by what they know: one that counts less overlap reports the same plan as slower.
    """

    def __init__(self, listener: Callable[[PlanProgress], None]) -> None:
        self._listener = listener
        self._incumbent_s = 0.0
        self._lower_bound_s = 0.0

    def __call__(self, report: PlanProgress) -> None:
        if report.incumbent_s:
            self._incumbent_s = min(self._incumbent_s or report.incumbent_s, report.incumbent_s)
            self._lower_bound_s = min(max(self._lower_bound_s, report.lower_bound_s), self._incumbent_s)
            report = replace(report, incumbent_s=self._incumbent_s, lower_bound_s=self._lower_bound_s)
        self._listener(report)
