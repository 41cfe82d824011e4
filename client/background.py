"""A better plan while a step runs: searched for and compiled by a thread, taken over and measured between calls.

The first plan that fits runs meanwhile. The thread holds no handles, so that a session ends as ever; it ends with the
session or the step. ADR 46 has the reasons.
"""

from __future__ import annotations

import statistics
import threading
import weakref
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwright.builders.choices import PlanChoice, predicted_step_s, take_fastest
from shardwright.client.connection import Preparation
from shardwright.client.plan_changes import PlanHistory
from shardwright.client.programs import LoadedPlan, StepProgram, to_loaded_plan
from shardwright.errors import ShardwrightError
from shardwright.user_plans import PipelinePlan, Plan

if TYPE_CHECKING:
    from shardwright.client.connection import MasterConnection
    from shardwright.client.stream import StepResult

#: A plan has to save more than this part of the predicted step to be compiled.
MIN_GAIN = 0.03
#: Steps measured before a switch, and after it.
MEASURED_STEPS = 20
#: Steps not measured after a switch: the devices' queues fill again.
SETTLING_STEPS = 2


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

    def median_s(self) -> float | None:
        """None until enough steps have ended."""
        self._collect()
        return statistics.median(self._seconds) if len(self._seconds) >= self._count else None

    def _collect(self) -> None:
        while self._waiting and self._waiting[0][0].is_done:
            result, sent_s = self._waiting.popleft()
            took_s = result.finished_s - max(sent_s, self._last_end_s)
            self._last_end_s = result.finished_s
            if self._to_skip:
                self._to_skip -= 1
            elif result.error is None and len(self._seconds) < self._count:
                self._seconds.append(took_s)


@dataclass(slots=True)
class _Outcome:
    """What the thread leaves: the loaded plan, if there is a better one."""

    loaded: LoadedPlan | None = None
    is_over: bool = False


class BackgroundSearch:
    """One search beside the first plan of a step.

    signature: of the calls that run it. choices: the ways to plan it, as without a first plan. layout_changes: the
    session's count of them when the first plan was made: the choices are for those layouts.
    """

    def __init__(
        self,
        owner: object,
        master: MasterConnection,
        first: StepProgram,
        choices: Sequence[PlanChoice],
        history: PlanHistory,
        *,
        signature: Hashable,
        layout_changes: int,
    ) -> None:
        self.first = first
        self.signature = signature
        self.choices = tuple(choices)
        self.layout_changes = layout_changes
        self.before = StepTimes(skipped=1)
        self.after: StepTimes | None = None  # once the step has switched
        self.before_s = 0.0
        self._outcome = _Outcome()
        self._preparation = Preparation()
        weakref.finalize(owner, self._preparation.cancel).atexit = False
        text, running_s = first.lowered.hlo_text, predicted_step_s(first.plan)
        arguments = (master, text, self.choices, running_s, self._outcome, self._preparation, history)
        self._thread = threading.Thread(target=_search, args=arguments, name="shardwright-plans", daemon=True)
        self._thread.start()

    @property
    def loaded(self) -> LoadedPlan | None:
        """The better plan, once it is there."""
        return self._outcome.loaded

    @property
    def is_over(self) -> bool:
        """Whether nothing will come of it any more."""
        return self._outcome.is_over and self._outcome.loaded is None

    def record(self, result: StepResult, sent_s: float) -> None:
        """A call that runs; it is measured once a better plan is there, when nothing is computed beside it."""
        if self.loaded is not None:
            (self.after or self.before).add(result, sent_s)

    def start_measuring(self) -> None:
        """The step has switched."""
        self.after = StepTimes(skipped=SETTLING_STEPS)

    def cancel(self) -> None:
        """Ends it, also on the server; the thread ends by itself."""
        self._preparation.cancel()
        self._outcome.loaded, self._outcome.is_over = None, True


def describe_plan(plan: Plan | PipelinePlan) -> str:
    """A plan in a word."""
    return f"{len(plan.stages)} stages" if isinstance(plan, PipelinePlan) else str(plan.mesh)


def _search(
    master: MasterConnection,
    hlo_text: str,
    choices: Sequence[PlanChoice],
    running_s: float,
    outcome: _Outcome,
    preparation: Preparation,
    history: PlanHistory,
) -> None:
    """The thread. running_s: predicted seconds a step of the plan that runs."""
    try:
        with master.preparation(preparation):
            loaded = _find_better(master, hlo_text, choices, running_s, history)
        if not preparation.is_cancelled:
            outcome.loaded = loaded
    except Exception as error:
        if not (preparation.is_cancelled or master.is_closed):
            history.add("search ended", error.message if isinstance(error, ShardwrightError) else repr(error))
    finally:
        outcome.is_over = True


def _find_better(
    master: MasterConnection,
    hlo_text: str,
    choices: Sequence[PlanChoice],
    running_s: float,
    history: PlanHistory,
) -> LoadedPlan | None:
    """The plan of the whole search, loaded; None where it is hardly better."""
    program_id = master.upload_program(hlo_text)
    choice, (plan_id, plan), others = take_fastest(
        choices,
        lambda options: master.plan(program_id, hlo_text, options, lambda progress: None, in_background=True),
        lambda planned: planned[1],
    )
    predicted_s = predicted_step_s(plan)
    gain = 1.0 - predicted_s / running_s if running_s else 0.0
    if gain <= MIN_GAIN:
        history.add("no better plan", describe_plan(plan), predicted_s=predicted_s, gain=gain)
        return None
    load = master.load(plan_id, lambda phase, elapsed_s: None)
    history.add("better plan", describe_plan(plan), predicted_s=predicted_s, gain=gain)
    return to_loaded_plan(choice, plan, others, load)
