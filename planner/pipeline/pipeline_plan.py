"""Makes a PipelinePlan from the choice of the search: programs, values, tasks, the timeline."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import permutations

from shardwright.clusters.cluster import Cluster
from shardwright.clusters.links import Link
from shardwright.cost import hardware_profile
from shardwright.hlo import Module
from shardwright.options.plan_options import PlanOptions
from shardwright.planner.graph.dataflow import build_dataflow
from shardwright.planner.graph.names import argument_names, output_names
from shardwright.planner.microbatch import (
    Index,
    StepSplit,
    accumulate_step,
    ahead_module,
    micro_module,
    once_module,
    split_step,
)
from shardwright.planner.pipeline.boundary import Origin, Values, argument_entries, origins, output_entries
from shardwright.planner.pipeline.check import check_pipeline
from shardwright.planner.pipeline.cross_stage_sums import StepParts, defer_cross_stage_sums
from shardwright.planner.pipeline.layouts import StageLayouts, WholeStep
from shardwright.planner.pipeline.microbatch_programs import chunk_programs, split_programs, start_programs, totals_of
from shardwright.planner.pipeline.pricing import Pricing
from shardwright.planner.pipeline.program_assignment import assign_programs
from shardwright.planner.pipeline.program_writer import ProgramDraft
from shardwright.planner.pipeline.step import PipelineStep, argument_value, batch_stack_value
from shardwright.planner.pipeline.update_programs import UpdatePrograms, make_update_programs
from shardwright.planner.pipeline.values import device_bytes, task_piece, task_values, values_of
from shardwright.planner.pipeline.weight_programs import delay_weight_gradients
from shardwright.planner.search.search import plan as plan_step
from shardwright.planner.stages.device_groups import link_between
from shardwright.planner.stages.types import StageGroup
from shardwright.plans.attention_note import AttentionNote
from shardwright.plans.pipeline_plan import (
    ArgumentEntry,
    OutputEntry,
    PipelineCandidate,
    PipelinePlan,
    PipelineProgram,
    PipelineStage,
)
from shardwright.plans.plan import MemorySummary
from shardwright.plans.shardings import Mesh
from shardwright.progress import PlanProgress
from shardwright.tasks import (
    Schedule,
    StepSpec,
    TaskGraph,
    Timeline,
    memory_over_time,
    simulate,
    task_graph,
)

#: More bytes than any device has: the search checks the memory of stages.
_ALL = 1 << 60


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSpec:
    """The input of `make_pipeline`.

    module: the program to cut, rewritten already.
    groups: one per stage.
    chunk_of: instruction of the entry, by name → chunk; an instruction without one goes with its readers.
    micro_batches: number a step.
    schedule: name of the schedule.
    chunks: per stage; chunk c is on stage c % stages.
    whole: per stage, a plan of the whole step on its mesh; empty: planned here.
    arguments, outputs: origins of those of `module`; None: they are the user's.
    candidates, attention, notes: passed on to the plan.
    """

    module: Module
    groups: tuple[StageGroup, ...]
    chunk_of: Mapping[str, int]
    micro_batches: int
    schedule: str
    chunks: int = 1
    whole: tuple[WholeStep, ...] = ()
    arguments: tuple[Origin, ...] | None = None
    outputs: tuple[Origin, ...] | None = None
    candidates: tuple[PipelineCandidate, ...] = ()
    attention: tuple[AttentionNote, ...] = ()
    notes: tuple[str, ...] = ()


def make_pipeline(
    hlo_text: str,
    cluster: Cluster,
    options: PlanOptions,
    choice: PipelineSpec,
    *,
    progress: Callable[[PlanProgress], None] | None = None,
) -> PipelinePlan:
    """The checked plan of a pipeline.

    hlo_text: the user's program, before the rewrites of `choice.module`. progress: called before each program.
    Raises MicroBatchError if the step cannot be split into micro-batches, PlanError if stages do not fit together,
    and the planner's errors.
    """
    return _Maker(hlo_text, cluster, options, choice, progress).run()


class _Maker:
    def __init__(
        self,
        hlo_text: str,
        cluster: Cluster,
        options: PlanOptions,
        choice: PipelineSpec,
        progress: Callable[[PlanProgress], None] | None,
    ) -> None:
        self._start = time.perf_counter()
        self._progress = progress
        self._hlo_text = hlo_text
        self._sha256 = sha256(hlo_text.encode()).hexdigest()
        self._cluster = cluster
        self._options = options
        self._choice = choice
        self._pricing: dict[object, Pricing] = {}

    def run(self) -> PipelinePlan:
        choice = self._choice
        step = self._step()
        totals = totals_of(step)
        chunks = tuple(chunk_programs(step, totals))
        applied = make_update_programs(step, totals)
        programs = tuple(
            self._price(draft)
            for draft in (
                *start_programs(step, totals, chunks),
                *split_programs(step, chunks),
                *chunks,
                *applied.programs,
            )
        )
        values = values_of(step, applied, programs)
        arguments, outputs = self._boundary(step, applied, values)
        pieces = self._pieces(step, programs, values, arguments, outputs)
        tasks = task_graph(pieces, Schedule.parse(choice.schedule))
        timeline = simulate(tasks)
        plan = PipelinePlan(
            module_name=choice.module.name,
            hlo_sha256=self._sha256,
            hardware=self._cluster.hardware,
            origin=f"pipeline of {step.stage_count} stages",
            stages=self._stages(step, tasks, timeline, arguments, values),
            programs=programs,
            values=tuple(values.values()),
            arguments=arguments,
            outputs=outputs,
            tasks=tasks,
            micro_batches=choice.micro_batches,
            schedule=str(Schedule.parse(choice.schedule)),
            step_s=timeline.step_s,
            bubble_fraction=timeline.bubble_fraction,
            candidates=choice.candidates,
            attention=choice.attention,
            notes=(*choice.notes, *step.split.notes),
            planning_s=time.perf_counter() - self._start,
            hlo_text=self._hlo_text,
        )
        check_pipeline(plan)
        return plan

    # ---- the step ------------------------------------------------------------
    def _step(self) -> PipelineStep:
        choice = self._choice
        split = split_step(choice.module, self._options)
        parts = StepParts(micro=micro_module(split, choice.micro_batches), once=once_module(split))
        stage_count = len(choice.groups)
        chunks = stage_count * choice.chunks
        entry = parts.micro.module.entry
        index = [parameter for parameter in entry.parameters if isinstance(parts.micro.inputs[parameter.index], Index)]
        homes = assign_programs(entry, choice.chunk_of, chunks, index)
        parts = defer_cross_stage_sums(split, parts, homes.of)
        homes = homes.without(parts.moved)
        if Schedule.parse(choice.schedule).has_weight:
            homes = delay_weight_gradients(homes, parts.micro.module.entry)
        return PipelineStep(
            split=split,
            micro=parts.micro,
            once=parts.once,
            micro_batches=choice.micro_batches,
            program_assignment=homes,
            stage_of_chunk=tuple(chunk % stage_count for chunk in range(chunks)),
            layouts=self._layouts(split),
            meeting=parts.meeting,
            ahead=ahead_module(split),
        )

    def _layouts(self, split: StepSplit) -> tuple[StageLayouts, ...]:
        """Layouts of every stage; equal stages share them."""
        layouts_by_kind: dict[object, StageLayouts] = {}
        layouts = []
        for stage, group in enumerate(self._choice.groups):
            given = self._choice.whole[stage] if self._choice.whole else None
            key = id(given) if given is not None else self._kind_of(group)
            if key not in layouts_by_kind:
                layouts_by_kind[key] = StageLayouts(given or self._plan_whole_step(split, group), split)
            layouts.append(layouts_by_kind[key])
        return tuple(layouts)

    def _plan_whole_step(self, split: StepSplit, group: StageGroup) -> WholeStep:
        """Plans the whole step on the devices of one stage, without a memory limit: a stage holds only part of it."""
        options = replace(
            self._options,
            mesh=group.mesh.sizes,
            micro_batches=self._choice.micro_batches,
            rewrites="none",
            memory_budget=_ALL,
            memory_fraction=None,
        )
        part = self._cluster.part(group.first_device, group.mesh.device_count)
        plan = plan_step(self._choice.module.to_text(), part, options)
        return WholeStep(
            mesh=plan.mesh,
            instructions=plan.instructions,
            parameters=plan.parameters,
            outputs=plan.outputs,
            module=accumulate_step(split, self._choice.micro_batches),
            split=split,
            argument_numbers=range(len(plan.parameters)),
            output_numbers=range(len(plan.outputs)),
        )

    def _kind_of(self, group: StageGroup) -> tuple[Mesh, str, tuple[int, ...]]:
        """Equal for groups with equal costs."""
        part = self._cluster.part(group.first_device, group.mesh.device_count)
        return group.mesh, part.hardware, tuple(node.device_count for node in part.nodes)

    def _price(self, program: ProgramDraft) -> PipelineProgram:
        if self._progress is not None:
            elapsed_s = time.perf_counter() - self._start
            self._progress(PlanProgress(phase="programs", detail=program.name, elapsed_s=elapsed_s))
        pricing = self._pricing_of(self._choice.groups[program.stage])
        return PipelineProgram(
            name=program.name,
            kind=program.kind,
            stage=program.stage,
            chunk=program.chunk,
            reads=program.reads,
            writes=program.writes,
            plan=pricing.plan(program),
        )

    def _pricing_of(self, group: StageGroup) -> Pricing:
        kind = self._kind_of(group)
        if kind not in self._pricing:
            part = self._cluster.part(group.first_device, group.mesh.device_count)
            profile = hardware_profile(part.hardware)
            self._pricing[kind] = Pricing(group.mesh, part, profile, self._sha256, self._options.bucket_bytes)
        return self._pricing[kind]

    # ---- boundary ------------------------------------------------------------
    def _boundary(
        self, step: PipelineStep, applied: UpdatePrograms, values: Values
    ) -> tuple[tuple[ArgumentEntry, ...], tuple[OutputEntry, ...]]:
        given = self._choice.arguments, self._choice.outputs
        if given[0] is None or given[1] is None:
            flow = build_dataflow(self._choice.module)
            names = (
                argument_names(flow, self._options.argument_names), output_names(flow, self._options.output_names)
            )  # fmt: skip
            given = origins(self._choice.module, names)
        arguments = argument_entries(step, applied, values, given[0] or ())
        return arguments, output_entries(step, applied, values, arguments, given[1] or ())

    # ---- tasks ---------------------------------------------------------------
    def _pieces(
        self,
        step: PipelineStep,
        programs: Sequence[PipelineProgram],
        values: Values,
        arguments: Sequence[ArgumentEntry],
        outputs: Sequence[OutputEntry],
    ) -> StepSpec:
        return StepSpec(
            micro_batches=step.micro_batches,
            stage_of_chunk=step.stage_of_chunk,
            values=task_values(step, values),
            programs=tuple(task_piece(program) for program in programs),
            arguments=tuple((entry.value, entry.stage) for entry in arguments),
            outputs=tuple((entry.value, entry.stage) for entry in outputs),
            arrivals_s=self._arrivals_s(step, arguments),
            links=self._links(),
        )

    def _arrivals_s(self, step: PipelineStep, arguments: Sequence[ArgumentEntry]) -> dict[int, float]:
        """Arrival times of the batch; state is present, and so is what workers read themselves."""
        sent = set(step.split.batch).difference(self._options.local_arguments)
        batch = {argument_value(number) for number in sent} | {batch_stack_value(number) for number in sent}
        arrivals = dict.fromkeys(range(step.stage_count), 0.0)
        for entry in arguments:
            if entry.value in batch:
                arrivals[entry.stage] += self._pricing_of(self._choice.groups[entry.stage]).arrival_s(entry.variable)
        return arrivals

    def _links(self) -> dict[tuple[int, int], Link]:
        """The link of one device of a stage to the devices of another."""
        groups = self._choice.groups
        parts = [self._cluster.part(group.first_device, group.mesh.device_count) for group in groups]
        links = {}
        for a, b in permutations(range(len(parts)), 2):
            link = link_between(parts[a], parts[b])
            links[a, b] = Link(bandwidth_bytes_per_s=link.bandwidth_bytes_per_s, latency_s=link.latency_s)
        return links

    def _stages(
        self,
        step: PipelineStep,
        tasks: TaskGraph,
        timeline: Timeline,
        arguments: Sequence[ArgumentEntry],
        values: Values,
    ) -> tuple[PipelineStage, ...]:
        memory = memory_over_time(tasks, timeline)
        stages = []
        for number, group in enumerate(self._choice.groups):
            stored = sum(
                device_bytes(values[entry.value, number], group.mesh) for entry in arguments if entry.stage == number
            )
            stages.append(
                PipelineStage(
                    number=number,
                    first_device=group.first_device,
                    mesh=group.mesh,
                    chunks=tuple(chunk for chunk, stage in enumerate(step.stage_of_chunk) if stage == number),
                    memory=MemorySummary(
                        arguments_bytes=stored,
                        outputs_bytes=0,
                        temporaries_bytes=max(0, memory[number].peak_bytes - stored),
                    ),
                    busy_s=timeline.busy_s[number],
                )
            )
        return tuple(stages)
