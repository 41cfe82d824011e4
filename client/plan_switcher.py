"""Which of a step's plans runs, while others are tried; ADR 46 has the reasons.

The first plan runs. Others, made beside it (`alternatives.py`), take over between two calls, the state moves with them,
and the fastest by measurement stays (`plan_trials.py`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from shardwright.builders.choices import predicted_step_s
from shardwright.client.alternatives import Alternative, PlanSearch, describe_plan
from shardwright.client.arrays import RemoteArray
from shardwright.client.plan_changes import PlanHistory
from shardwright.client.plan_set import PlanSet
from shardwright.client.plan_trials import PlanTrials, Trial, start_trial
from shardwright.client.programs import StepProgram
from shardwright.client.resharding import move_leaves
from shardwright.client.step_programs import StepPrograms
from shardwright.client.step_queue import StepQueue
from shardwright.client.step_result import StepResult
from shardwright.client.step_times import StepTimes
from shardwright.client.tuning_record import record_path, write_record
from shardwright.errors import ShardwrightError


class PlanSwitcher:
    """Of one step; what is searched for ends with it."""

    def __init__(self, steps: StepQueue, programs: StepPrograms, history: PlanHistory) -> None:
        self._steps = steps
        self._programs = programs
        self._history = history
        self._trials: PlanTrials[PlanSet] | None = None

    @property
    def is_settled(self) -> bool:
        """Whether no other plan is looked for or tried any more."""
        programs = self._programs
        has_trials = self._trials is not None and not self._trials.is_over
        return programs.plans.main is not None and programs.unexplored is None and not has_trials

    def wait(self, timeout_s: float | None) -> bool:
        """Waits until no plan is searched for, compiled or loaded; whether that is so."""
        return self._trials is None or self._trials.wait(timeout_s)

    def cancel(self) -> None:
        """Ends what is searched for; may be called from another thread."""
        if self._trials is not None:
            self._trials.cancel()

    def end(self) -> None:
        """The plan that runs stays."""
        self.cancel()
        self._trials = None

    def start(self) -> None:
        """Looks for other plans beside the first one: a better one where its search ended early, runners-up."""
        programs = self._programs
        planned, programs.unexplored = programs.unexplored, None
        if planned is None:
            return
        first = planned.program
        self._history.add(
            "first plan",
            describe_plan(first.plan),
            planning_s=first.plan.planning_s,
            predicted_s=predicted_step_s(first.plan),
        )
        search = PlanSearch(
            hlo_text=first.lowered.hlo_text,
            choices=tuple(planned.choices),
            running=first.plan,
            running_choice=first.choice,
            is_first=first.is_first,
            is_measured=programs.planner.is_measured,
            cluster=self._steps.cluster.info.cluster,
        )
        self._trials = PlanTrials(
            self,
            self._steps.cluster.master,
            search,
            Trial(
                name=first.choice,
                plan=describe_plan(first.plan),
                predicted_s=predicted_step_s(first.plan),
                plans=programs.plans,
                times=StepTimes(skipped=1),
            ),
            self._history,
            signature=programs.plans.main_signature,
            layout_changes=self._steps.layout_changes,
        )

    def record(self, program: StepProgram, results: Sequence[StepResult], sent_s: float) -> None:
        """Calls that run."""
        if self._trials is not None and program is self._programs.plans.main:
            for result in results:
                self._trials.record(result, sent_s)

    def follow(self, signature: Hashable, leaves: Sequence[Any]) -> None:
        """Before a call: tries the next plan, or stays with the fastest, whatever is due."""
        trials = self._trials
        if trials is None:
            return
        if trials.is_over:
            self.end()
        elif signature == trials.signature and trials.is_current_measured():
            if (alternative := trials.take_next()) is not None:
                self._try(trials, alternative, leaves)
            elif (near := trials.take_near()) is not None:
                if self._return_to(near.plans, leaves):
                    trials.begin(near, self._steps.layout_changes)
            else:
                self._settle(trials, leaves)

    def _try(self, trials: PlanTrials[PlanSet], alternative: Alternative, leaves: Sequence[Any]) -> None:
        """The alternative runs from now on, and is measured."""
        main = self._programs.require_main()
        if main.epoch != self._steps.cluster.epoch:
            self.end()
            return
        program = self._steps.programs.adopt(main.lowered, alternative.choices, alternative.loaded)
        if trials.layout_changes != self._steps.layout_changes:
            self._history.add("search ended", "the state lies otherwise by now, for another step")
            self.end()
        elif self._move_or_stay(program, leaves):
            plans = self._programs.plans.with_main(program)
            self._programs.run_plans(plans)
            trials.begin(start_trial(alternative, plans), self._steps.layout_changes)
            self._history.add("switched", describe_plan(program.plan), predicted_s=predicted_step_s(program.plan))

    def _return_to(self, plans: PlanSet, leaves: Sequence[Any]) -> bool:
        """Whether plans that have run before run from now on."""
        assert plans.main is not None
        if plans.main is not self._programs.plans.main:
            if not self._move_or_stay(plans.main, leaves):
                return False
            self._programs.run_plans(plans)
        return True

    def _settle(self, trials: PlanTrials[PlanSet], leaves: Sequence[Any]) -> None:
        """The fastest plan by measurement runs from now on; where it is the first one, that comes back."""
        fastest, first = trials.fastest(), trials.first
        if not self._return_to(fastest.plans, leaves):
            return
        others = [trial for trial in trials.trials if trial is not first]
        if trials.is_measured:
            for trial in others:
                self._history.add("measured", trial.title, predicted_s=trial.predicted_s, after_s=trial.measured_s)
            self._write_record(trials)
        is_first = fastest is first
        after_s = min(trial.measured_s for trial in others) if is_first else fastest.measured_s
        self._history.add("went back" if is_first else "kept", fastest.plan, before_s=first.measured_s, after_s=after_s)
        self.end()

    def _write_record(self, trials: PlanTrials[PlanSet]) -> None:
        """For `ProgramPlanner`, in another run."""
        identity = self._programs.require_main().lowered.identity
        path = record_path(self._programs.planner.name, identity, trials.choices, self._steps.cluster.info.cluster)
        if path is not None:
            write_record(path, trials.rows())

    def _move_or_stay(self, program: StepProgram, leaves: Sequence[Any]) -> bool:
        """Whether the state of a call was moved to a program's layouts; else all stays as it is."""
        self._steps.raise_earlier_error()  # it is not the move's
        donated = set(program.donated)
        mine = [
            leaf if isinstance(leaf, RemoteArray) and (number in donated or not leaf._is_owned) else None
            for number, leaf in enumerate(leaves)
        ]
        try:
            move_leaves(self._steps, mine, program.leaf_places)
        except ShardwrightError as error:
            self._history.add("search ended", f"the state cannot be moved to {describe_plan(program.plan)}: {error}")
            self.end()
            return False
        return True
