"""What became of a step's plans while it ran: for its report, the log and the progress listener."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from shardwright.progress import PlanProgress
from shardwright.units import format_seconds

_log = logging.getLogger("shardwright")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChange:
    """One event.

    kind: "first plan" that runs while the search goes on; "better plan", compiled beside the run; "no better plan";
    "search ended", without a plan, for the reason in `detail`; "runner-up", compiled to be measured; "left out", a
    runner-up that cannot be; "no runner-up", where there is none; "switched"; "measured", after the trial of a
    runner-up; "kept" or "went back", by measurement; "remembered", the fastest plan of an earlier measurement;
    "replanned", by `Step.replan`.
    elapsed_s: since planning began, of the step or of its last `replan`.
    calls: of the step, before it.
    detail: the plan in a word, or a reason.
    planning_s: seconds that the planner took for it; the rest is compiling and loading. 0.0: not known.
    predicted_s: seconds a step of the plan; 0.0: not known.
    gain: the part of the running plan's predicted step that it saves.
    before_s, after_s: seconds a step of the plan before and of the new one, medians of measured steps; 0.0: not known.
    """

    kind: str
    elapsed_s: float
    calls: int
    detail: str = ""
    planning_s: float = 0.0
    predicted_s: float = 0.0
    gain: float = 0.0
    before_s: float = 0.0
    after_s: float = 0.0

    def __str__(self) -> str:
        at = f"at {self.elapsed_s:.1f} s"
        predicted = f"{self.detail}, {format_seconds(self.predicted_s)} a step by prediction"
        measured = f"measured {format_seconds(self.before_s)} a step before, {format_seconds(self.after_s)} now"
        match self.kind:
            case "first plan":
                planned = f"first plan in {self.planning_s:.1f} s, ready after {self.elapsed_s:.1f} s"
                return f"{planned}: {predicted}; the search goes on"
            case "better plan":
                return f"better plan {at}: {predicted}, {self.gain:.1%} less"
            case "no better plan":
                return f"no better plan {at}: the best one saves {max(0.0, self.gain):.1%} by prediction"
            case "switched":
                return f"switched {at}, before call {self.calls + 1}: {self.detail}"
            case "kept":
                return f"kept {at}: {measured}"
            case "went back":
                return f"went back {at}, before call {self.calls + 1}: {measured}"
            case "runner-up":
                return f"runner-up {at}: {predicted}"
            case "measured" | "remembered":
                ratio = self.predicted_s / self.after_s if self.after_s else 0.0
                return f"{self.kind} {at}: {predicted}, {format_seconds(self.after_s)} measured (× {ratio:.2f})"
            case "replanned":
                return f"replanned in {self.elapsed_s:.1f} s, before call {self.calls + 1}: {predicted}"
            case _:
                return f"{self.kind} {at}: {self.detail}"


class PlanHistory:
    """The changes of one step, in order; `add` may be called by any thread.

    The listener is called by `tell`, hence in the caller's own thread.
    """

    def __init__(self, name: str, listener: Callable[[PlanProgress], None] | None) -> None:
        self._name = name
        self._listener = listener
        self._begun_s = time.monotonic()
        self._untold: deque[PlanChange] = deque()
        self._changes: list[PlanChange] = []
        self.calls = 0  # of the step so far

    def begin(self) -> None:
        """Seconds count from now on."""
        self._begun_s = time.monotonic()

    def add(
        self,
        kind: str,
        detail: str = "",
        *,
        planning_s: float = 0.0,
        predicted_s: float = 0.0,
        gain: float = 0.0,
        before_s: float = 0.0,
        after_s: float = 0.0,
    ) -> None:
        """Logs and keeps an event of now; see `PlanChange`."""
        elapsed_s = time.monotonic() - self._begun_s
        change = PlanChange(
            kind=kind, detail=detail, elapsed_s=elapsed_s, calls=self.calls, planning_s=planning_s,
            predicted_s=predicted_s, gain=gain, before_s=before_s, after_s=after_s,
        )  # fmt: skip
        _log.log(logging.WARNING if kind == "search ended" else logging.INFO, "%s: %s", self._name, change)
        self._changes.append(change)
        self._untold.append(change)

    def tell(self) -> None:
        """Hands new events to the listener."""
        while self._untold:
            change = self._untold.popleft()
            if self._listener is not None:
                self._listener(
                    PlanProgress(
                        phase="background",
                        detail=str(change),
                        incumbent_s=change.predicted_s,
                        elapsed_s=change.elapsed_s,
                    )
                )

    @property
    def changes(self) -> tuple[PlanChange, ...]:
        return tuple(self._changes)

    def __str__(self) -> str:
        return "\n".join(map(str, self._changes))
