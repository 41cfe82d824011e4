"""Plans that may replace the one that runs: searched for, compiled and loaded beside it.

One of them is the plan of the whole search, where the step began with the first one that fits. Others are runners-up,
for `effort="measured"`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shardwright.builders.choices import PlanChoice, predicted_step_s, take_fastest
from shardwright.builders.runner_ups import RunnerUp, list_runner_ups
from shardwright.client.limits import MAX_RUNNER_UP_RATIO, MAX_RUNNER_UPS, MIN_PLAN_GAIN
from shardwright.client.plan_changes import PlanHistory
from shardwright.client.programs import LoadedPlan, to_loaded_plan
from shardwright.errors import AnnotationError, CompilationError, OptionError, PlanError
from shardwright.options.plan_options import PlanOptions
from shardwright.plans.plan import Plan as BasePlan
from shardwright.user_plans import PipelinePlan, Plan

if TYPE_CHECKING:
    from shardwright.client.connection import MasterConnection
    from shardwright.clusters.cluster import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A loaded plan.

    name: the way it was planned, in a word; "": by the whole search. changes: see `RunnerUp`. choices: the ways to plan
    of which it is the fastest, by which equal functions find it.
    """

    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    choices: tuple[PlanChoice, ...]
    loaded: LoadedPlan

    @property
    def predicted_s(self) -> float:
        """Seconds a step."""
        return predicted_step_s(self.loaded.plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSearch:
    """What is planned beside a step: its program, the ways to plan it, and the plan that runs.

    running_choice: name of the choice that the running plan is of. is_first: whether its search ended with the first
    plan that fits. is_measured: whether runners-up are wanted.
    """

    hlo_text: str
    choices: tuple[PlanChoice, ...]
    running: Plan | PipelinePlan
    running_choice: str
    is_first: bool
    is_measured: bool
    cluster: Cluster

    def prepare(self, master: MasterConnection, history: PlanHistory) -> list[Alternative]:
        """The plans that are worth a trial, loaded; takes as long as their searches, and tells `history` of them."""
        program_id = master.upload_program(self.hlo_text)

        def plan(options: PlanOptions) -> tuple[str, Plan | PipelinePlan]:
            return master.plan(program_id, self.hlo_text, options, lambda progress: None, in_background=True)

        alternatives: list[Alternative] = []
        if self.is_first:
            alternatives += self._prepare_searched(master, history, plan)
        if self.is_measured:
            earlier_plans = [self.running, *(alternative.loaded.plan for alternative in alternatives)]
            alternatives += self._prepare_runner_ups(master, history, plan, earlier_plans)
        return alternatives

    def _prepare_searched(self, master: MasterConnection, history: PlanHistory, plan: _Planning) -> list[Alternative]:
        """The plan of the whole search, unless it is hardly better."""
        choice, (plan_id, searched), others = take_fastest(self.choices, plan, lambda planned: planned[1])
        gain = self._gain(searched)
        if gain <= MIN_PLAN_GAIN:
            history.add("no better plan", describe_plan(searched), predicted_s=predicted_step_s(searched), gain=gain)
            return []
        loaded = to_loaded_plan(choice, searched, others, _load(master, plan_id))
        history.add("better plan", describe_plan(searched), predicted_s=predicted_step_s(searched), gain=gain)
        return [Alternative(name="", choices=self.choices, loaded=loaded)]

    def _prepare_runner_ups(
        self,
        master: MasterConnection,
        history: PlanHistory,
        plan: _Planning,
        earlier_plans: Sequence[Plan | PipelinePlan],
    ) -> list[Alternative]:
        """Those that can be planned, are unlike the known plans, and are predicted to be near; the nearest first."""
        planned: list[tuple[RunnerUp, str, Plan | PipelinePlan]] = []
        contents = {_contents(each) for each in earlier_plans}
        for runner_up in list_runner_ups(self.choices, self.running_choice, self.running, self.cluster):
            try:
                plan_id, other = plan(runner_up.choice.options)
            except (PlanError, AnnotationError, OptionError) as error:
                history.add("left out", f"{runner_up.name}: {error.message}")
                continue
            if _contents(other) not in contents and self._gain(other) > 1.0 - MAX_RUNNER_UP_RATIO:
                contents.add(_contents(other))
                planned.append((runner_up, plan_id, other))
        planned.sort(key=lambda each: predicted_step_s(each[2]))
        loaded = [self._load_runner_up(master, history, *each) for each in planned[:MAX_RUNNER_UPS]]
        alternatives = [alternative for alternative in loaded if alternative is not None]
        if not alternatives:
            history.add(
                "no runner-up", f"no other plan is predicted to take up to {MAX_RUNNER_UP_RATIO:g} times its step"
            )
        return alternatives

    def _load_runner_up(
        self,
        master: MasterConnection,
        history: PlanHistory,
        runner_up: RunnerUp,
        plan_id: str,
        plan: Plan | PipelinePlan,
    ) -> Alternative | None:
        """None where XLA does not compile it."""
        try:
            load = _load(master, plan_id)
        except CompilationError as error:
            history.add("left out", f"{runner_up.name}: {error.message}")
            return None
        text = f"{runner_up.name}: {describe_plan(plan)}"
        history.add("runner-up", text, predicted_s=predicted_step_s(plan), gain=self._gain(plan))
        return Alternative(
            name=runner_up.name,
            changes=runner_up.changes,
            choices=(runner_up.choice,),
            loaded=to_loaded_plan(runner_up.choice, plan, (), load),
        )

    def _gain(self, other: Plan | PipelinePlan) -> float:
        """The part of the running plan's predicted step that another one saves."""
        running_s = predicted_step_s(self.running)
        return 1.0 - predicted_step_s(other) / running_s if running_s else 0.0


_Planning = Callable[[PlanOptions], tuple[str, Plan | PipelinePlan]]


def describe_plan(plan: Plan | PipelinePlan) -> str:
    """A plan in a word."""
    return f"{len(plan.stages)} stages" if isinstance(plan, PipelinePlan) else str(plan.mesh)


def _contents(plan: BasePlan | PipelinePlan) -> object:
    """Equal for plans that run the same programs."""
    if isinstance(plan, PipelinePlan):
        return tuple((program.name, _contents(program.plan)) for program in plan.programs), plan.tasks
    return plan.hlo_sha256, plan.mesh, plan.instructions, tuple(sorted(plan.compile_options.items()))


def _load(master: MasterConnection, plan_id: str) -> Any:
    return master.load(plan_id, lambda phase, elapsed_s: None)
