"""Consistency checks of a finished PipelinePlan: programs, values, stages and tasks fit together.

Each program was checked against its module on creation (`verify`); tasks check that their lists can be run to the end.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.errors import PlanCheckError
from shardwright.plans.pipeline_plan import MICRO_BATCH, PipelinePlan, PipelineProgram
from shardwright.plans.plan import VariablePlan


def check_pipeline(plan: PipelinePlan) -> None:
    """Raises PlanCheckError with a list of all problems."""
    problems = [*_stages(plan), *_programs(plan), *_boundary(plan), *_tasks(plan)]
    if problems:
        raise PlanCheckError(
            f"{len(problems)} problem(s) in the pipeline:\n" + "\n".join(f"  {problem}" for problem in problems[:20]),
            where=f"plan of {plan.module_name}",
            remedy="this is a defect of the planner: report it with the HLO text",
        )
    plan.tasks.check()


def _stages(plan: PipelinePlan) -> Iterator[str]:
    owners: dict[int, int] = {}
    for number, stage in enumerate(plan.stages):
        if stage.number != number:
            yield f"stage {stage.number} stands at {number}"
        for device in stage.devices:
            if device in owners:
                yield f"device {device} is of stage {owners[device]} and of stage {number}"
            owners[device] = number


def _programs(plan: PipelinePlan) -> Iterator[str]:
    names = [program.name for program in plan.programs]
    yield from (f"{name}: two programs of that name" for name in sorted(set(names)) if names.count(name) > 1)
    for program in plan.programs:
        if not 0 <= program.stage < len(plan.stages) or program.plan.mesh != plan.stages[program.stage].mesh:
            yield f"{program.name}: not on the mesh of stage {program.stage}"
            continue
        for names_of, variables in ((program.reads, program.plan.parameters), (program.writes, program.plan.outputs)):
            if len(names_of) != len(variables):
                yield f"{program.name}: {len(names_of)} values for {len(variables)} arrays"
                continue
            for name, variable in zip(names_of, variables, strict=True):
                yield from _value(plan, program, name, variable)


def _value(plan: PipelinePlan, program: PipelineProgram, name: str, variable: VariablePlan) -> Iterator[str]:
    if name == MICRO_BATCH:
        return
    value = plan.value.get((name, program.stage))
    if value is None:
        yield f"{program.name}: {name} is no value of stage {program.stage}"
    elif _layout_of(value.variable) != _layout_of(variable):
        yield f"{program.name}: {name} lies as {variable.sharding}, on its stage as {value.variable.sharding}"


def _layout_of(variable: VariablePlan) -> tuple[object, ...]:
    return variable.element_type, variable.shape, variable.sharding, variable.stored_shape


def _boundary(plan: PipelinePlan) -> Iterator[str]:
    for entry in plan.arguments:
        if (entry.value, entry.stage) not in plan.value:
            yield f"argument {entry.argument} is {entry.value}, which stage {entry.stage} has not"
    for output in plan.outputs:
        if (output.value, output.stage) not in plan.value:
            yield f"output {output.output} is {output.value}, which stage {output.stage} has not"
        elif output.variable.is_stacked:
            yield f"output {output.output} is partial: nothing reduces it"
        if output.alias is not None and _layout_of(plan.arguments[output.alias].variable) != _layout_of(
            output.variable
        ):
            replaced = plan.arguments[output.alias].argument
            yield f"output {output.output} does not lie as argument {replaced} that it replaces"


def _tasks(plan: PipelinePlan) -> Iterator[str]:
    for stage, tasks in enumerate(plan.tasks.stages):
        for task in tasks:
            if task.kind == "send" and plan.value[task.reads[0].value, stage].variable.is_stacked:
                yield f"stage {stage} sends {task.reads[0]}, which is partial"
            program = plan.program.get(task.program)
            if task.is_compute and (program is None or program.stage != stage):
                yield f"stage {stage} has no program {task.program}"
