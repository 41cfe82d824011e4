"""From a builder to plans: the ways to plan a step, and the fastest plan of them by prediction."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from shardwright.builders.auto import Auto
from shardwright.builders.base import Builder
from shardwright.builders.variables import Variable, read_variables
from shardwright.clusters.cluster import Cluster
from shardwright.errors import AnnotationError, OptionError, PlanError
from shardwright.hlo import Module
from shardwright.options.plan_options import REPLICATED, Pin, PlanOptions, TensorPins
from shardwright.options.user_options import bucket_bytes, check_limits, plan_options
from shardwright.plans.pipeline_plan import PipelinePlan
from shardwright.plans.plan import Candidate, Plan
from shardwright.plans.plan_text import plan_from_json
from shardwright.plans.variable_strategy import VariableStrategy
from shardwright.spelling import did_you_mean

_Planned = TypeVar("_Planned")
_Plan = TypeVar("_Plan", bound=Plan | PipelinePlan)

#: The mesh axis of variables and batch under a builder, by default.
DATA_AXIS = "data"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChoice:
    """One way to plan a step.

    name: the builder's `repr`; "" for the user's own options. strategies, notes: for the plan's document.
    """

    options: PlanOptions
    name: str = ""
    strategies: Mapping[str, VariableStrategy] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def record(self, plan: _Plan) -> _Plan:
        """The plan with the builder's name, strategies and notes."""
        if isinstance(plan, PipelinePlan) or not self.name:
            return plan
        notes = (*plan.notes, *self.notes)
        return replace(plan, origin=f"strategy: {self.name}", strategies=dict(self.strategies), notes=notes)


def read_options(options: Mapping[str, Any]) -> tuple[Builder | None, PlanOptions]:
    """Check the user's options: (the builder given as `force` or None, the options).

    Raises OptionError, and PlanError naming the wrong field of a given plan.
    """
    builder = options.get("force")
    if isinstance(builder, type) and issubclass(builder, Builder):
        raise OptionError(
            f"{builder.__name__} is a class of builders", where="force", remedy=f"pass one: {builder.__name__}()"
        )
    if not isinstance(builder, Builder):
        checked = plan_options(**options)
        if checked.plan_json:
            plan_from_json(checked.plan_json)  # a wrong field is said here, before anything is lowered or sent
        return None, checked
    checked = plan_options(**{**options, "force": None})
    _check_beside_builder(builder, checked)
    return builder, checked


def _check_beside_builder(builder: Builder, options: PlanOptions) -> None:
    """Raises OptionError on an option that a builder leaves no room for."""
    for option, is_given in (
        ("plan_json", bool(options.plan_json)),
        ("rest", options.rest != "search"),
        ("mode", options.mode != "search"),
        ("stages", (options.stages or 1) > 1),
    ):
        if is_given and not (isinstance(builder, Auto) and option == "stages"):
            said = "plan=" if option == "plan_json" else f"{option}={getattr(options, option)!r}"
            raise OptionError(
                f"{said} and force={builder!r}, which says all arguments and plans one program",
                where=option.removesuffix("_json"),
                remedy="leave one of them out",
            )


#: Option → fields of `PlanOptions`, where they have other names.
_FIELDS_OF_OPTION = {
    "bucket": ("bucket_bytes",),
    "deadline": ("deadline_s",),
    "memory_budget": ("memory_budget", "memory_fraction"),
    "plan": ("plan_json",),
}


def change_options(
    builder: Builder | None, options: PlanOptions, changes: Mapping[str, Any]
) -> tuple[Builder | None, PlanOptions]:
    """A builder and options, with some options given anew by the user; None leaves the choice to the planner.

    A plan takes the place of all choices before it, and gives way to any choice after it.

    Raises OptionError on a wrong option, and on one that contradicts those that stay.
    """
    new_builder, given = read_options(changes)
    if given.plan_json:
        limits = ("deadline_s", "memory_budget", "memory_fraction")
        stay = {name: getattr(options, name) for name in limits if getattr(given, name) is None}
        return None, replace(given, **stay)
    options = replace(options, plan_json="")
    fields = [field for name in changes for field in _FIELDS_OF_OPTION.get(name, (name,))]
    changed = replace(options, **{field: getattr(given, field) for field in fields})
    builder = new_builder if "force" in changes else builder
    if builder is None and changed.rest != "search" and changed.force is None:
        changed = replace(changed, force={})  # rest= says it of all arguments
    elif changed.rest == "search" and changed.force == {}:
        changed = replace(changed, force=None)
    check_limits(changed)
    if builder is not None:
        _check_beside_builder(builder, changed)
    return builder, changed


def list_choices(
    builder: Builder | None,
    options: PlanOptions,
    cluster: Cluster,
    program: Callable[[], tuple[Module, Sequence[str], Mapping[int, int]]],
) -> tuple[PlanChoice, ...]:
    """The ways to plan a step under a builder; without a builder the options alone.

    program: returns the step's module, the names of its arguments, and output → argument updated in place, by flat
        number.
    Raises OptionError for strategies of unknown variables.
    """
    if builder is None:
        return (PlanChoice(options=options),)
    module, names, aliases = program()
    variables = read_variables(module, names, aliases)
    if not isinstance(builder, Auto):
        return (_build_choice(builder, variables, options, cluster),)
    search = options if options.bucket_bytes is not None else _with_bucket(options, builder.bucket)
    choices = [_build_choice(candidate, variables, search, cluster) for candidate in builder.builders]
    different: dict[str, PlanChoice] = {}
    for choice in choices:
        different.setdefault(repr((choice.options, choice.strategies)), choice)
    return (PlanChoice(options=search), *different.values())


