"""From the result of the stage search to a PipelinePlan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import ceil
from typing import NamedTuple

from shardwright.clusters.cluster import Cluster
from shardwright.cost import bytes_with_margin, hardware_profile
from shardwright.cost.profiles import memory_limit_bytes
from shardwright.errors import MemoryBudgetError
from shardwright.hlo import ArrayShape
from shardwright.options.plan_options import PlanOptions
from shardwright.planner.clock import Clock, OutOfTimeError, too_short_error
from shardwright.planner.graph.source import Source
from shardwright.planner.pipeline.boundary import Origin
from shardwright.planner.pipeline.layouts import WholeStep
from shardwright.planner.pipeline.pipeline_plan import PipelineSpec, make_pipeline
from shardwright.planner.rewrites.split_loops import VariableRows
from shardwright.planner.search.program import Program
from shardwright.planner.stages.choose import search_pipeline
from shardwright.planner.stages.types import PipelineChoice, PipelineRequest
from shardwright.plans.pipeline_plan import PipelinePlan
from shardwright.progress import PlanProgress
from shardwright.units import format_bytes


class PipelineSearchResult(NamedTuple):
    """A program, not yet split into micro-batches, and the pipeline chosen for it."""

    program: Program
    choice: PipelineChoice


def choose_pipeline(
    hlo: str | Source,
    cluster: Cluster,
    options: PlanOptions,
    *,
    whole_s: float | None = None,
    why_not: str = "",
    progress: Callable[[PlanProgress], None] | None = None,
    clock: Clock | None = None,
) -> PipelineSearchResult:
    """The fastest pipeline under these options. whole_s, why_not, clock, errors: see `search_pipeline`."""
    wanted = PipelineRequest(
        stages=options.stages,
        mesh=options.mesh,
        micro_batches=options.micro_batches,
        schedule=options.schedule or None,
        imbalance=options.imbalance,
    )
    clock = clock or Clock(options.deadline_s)
    try:
        devices = hardware_profile(cluster.hardware)
        program = Program(hlo, replace(options, micro_batches=None), clock=clock, devices=devices)
        choice = search_pipeline(
            program, cluster, wanted, whole_s=whole_s, why_not=why_not, progress=progress, clock=clock
        )
    except OutOfTimeError:
        raise too_short_error(clock) from None
    return PipelineSearchResult(program, choice)


def build_pipeline(
    hlo_text: str,
    cluster: Cluster,
    options: PlanOptions,
    searched: PipelineSearchResult,
    *,
    progress: Callable[[PlanProgress], None] | None = None,
) -> PipelinePlan:
    """The plan of a choice. Raises MemoryBudgetError if a stage needs more memory than its devices have."""
    plan = make_pipeline(hlo_text, cluster, _of_stage(options), to_pipeline_spec(*searched), progress=progress)
    _require_memory(plan, cluster, options)
    return plan


def to_pipeline_spec(program: Program, choice: PipelineChoice) -> PipelineSpec:
    """The input of `make_pipeline`. program: the searched one."""
    original = program.original
    parameters = sorted(original.entry.parameters, key=lambda parameter: parameter.index)
    sides = [leaf for parameter in parameters for leaf in parameter.shape.leaves], original.entry.root.shape.leaves
    return PipelineSpec(
        module=choice.module,
        groups=choice.groups,
        chunk_of=choice.chunk_of,
        micro_batches=choice.micro_batches,
        schedule=choice.schedule,
        chunks=choice.chunks,
        arguments=_origins(choice.arguments, sides[0], program.arguments),
        outputs=_origins(choice.outputs, sides[1], program.outputs),
        candidates=choice.candidates,
        attention=program.attention,
        notes=choice.notes,
        whole=tuple(_whole(choice)),
    )


def _whole(choice: PipelineChoice) -> Iterator[WholeStep]:
    """The plans on which the search measured stages: equal stages share one."""
    steps: dict[int, WholeStep] = {}
    for plan in choice.stage_plans:
        if id(plan) not in steps:
            steps[id(plan)] = WholeStep(
                mesh=plan.mesh,
                instructions=plan.instructions,
                parameters=plan.parameters,
                outputs=plan.outputs,
                module=choice.whole,
                split=choice.whole_split,
                argument_numbers=tuple(piece.number for piece in choice.arguments),
                output_numbers=tuple(piece.number for piece in choice.outputs),
            )
        yield steps[id(plan)]


def _of_stage(options: PlanOptions) -> PlanOptions:
    """The options of one stage's plan. Layout requests refer to a program's own arguments: dropped."""
    return replace(
        options, stages=None, schedule="", argument_axes={}, output_axes={}, argument_views={}, output_views={}
    )


def _origins(pieces: Sequence[VariableRows], leaves: Sequence[ArrayShape], names: Sequence[str]) -> tuple[Origin, ...]:
    origins = []
    for piece in pieces:
        dims, rows = leaves[piece.number].dimensions, None
        if piece.start is not None and piece.stop is not None:
            rows = (piece.start, piece.stop)
            dims = (piece.stop - piece.start, *dims[1:])
        origins.append(Origin(number=piece.number, name=names[piece.number], dims=dims, rows=rows))
    return tuple(origins)


def _require_memory(plan: PipelinePlan, cluster: Cluster, options: PlanOptions) -> None:
    for stage in plan.stages:
        part = cluster.part(stage.first_device, stage.mesh.device_count)
        profile = hardware_profile(part.hardware)
        limit, needed = memory_limit_bytes(options, part, profile), bytes_with_margin(stage.memory, profile)
        if needed > limit:
            raise MemoryBudgetError(
                f"stage {stage.number} of {len(plan.stages)} needs {format_bytes(ceil(needed))} a device, "
                f"{format_bytes(limit)} are there",
                where=f"pipeline of {plan.module_name}",
                remedy="more stages, more devices a stage, or more micro-batches",
            )
