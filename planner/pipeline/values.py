"""The values of a pipeline: their layouts on every stage that has them, and their data for tasks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from shardwright.cost.peak.memory import shard_bytes
from shardwright.errors import PlanCheckError
from shardwright.planner.pipeline.boundary import Values, idle_argument_plan
from shardwright.planner.pipeline.step import INDEX, PipelineStep, argument_value
from shardwright.planner.pipeline.update_programs import UpdatePrograms
from shardwright.plans.pipeline_plan import PipelineProgram, PipelineValue
from shardwright.plans.shardings import Mesh
from shardwright.tasks import ProgramSpec, Scope, StepValue

#: Programs that run once for every micro-batch.
_PER_MICRO_BATCH = frozenset({"split", "forward", "backward"})


def values_of(step: PipelineStep, applied: UpdatePrograms, programs: Sequence[PipelineProgram]) -> Values:
    """Every value on each of its stages, by (name, stage).

    Raises PlanCheckError if two programs of a stage have it in different layouts (a defect of the planner).
    """
    values: dict[tuple[str, int], PipelineValue] = {}
    for program, value in _value_uses(programs):
        first = values.setdefault((value.name, value.stage), value)
        if first != value:
            raise PlanCheckError(
                f"{value.name} lies as {value.variable.sharding} here and as {first.variable.sharding} in another "
                f"program of stage {value.stage}",
                where=program.name,
            )
    for number, stage in _unread_values(step, applied, values):
        name, variable = argument_value(number), idle_argument_plan(step, number, stage)
        values[name, stage] = PipelineValue(name=name, stage=stage, scope="step", variable=variable)
    return values


def _value_uses(programs: Sequence[PipelineProgram]) -> Iterator[tuple[PipelineProgram, PipelineValue]]:
    """Values read and written by programs, in order."""
    per_micro_batch = {
        value
        for program in programs
        if program.kind in _PER_MICRO_BATCH
        for value in program.writes
        if value not in program.donates
    }
    for program in programs:
        reads = zip(program.reads, program.plan.parameters, strict=True)
        writes = zip(program.writes, program.plan.outputs, strict=True)
        for name, variable in (*reads, *writes):
            if name != INDEX:
                scope: Scope = "micro_batch" if name in per_micro_batch else "step"
                plain = replace(variable, number=0, name=name, alias=None, view_of=None)
                yield program, PipelineValue(name=name, stage=program.stage, scope=scope, variable=plain)


def _unread_values(
    step: PipelineStep, applied: UpdatePrograms, values: dict[tuple[str, int], PipelineValue]
) -> Iterator[tuple[int, int]]:
    """(argument, stage) of arguments that a stage keeps for others, or returns unchanged, without computing on them."""
    names = {name for name, _ in values}
    handed_out = {value for value, _ in applied.outputs}
    stages = dict(applied.outputs)
    for number in range(len(step.arguments)):
        name = argument_value(number)
        if (
            number in applied.stage_of_argument
            and name in names | handed_out
            and (name, applied.stage_of_argument[number]) not in values
        ):
            yield number, applied.stage_of_argument[number]
        elif name in handed_out and (name, stages[name]) not in values:
            yield number, stages[name]


# ---- for tasks -----------------------------------------------------------------


def device_bytes(value: PipelineValue, mesh: Mesh) -> int:
    """Bytes of a value on one device of its stage."""
    variable = value.variable
    return shard_bytes(variable.element_type, variable.stored_shape, variable.stored_sharding, mesh)


def task_values(step: PipelineStep, values: Values) -> tuple[StepValue, ...]:
    """The values for tasks. Bytes sent by a device: the maximum over the devices of both sides."""
    sizes: dict[str, dict[int, int]] = {}
    scopes: dict[str, Scope] = {}
    for value in values.values():
        sizes.setdefault(value.name, {})[value.stage] = device_bytes(value, step.layouts[value.stage].mesh)
        scopes[value.name] = value.scope
    return tuple(
        StepValue(
            name=name,
            scope=scopes[name],
            sizes=of_stage,
            sent_bytes=max(of_stage.values()) if len(of_stage) > 1 else 0,
        )
        for name, of_stage in sizes.items()
    )


def task_piece(program: PipelineProgram) -> ProgramSpec:
    """A program for tasks."""
    return ProgramSpec(
        program=program.name,
        kind=program.kind,
        stage=program.stage,
        chunk=program.chunk,
        reads=program.reads,
        writes=program.writes,
        donates=program.donates,
        time_s=program.plan.cost.step_s,
        workspace_bytes=program.plan.memory.temporaries_bytes,
    )
