"""The joint search over numbers of stages, meshes, micro-batches and schedules.

Per kind of device group, mesh and number of micro-batches the whole step, accumulated over its micro-batches, is
planned once: an SPMD program on this group (`measure_step`). The costs of its instructions make the stage graph. The
graph is cut (`cut`); the cut is priced by simulation of its schedule (`step_pace`). Memory constrains the cut.

Order: (1) every number of stages, on a middle mesh at a middle number of micro-batches; (2) the best of these on every
mesh; (3) the best of those at other numbers of micro-batches; (4) the best of all under every schedule. A closed form
(`estimate_step_s`) ranks candidates; simulation gives the figures compared at the end.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from shardwright.clusters.cluster import Cluster
from shardwright.cost import hardware_profile
from shardwright.cost.profiles import memory_limit_bytes
from shardwright.errors import AnnotationError, MemoryBudgetError, OptionError, PlanError
from shardwright.hlo import Module
from shardwright.planner.clock import Clock, too_short_error
from shardwright.planner.gc_pause import gc_paused
from shardwright.planner.graph.dataflow import Leaf
from shardwright.planner.microbatch import StepSplit, Term, split_step
from shardwright.planner.search.mesh_search import Listener
from shardwright.planner.search.meshes import candidate_meshes, refines
from shardwright.planner.search.program import Program
from shardwright.planner.search.solutions import CandidatePlan
from shardwright.planner.stages.clustering import Clustering, cluster_step
from shardwright.planner.stages.coarsen import coarsen_graph
from shardwright.planner.stages.cut import cut
from shardwright.planner.stages.device_groups import DeviceGroups, device_groups, enumerate_groupings
from shardwright.planner.stages.graph_builder import build_stage_graph
from shardwright.planner.stages.node_costs import StepCosts
from shardwright.planner.stages.realize import realize_choice
from shardwright.planner.stages.schedule_cost import estimate_step_s, micro_batches_in_flight, step_pace
from shardwright.planner.stages.stage_graph import CutProblem, StageCut, StageGraph, StageSlot
from shardwright.planner.stages.step_plans import StepPlans
from shardwright.planner.stages.tuning import (
    FILLED,
    INTERLEAVED_CHUNKS,
    MAX_PLANS,
    MAX_REFINED,
    MAX_SIMULATED,
    MICRO_BATCHES_PER_STAGE,
    STAGE_MESH_AXES,
)
from shardwright.planner.stages.types import PipelineChoice, PipelineRequest
from shardwright.plans.pipeline_plan import PipelineCandidate
from shardwright.plans.shardings import Mesh
from shardwright.progress import PlanProgress
from shardwright.tasks import Schedule, StepEstimate

#: Schedules to try; the first wins ties. Others (3f3b, …) are on request.
SCHEDULES = ("1f1b", "interleaved", "zero-bubble", "2f2b", "gpipe")


def search_pipeline(
    program: Program,
    cluster: Cluster,
    request: PipelineRequest,
    *,
    whole_s: float | None = None,
    why_not: str = "",
    progress: Listener | None = None,
    clock: Clock | None = None,
) -> PipelineChoice:
    """The fastest pipeline of a step over a cluster.

    program: the step to plan.
    whole_s: seconds of its best plan without a pipeline; None: there is none, for the reason in `why_not`, or it is
        irrelevant.
    progress: called before each candidate.
    clock: clock of the deadline; None starts one now.

    Raises MicroBatchError: the step cannot be split into micro-batches. OptionError: the request does not fit the
    program or the cluster. PlanError: no pipeline fits the devices. OutOfTimeError: the deadline passed before the
    first plan.
    """
    clock = clock or Clock(program.options.deadline_s)
    with gc_paused():
        program = program if program.micro_batches == 1 else program.rewrite_variant(None, 1)
        return _Search(program, cluster, request, progress, clock).run(whole_s, why_not)


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """One candidate: a cut, with its pace once simulated."""

    groups: DeviceGroups
    meshes: tuple[Mesh, ...]  # by kind of group
    problem: CutProblem
    cut: StageCut
    schedule: Schedule
    plans: tuple[CandidatePlan, ...]  # of the accumulated step, by kind of group
    whole: Module  # that step
    estimate_s: float
    pace: StepEstimate | None = None

    @property
    def micro_batches(self) -> int:
        return self.problem.micro_batches

    @property
    def placement_key(self) -> Hashable:
        """Equal between candidates differing only in their schedules."""
        return self.groups.first_devices, self.meshes, self.micro_batches

    @property
    def step_s(self) -> float:
        return self.estimate_s if self.pace is None else self.pace.step_s

    def candidate(self) -> PipelineCandidate:
        return PipelineCandidate(
            stages=self.groups.stages,
            mesh=self.meshes[0],
            micro_batches=self.micro_batches,
            schedule=str(self.schedule),
            step_s=self.step_s,
            bubble_fraction=0.0 if self.pace is None else self.pace.bubble_fraction,
            note="" if self.pace is not None else "estimated",
        )


def _best(pipelines: Sequence[Pipeline], count: int) -> list[Pipeline]:
    return sorted(pipelines, key=lambda pipeline: pipeline.step_s)[:count]


@dataclass(slots=True, eq=False)
class _Search:
    program: Program
    cluster: Cluster
    wanted: PipelineRequest
    progress: Listener | None
    clock: Clock
    split: StepSplit = field(init=False)
    clustering: Clustering = field(init=False)
    accumulators: tuple[Leaf, ...] = field(init=False)
    sums: frozenset[Leaf] = field(init=False)
    ahead: frozenset[Leaf] = field(init=False)
    _plans: StepPlans = field(init=False)
    _graphs: dict[tuple[StepCosts, ...], StageGraph] = field(default_factory=dict)
    _left_out: list[PipelineCandidate] = field(default_factory=list)
    _seen: set[Hashable] = field(default_factory=set)
    _lacks_memory: bool = False
    _incumbent_s: float = 0.0

    def __post_init__(self) -> None:
        options = self.program.options
        self.split = split_step(self.program.module, options)
        if self.wanted.micro_batches is not None:
            self.split.check(self.wanted.micro_batches)
        state = set(range(len(self.program.flow.parameters))).difference(self.split.batch)
        once = {name for name, parts in self.split.parts.items() if "once" in parts and "micro" not in parts}
        self.clustering = cluster_step(self.split.module, state, once)
        self._plans = StepPlans(
            program=self.program, split=self.split, clustering=self.clustering, mesh=self.wanted.mesh, clock=self.clock
        )
        nodes = {n.instruction.name: n.index for n in self.clustering.flow.nodes if not n.is_value}
        self.accumulators = tuple((nodes[s.name], s.leaf) for s in self.split.accumulators if s.name in nodes)
        self.sums = frozenset(
            (nodes[name], leaf)
            for name, kinds in self.split.kinds.items()
            for leaf, kind in enumerate(kinds)
            if isinstance(kind, Term) and name in nodes
        )

        self.ahead = frozenset((nodes[i.name], leaf) for i, leaf, _ in self.split.ahead if i.name in nodes)

    def run(self, whole_s: float | None, why_not: str) -> PipelineChoice:
        pipelines = self._try_stage_counts()
        self._try_meshes(pipelines)
        self._try_micro_batches(pipelines)
        if not pipelines:
            raise self._no_pipeline_error()
        simulated = self._simulate_schedules(pipelines)
        best = min(simulated, key=lambda pipeline: pipeline.step_s)
        candidates = [
            pipeline.candidate() for pipeline in sorted([*simulated, *pipelines], key=lambda pipeline: pipeline.step_s)
        ]
        same_placement = [pipeline for pipeline in simulated if pipeline.placement_key == best.placement_key]
        return realize_choice(
            self.clustering, self.split, best, same_placement, (*candidates, *self._left_out), whole_s, why_not
        )

    # ---- candidates --------------------------------------------------------------
    def _try_stage_counts(self) -> list[Pipeline]:
        """Every number of stages at one number of micro-batches, on the first mesh to fit, a middle one first."""
        pipelines: list[Pipeline] = []
        for groups in self._groups():
            for meshes in self._meshes(groups):
                pipeline = self._try(groups, meshes, self._micro_batches(groups.stages, meshes)[0])
                if pipeline is not None:
                    pipelines.append(pipeline)
                    break
        return pipelines

    def _try_meshes(self, pipelines: list[Pipeline]) -> None:
        """The best pipelines on every mesh (added in place)."""
        for best in _best(pipelines, MAX_REFINED):
            for meshes in self._meshes(best.groups):
                self._add(pipelines, best.groups, meshes, self._micro_batches(best.groups.stages, meshes)[0])

    def _try_micro_batches(self, pipelines: list[Pipeline]) -> None:
        """The best pipelines with other numbers of micro-batches (added in place)."""
        for best in _best(pipelines, MAX_REFINED):
            for micro_batches in self._micro_batches(best.groups.stages, best.meshes)[1:]:
                self._add(pipelines, best.groups, best.meshes, micro_batches)

    def _add(
        self, pipelines: list[Pipeline], groups: DeviceGroups, meshes: tuple[Mesh, ...], micro_batches: int
    ) -> None:
        is_new = (groups, meshes, micro_batches) not in self._seen
        pipeline = self._try(groups, meshes, micro_batches) if is_new else None
        if pipeline is not None:
            pipelines.append(pipeline)

    def _simulate_schedules(self, pipelines: list[Pipeline]) -> list[Pipeline]:
        """The best pipelines under every schedule."""
        simulated = []
        for best in _best(pipelines, MAX_SIMULATED):
            simulated.append(self._with_pace(best))
            for schedule in self._schedules()[1:]:
                pipeline = self._try(best.groups, best.meshes, best.micro_batches, schedule)
                if pipeline is not None:
                    simulated.append(self._with_pace(pipeline))
        return simulated

    def _groups(self) -> Sequence[DeviceGroups]:
        if self.wanted.stages is None:
            return enumerate_groupings(self.cluster, len(self.clustering.parts), self.split.divisor)
        groups = device_groups(self.cluster, self.wanted.stages)
        if groups is None:
            raise OptionError(
                f"{self.cluster.device_count} devices on {len(self.cluster.workers)} nodes make no "
                f"{self.wanted.stages} groups of whole nodes of one kind, or of equal parts of nodes",
                where="stages",
                remedy="choose a number that divides the nodes, or a multiple of theirs that divides their devices",
            )
        return (groups,)

    def _micro_batches(self, stages: int, meshes: Sequence[Mesh]) -> tuple[int, ...]:
        """Numbers of micro-batches to try, most promising first; each large enough for the meshes' first axes."""
        if self.wanted.micro_batches is not None:
            return (self.wanted.micro_batches,)
        room = max(1, self.split.divisor // max(mesh.axes[0].size for mesh in meshes))
        possible = [count for count in range(1, room + 1) if self.split.divisor % count == 0]
        nearest = [
            min(possible, key=lambda c: (abs(c - stages * per_stage), c)) for per_stage in MICRO_BATCHES_PER_STAGE
        ]
        return tuple(dict.fromkeys(nearest))

    def _meshes(self, groups: DeviceGroups) -> Iterator[tuple[Mesh, ...]]:
        """Meshes of each kind of group; with several kinds: the first mesh of each, the second, …"""
        if self.wanted.mesh is not None:
            mesh = Mesh.of(self.wanted.mesh)
            other = next((kind for kind in groups.kinds if kind.devices != mesh.device_count), None)
            if other is not None:
                raise OptionError(
                    f"mesh {mesh} has {mesh.device_count} devices, a stage {other.devices}",
                    where="mesh",
                    remedy="give the mesh of one stage",
                )
            yield (mesh,) * len(groups.kinds)
            return
        candidates = [self._candidates(groups.part(kind)) for kind in range(len(groups.kinds))]
        for number in range(max(map(len, candidates))):
            yield tuple(meshes[min(number, len(meshes) - 1)] for meshes in candidates)

    def _candidates(self, part: Cluster) -> tuple[Mesh, ...]:
        """Meshes of one group, all axes but the first within nodes: only the batch is split across nodes.

        Meshes with a refinement among the others are left out: the finer mesh can express their plans.
        """
        if part.device_count == 1:
            return (Mesh.of({"data": 1}),)
        node = part.workers[0].device_count
        candidates = candidate_meshes(part, max_axes=STAGE_MESH_AXES)
        inside = [mesh for mesh in candidates if node % prod(axis.size for axis in mesh.axes[1:]) == 0]
        finest = [mesh for mesh in inside if not any(refines(fine, mesh) for fine in inside if fine != mesh)]
        finest.sort(key=lambda mesh: mesh.axes[-1].size)
        middle = len(finest) // 2
        return (*finest[middle : middle + 1], *finest[:middle], *finest[middle + 1 :])

    def _schedules(self) -> tuple[Schedule, ...]:
        names = SCHEDULES if self.wanted.schedule is None else (self.wanted.schedule,)
        return tuple(Schedule.parse(name) for name in names)

    # ---- one candidate -----------------------------------------------------------
    def _try(
        self, groups: DeviceGroups, meshes: tuple[Mesh, ...], micro_batches: int, schedule: Schedule | None = None
    ) -> Pipeline | None:
        """The cut of one candidate; None, with a note, on infeasibility or after the deadline."""
        if self.clock.must_stop:
            self._leave_out(groups, meshes, micro_batches, "not tried: the deadline has passed")
            return None
        self._seen.add((groups, meshes, micro_batches))
        schedule = schedule or self._schedules()[0]
        self._report(groups, meshes, micro_batches, schedule)
        chunks = (schedule.chunks or INTERLEAVED_CHUNKS) if schedule.kind == "interleaved" else 1
        problem: PlanError | AnnotationError | None = None
        for thrift in range(MAX_PLANS):
            try:
                plans = [self._plans.at(groups, kind, mesh, micro_batches, thrift) for kind, mesh in enumerate(meshes)]
                pipeline = self._cut(groups, meshes, plans, schedule, chunks, micro_batches)
                self._incumbent_s = min(self._incumbent_s or pipeline.estimate_s, pipeline.estimate_s)
                self.clock.record_plan()
                return pipeline
            except MemoryBudgetError as error:
                problem, self._lacks_memory = error, True
            except (PlanError, AnnotationError) as error:
                problem = error
                break
        assert problem is not None
        self._leave_out(groups, meshes, micro_batches, problem.message, str(schedule))
        return None

    def _report(self, groups: DeviceGroups, meshes: Sequence[Mesh], micro_batches: int, schedule: Schedule) -> None:
        if self.progress is not None:
            what = f"{groups.stages} stages on {meshes[0]}, {micro_batches} micro-batches, {schedule}"
            self.progress(
                PlanProgress(
                    phase="stages",
                    detail=what,
                    incumbent_s=self._incumbent_s,
                    elapsed_s=self.clock.elapsed_s,
                )
            )

    def _cut(
        self,
        groups: DeviceGroups,
        meshes: tuple[Mesh, ...],
        plans: Sequence[CandidatePlan],
        schedule: Schedule,
        chunks: int,
        micro_batches: int,
    ) -> Pipeline:
        kinds = [self._plans.step_costs(plan, micro_batches) for plan in plans]
        key = tuple(kinds)
        if key not in self._graphs:
            margin = hardware_profile(self.cluster.hardware).compiler.temporaries_margin
            self._graphs[key] = build_stage_graph(
                self.clustering, kinds, self.accumulators, sums=self.sums, ahead=self.ahead, margin=margin
            )
        graph, parts = coarsen_graph(self._graphs[key], groups.stages * chunks, micro_batches)
        held = micro_batches_in_flight(schedule, groups.stages, chunks, micro_batches)
        places = tuple(
            StageSlot(
                kind=groups.kind(stage),
                memory_bytes=FILLED * self._limit_bytes(groups.parts[stage]),
                in_flight=held[stage],
                delayed=min(stage + 1, micro_batches) if schedule.has_weight else 0,
            )
            for stage in range(groups.stages)
        )
        coarse_cut = cut(
            graph,
            places,
            chunks=chunks,
            micro_batches=micro_batches,
            imbalance=self.wanted.imbalance,
            most_cpu_s=10.0,
        )
        problem = CutProblem(graph=self._graphs[key], stage_slots=places, chunks=chunks, micro_batches=micro_batches)
        whole = problem.to_cut([coarse_cut.chunk_of[part] for part in parts], is_optimal=coarse_cut.is_optimal)
        return Pipeline(
            groups=groups,
            meshes=meshes,
            problem=problem,
            cut=whole,
            schedule=schedule,
            plans=tuple(plans),
            whole=self._plans.module(micro_batches),
            estimate_s=estimate_step_s(problem, whole),
        )

    def _with_pace(self, pipeline: Pipeline) -> Pipeline:
        return replace(pipeline, pace=step_pace(pipeline.problem, pipeline.cut, pipeline.schedule, pipeline.groups))

    # ---- limits ------------------------------------------------------------------
    def _limit_bytes(self, part: Cluster) -> int:
        return memory_limit_bytes(self.program.options, part, hardware_profile(part.hardware))

    def _leave_out(
        self, groups: DeviceGroups, meshes: Sequence[Mesh], micro_batches: int, why: str, schedule: str = ""
    ) -> None:
        self._left_out.append(
            PipelineCandidate(
                stages=groups.stages,
                mesh=meshes[0],
                micro_batches=micro_batches,
                schedule=schedule,
                step_s=None,
                note=why,
            )
        )

    def _no_pipeline_error(self) -> PlanError:
        if self.clock.must_stop and not self._lacks_memory:
            return too_short_error(self.clock)
        if not self._left_out:
            return PlanError(
                f"no pipeline can be planned: {len(self.clustering.parts)} parts of the model, "
                f"{self.cluster.device_count} devices",
                where="stages",
                remedy="ask for fewer stages, or plan with stages=1",
            )
        last = self._left_out[-1]
        candidate = f"{last.stages} stages on {last.mesh}, {last.micro_batches} micro-batches"
        if self._lacks_memory:
            return MemoryBudgetError(
                f"no pipeline fits the memory: with {candidate}, {last.note}",
                where="stages",
                remedy="use more devices, or more and smaller micro-batches",
            )
        return PlanError(
            f"no pipeline can be planned: with {candidate}, {last.note}",
            where="stages",
            remedy="ask for other stages or micro-batches, or plan with stages=1",
        )