def take_fastest(
    choices: Sequence[PlanChoice],
    make: Callable[[PlanOptions], _Planned],
    plan_of: Callable[[_Planned], Plan | PipelinePlan],
) -> tuple[PlanChoice, _Planned, tuple[Candidate, ...]]:
    """Plan all choices: (the choice with the shortest predicted step, its plan, the others as candidates).

    Choices without a plan are left out. Raises the first one's error if no choice has a plan.
    """
    if len(choices) == 1:
        return choices[0], make(choices[0].options), ()
    results: list[tuple[PlanChoice, _Planned]] = []
    problems: list[Exception] = []
    started_s = time.monotonic()
    for number, choice in enumerate(choices):
        left_s = (choice.options.deadline_s or math.inf) - (time.monotonic() - started_s)
        if left_s <= 0 and results:
            break
        try:
            results.append((choice, make(_share_deadline(choice.options, left_s, len(choices) - number))))
        except (PlanError, AnnotationError) as problem:
            problems.append(problem)
    if not results:
        raise problems[0]
    best, chosen = min(results, key=lambda pair: predicted_step_s(plan_of(pair[1])))
    others = [(choice, plan_of(result)) for choice, result in results if choice is not best]
    return (
        best,
        chosen,
        tuple(
            Candidate(mesh=plan.mesh, step_s=plan.cost.step_s, name=choice.name or "search")
            for choice, plan in others
            if isinstance(plan, Plan)
        ),
    )


def take_first(
    choices: Sequence[PlanChoice], make: Callable[[PlanOptions], _Planned]
) -> tuple[PlanChoice, _Planned, tuple[Candidate, ...]]:
    """The first choice that can be planned, as `take_fastest`."""
    for choice in choices[:-1]:
        try:
            return choice, make(choice.options), ()
        except (PlanError, AnnotationError):
            pass
    return choices[-1], make(choices[-1].options), ()


def _share_deadline(options: PlanOptions, left_s: float, plans: int) -> PlanOptions:
    """The options with a deadline for one of the remaining plans: half of the time left, all of it for the last."""
    if left_s == math.inf:
        return options
    return replace(options, deadline_s=max(left_s if plans == 1 else left_s / 2, 0.1))


def add_candidates(plan: _Plan, candidates: Sequence[Candidate]) -> _Plan:
    """The plan with the compared plans among its candidates."""
    if isinstance(plan, PipelinePlan) or not candidates:
        return plan
    return replace(plan, candidates=(*plan.candidates, *candidates))


def predicted_step_s(plan: Plan | PipelinePlan) -> float:
    """Seconds a step by prediction."""
    return plan.step_s if isinstance(plan, PipelinePlan) else plan.cost.step_s


def _build_choice(
    builder: Builder, variables: Sequence[Variable], options: PlanOptions, cluster: Cluster
) -> PlanChoice:
    answer = builder.build(variables, cluster)
    _check_strategies(builder, answer, variables)
    strategies = {variable.name: answer.get(variable.name, VariableStrategy()) for variable in variables}
    mesh = dict(options.mesh or {DATA_AXIS: cluster.device_count})
    axes = tuple(mesh)
    pins = {name: pin for variable in variables for name, pin in _list_pins(variable, strategies[variable.name], axes)}
    if options.bucket_bytes is None:
        options = _with_bucket(options, builder.bucket)
    return PlanChoice(
        options=replace(options, force=pins, rest="data", mesh=mesh),
        name=repr(builder),
        strategies=strategies,
        notes=tuple(builder.notes(strategies)),
    )


def _with_bucket(options: PlanOptions, bucket: int | str | None) -> PlanOptions:
    return replace(options, bucket_bytes=bucket_bytes(bucket))


def _list_pins(variable: Variable, strategy: VariableStrategy, axes: tuple[str, ...]) -> list[tuple[str, TensorPins]]:
    """(argument name, pins) of a variable and its slots."""
    if strategy.split is None:
        return [(name, REPLICATED) for name in (variable.name, *variable.slots)]
    split: Pin = axes[0] if len(axes) == 1 else axes
    pins: TensorPins = {dim: split if dim == strategy.split else None for dim in range(len(variable.shape))}
    own: TensorPins = pins if strategy.splits_variable else REPLICATED
    return [(variable.name, own), *((slot, pins) for slot in variable.slots)]


def _check_strategies(builder: Builder, answer: object, variables: Sequence[Variable]) -> None:
    """Raises OptionError unless a builder's answer maps these variables' names to strategies."""
    where = f"{builder.name}.build"
    if not isinstance(answer, Mapping):
        raise OptionError(
            f"it returned {type(answer).__name__}", where=where, remedy="return {variable.name: VariableStrategy(…)}"
        )
    variable_of = {variable.name: variable for variable in variables}
    for name, strategy in answer.items():
        if name not in variable_of:
            some = ", ".join(list(variable_of)[:8])
            remedy = did_you_mean(str(name), variable_of) or (
                f"the variables are {some}" if variable_of else "donate its state"
            )
            raise OptionError(f"no variable is named {name!r}", where=where, remedy=remedy)
        if not isinstance(strategy, VariableStrategy):
            raise OptionError(
                f"the strategy of {name} is {strategy!r}", where=where, remedy="write VariableStrategy(split=0)"
            )
        rank, split = len(variable_of[name].shape), strategy.split
        if split is not None and not (type(split) is int and 0 <= split < rank):
            raise OptionError(
                f"{name} of {list(variable_of[name].shape)} has no dimension {split!r} to split",
                where=where,
                remedy=f"split one of 0 to {rank - 1}, or None" if rank else "leave a scalar whole",
            )
