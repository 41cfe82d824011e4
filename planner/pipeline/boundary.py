"""A pipeline's boundary: the user's arguments and outputs, mapped to entries of stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwright.hlo import Module
from shardwright.planner.pipeline.step import PipelineStep, argument_value, array, batch_stack_value
from shardwright.planner.pipeline.update_programs import UpdatePrograms
from shardwright.plans.pipeline_plan import ArgumentEntry, OutputEntry, PipelineValue
from shardwright.plans.plan import VariablePlan

#: Values by name and stage.
Values = Mapping[tuple[str, int], PipelineValue]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The origin of an argument or output of the planned program: the user's flat number, and its rows.

    name: the user's name. dims: dimensions of the user's array, or of those rows of it.
    """

    number: int
    name: str
    dims: tuple[int, ...]
    rows: tuple[int, int] | None = None


def origins(
    module: Module, names: tuple[Sequence[str], Sequence[str]]
) -> tuple[tuple[Origin, ...], tuple[Origin, ...]]:
    """Origins of the (arguments, outputs) of a program that is the user's own."""
    parameters = sorted(module.entry.parameters, key=lambda parameter: parameter.index)
    sides = [leaf for parameter in parameters for leaf in parameter.shape.leaves], module.entry.root.shape.leaves
    arguments, outputs = (
        tuple(
            Origin(number=i, name=name, dims=leaf.dimensions)
            for i, (name, leaf) in enumerate(zip(own, side, strict=True))
        )
        for own, side in zip(names, sides, strict=True)
    )
    return arguments, outputs


def argument_entries(
    step: PipelineStep, applied: UpdatePrograms, values: Values, origins: Sequence[Origin]
) -> tuple[ArgumentEntry, ...]:
    """One entry for every argument and stage that has it from the start.

    An argument that is replaced every step is kept by one stage and sent to others; every other argument goes to each
    stage that reads it.
    """
    return tuple(_argument_entries(step, applied, values, origins))


def _argument_entries(
    step: PipelineStep, applied: UpdatePrograms, values: Values, origins: Sequence[Origin]
) -> Iterator[ArgumentEntry]:
    passed_on = set(applied.outputs)
    for number, origin in enumerate(origins):
        whole, parts = argument_value(number), batch_stack_value(number)
        if number in applied.stage_of_argument:
            stages = [applied.stage_of_argument[number]] if _is_there(whole, values, passed_on) else []
        else:
            stages = [
                stage for stage in range(step.stage_count) if (whole, stage) in values or (whole, stage) in passed_on
            ]
        for stage in stages:
            yield _argument_entry(step, values, number, whole, stage, origin)
        for stage in range(step.stage_count):
            if (parts, stage) in values:
                yield _argument_entry(step, values, number, parts, stage, origin)


def _is_there(value: str, values: Values, passed_on: set[tuple[str, int]]) -> bool:
    return any(name == value for name, _ in (*values, *passed_on))


def _argument_entry(
    step: PipelineStep, values: Values, number: int, value: str, stage: int, origin: Origin
) -> ArgumentEntry:
    pipeline_value = values.get((value, stage))
    variable = pipeline_value.variable if pipeline_value is not None else idle_argument_plan(step, number, stage)
    return ArgumentEntry(
        argument=origin.number, stage=stage, value=value, variable=_users(variable, origin), rows=origin.rows
    )


def idle_argument_plan(step: PipelineStep, number: int, stage: int) -> VariablePlan:
    """The layout of an argument on a stage that computes nothing with it."""
    shape, layouts = array(step.arguments[number]), step.layouts[stage]
    name, sharding = argument_value(number), layouts.argument(number)
    return VariablePlan.from_sharding(0, name, shape.element_type, shape.dimensions, sharding, layouts.mesh)


def _users(variable: VariablePlan, origin: Origin) -> VariablePlan:
    """The variable with the user's name and dimensions."""
    view_of = None if variable.shape == origin.dims else origin.dims
    return replace(variable, number=origin.number, name=origin.name, alias=None, view_of=view_of)


def output_entries(
    step: PipelineStep,
    applied: UpdatePrograms,
    values: Values,
    arguments: Sequence[ArgumentEntry],
    origins: Sequence[Origin],
) -> tuple[OutputEntry, ...]:
    """One entry for every output of the planned program, in order."""
    at = {(entry.value, entry.stage): position for position, entry in enumerate(arguments)}
    entries = []
    for number, ((value, stage), origin) in enumerate(zip(applied.outputs, origins, strict=True)):
        variable = _users(values[value, stage].variable, origin)
        alias = None
        if number in step.aliases:
            alias = at.get((argument_value(step.aliases[number]), applied.stage_of_argument[step.aliases[number]]))
        entries.append(
            OutputEntry(
                output=origin.number, stage=stage, value=value, variable=variable, alias=alias, rows=origin.rows
            )
        )
    return tuple(entries)
