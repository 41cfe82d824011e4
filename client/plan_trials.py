"""Trials of a step's plans: made by a thread, tried between calls; the fastest by measurement stays.

The first plan runs while the thread searches, compiles and loads. It is measured once nothing is computed beside it;
then each alternative runs for some steps of the training itself. Runners-up near the fastest run once more, for a
machine may be busy with something else for a while. The thread holds no handles, so that a session ends as ever; it
ends with the session or the step. ADR 46 has the reasons.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from shardwright.client.alternatives import Alternative, PlanSearch, describe_plan
from shardwright.client.connection import Preparation
from shardwright.client.limits import HOPELESS_RATIO, HOPELESS_STEPS, NEAR_RATIO, SETTLING_STEPS
from shardwright.client.plan_changes import PlanHistory
from shardwright.client.step_times import StepTimes
from shardwright.client.tuning_record import TuningRow
from shardwright.errors import ShardwrightError

if TYPE_CHECKING:
    from shardwright.client.connection import MasterConnection
    from shardwright.client.step_result import StepResult

_Plans = TypeVar("_Plans")


@dataclass(slots=True, kw_only=True, eq=False)
class Trial(Generic[_Plans]):
    """A plan that runs, or ran.

    name, changes: see `Alternative`. plan: in a word. plans: what the step runs. measured_s: the median of its steps,
    the lower one of two runs; 0.0: not known yet.
    """

    name: str
    plan: str
    predicted_s: float
    plans: _Plans
    changes: Mapping[str, Any] = field(default_factory=dict)
    times: StepTimes
    measured_s: float = 0.0

    @property
    def title(self) -> str:
        """The plan, with the way it was planned."""
        return ": ".join(filter(None, (self.name, self.plan)))


@dataclass(slots=True)
class _Outcome:
    """What the thread leaves."""

    alternatives: list[Alternative] = field(default_factory=list)
    is_over: bool = False


class PlanTrials(Generic[_Plans]):
    """The trials of one step.

    owner: the step; the thread ends with it. first: the plan that runs. signature: of the calls that run it.
    layout_changes: the session's count of them when the plan that runs was made; alternatives are for those layouts.
    """

    def __init__(
        self,
        owner: object,
        master: MasterConnection,
        search: PlanSearch,
        first: Trial[_Plans],
        history: PlanHistory,
        *,
        signature: Hashable,
        layout_changes: int,
    ) -> None:
        self.signature = signature
        self.layout_changes = layout_changes
        self.is_measured = search.is_measured
        self.choices = search.choices
        self.trials = [first]
        self.current = first  # the plan that runs
        self._to_repeat: list[Trial[_Plans]] | None = None  # once all have run
        self._outcome = _Outcome()
        self._preparation = Preparation()
        weakref.finalize(owner, self._preparation.cancel).atexit = False
        arguments = (master, search, self._outcome, self._preparation, history)
        self._thread = threading.Thread(target=_prepare, args=arguments, name="shardwright-plans", daemon=True)
        self._thread.start()

    @property
    def first(self) -> Trial[_Plans]:
        return self.trials[0]

    @property
    def is_over(self) -> bool:
        """Whether nothing will come of it any more."""
        return self._outcome.is_over and not self._outcome.alternatives and len(self.trials) == 1

    def wait(self, timeout_s: float | None) -> bool:
        """Waits for the thread; whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def record(self, result: StepResult, sent_s: float) -> None:
        """A call that runs; it is measured once all alternatives are there, when nothing is computed beside it."""
        if self._outcome.is_over:
            self.current.times.add(result, sent_s)

    def is_current_measured(self) -> bool:
        """Whether the plan that runs has run for long enough: then its time is known."""
        if not self._outcome.is_over:
            return False
        trial = self.current
        median_s = trial.times.median_s()
        others_s = [other.measured_s for other in self.trials if other is not trial]
        if median_s is None and others_s and not trial.measured_s:
            median_s = trial.times.median_s(HOPELESS_STEPS)
            median_s = None if median_s is None or median_s < HOPELESS_RATIO * min(others_s) else median_s
        if median_s is not None:
            trial.measured_s = min(median_s, trial.measured_s or median_s)
        return median_s is not None

    def take_next(self) -> Alternative | None:
        """The alternative that is to be tried next."""
        return self._outcome.alternatives.pop(0) if self._outcome.alternatives else None

    def take_near(self) -> Trial[_Plans] | None:
        """The trial that is to be repeated next."""
        if self._to_repeat is None:
            least_s = self.fastest().measured_s
            near = [trial for trial in self.trials if trial.measured_s <= NEAR_RATIO * least_s]
            near.sort(key=lambda trial: trial is self.current)  # it has just run
            self._to_repeat = near if self.is_measured and len(near) > 1 else []
        return self._to_repeat.pop(0) if self._to_repeat else None

    def begin(self, trial: Trial[_Plans], layout_changes: int) -> None:
        """The step has switched."""
        if trial not in self.trials:
            self.trials.append(trial)
        self.current, self.layout_changes = trial, layout_changes
        trial.times = StepTimes(skipped=SETTLING_STEPS)

    def fastest(self) -> Trial[_Plans]:
        """By measurement; of equal ones the first."""
        return min(self.trials, key=lambda trial: trial.measured_s)

    def rows(self) -> list[TuningRow]:
        """What was measured."""
        fastest = self.fastest()
        return [
            TuningRow(
                plan=trial.title,
                changes=trial.changes,
                predicted_s=trial.predicted_s,
                measured_s=trial.measured_s,
                is_kept=trial is fastest,
            )
            for trial in self.trials
        ]

    def cancel(self) -> None:
        """Ends them, the search on the server too; the thread ends by itself."""
        self._preparation.cancel()
        self._outcome.alternatives, self._outcome.is_over = [], True


def start_trial(alternative: Alternative, plans: _Plans) -> Trial[_Plans]:
    """A trial of an alternative that the step runs from now on."""
    plan = alternative.loaded.plan
    return Trial(
        name=alternative.name,
        plan=describe_plan(plan),
        predicted_s=alternative.predicted_s,
        plans=plans,
        changes=alternative.changes,
        times=StepTimes(skipped=SETTLING_STEPS),
    )


def _prepare(
    master: MasterConnection, search: PlanSearch, outcome: _Outcome, preparation: Preparation, history: PlanHistory
) -> None:
    """The thread."""
    try:
        with master.preparation(preparation):
            alternatives = search.prepare(master, history)
        if not preparation.is_cancelled:
            outcome.alternatives = alternatives
    except Exception as error:
        if not (preparation.is_cancelled or master.is_closed):
            history.add("search ended", error.message if isinstance(error, ShardwrightError) else repr(error))
    finally:
        outcome.is_over = True
