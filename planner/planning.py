"""One program on all devices, or a pipeline of stages: the faster one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from shardwright.clusters.cluster import Cluster
from shardwright.cost import hardware_profile
from shardwright.cost.profiles import host_limit_bytes, memory_cap_note
from shardwright.errors import MemoryBudgetError, OptionError, PlanError
from shardwright.hlo.shapes import HOST_SPACE
from shardwright.options.plan_options import PlanOptions
from shardwright.planner.clock import Clock, OutOfTimeError
from shardwright.planner.constraints.typed_values import find_typed_values
from shardwright.planner.graph.manual_regions import has_regions
from shardwright.planner.graph.source import Source
from shardwright.planner.limits import SearchLimits
from shardwright.planner.min_devices import suggest_device_count
from shardwright.planner.pipeline.build import PipelineSearchResult, build_pipeline, choose_pipeline
from shardwright.planner.search.feasibility import StateTooLargeError
from shardwright.planner.search.search import plan as plan_single_program
from shardwright.planner.warm_start.search_records import SearchHistory
from shardwright.plans.pipeline_plan import PipelinePlan
from shardwright.plans.plan import Plan
from shardwright.progress import PlanProgress
from shardwright.reserved_names import PLACEMENT_TARGET
from shardwright.units import format_bytes

Listener = Callable[[PlanProgress], None]


def plan_step(
    hlo: str | Source,
    cluster: Cluster,
    options: PlanOptions | None = None,
    *,
    progress: Listener | None = None,
    history: SearchHistory | None = None,
    clock: Clock | None = None,
    limits: SearchLimits = SearchLimits(),
) -> Plan | PipelinePlan:
    """The plan of a step, given as HLO text.

    `options.stages` of 2 or more asks for a pipeline, 1 for none. By default one program on all devices, unless it does
    not fit the memory, or the cluster has several nodes and a pipeline's step is shorter.

    history: earlier searches for one program on all devices, as a warm start.
    clock: of the deadline; None starts one now.
    limits: of the search for one program on all devices, and of when a pipeline is searched for; searches for stages
        have the default ones.

    Raises the errors of `search.plan` and `choose_pipeline`.
    """
    options = options or PlanOptions()
    request = _PlanRequest(
        source=Source(hlo) if isinstance(hlo, str) else hlo,
        cluster=cluster,
        options=options,
        progress=progress,
        history=history,
        clock=clock or Clock(options.deadline_s),
        limits=limits,
    )
    plan = request.note_types(request.plan())
    if isinstance(plan, Plan) and plan.memory.host_bytes:
        plan = _require_host_memory(plan, cluster)
    note = memory_cap_note(options, cluster, hardware_profile(cluster.hardware))
    plan = replace(plan, notes=(*plan.notes, note)) if note else plan
    return replace(plan, planning_s=request.clock.elapsed_s) if isinstance(plan, PipelinePlan) else plan


def single_program_options(
    cluster: Cluster, options: PlanOptions, limits: SearchLimits = SearchLimits()
) -> PlanOptions:
    """The options of the single-program plan made before pipelines."""
    device_counts = {node.device_count for node in cluster.workers}
    is_vast = cluster.device_count >= limits.huge_device_count and options.effort == "default"
    is_vast = is_vast and len(cluster.workers) > 1 and len(device_counts) == 1
    if not (is_vast and _may_pipeline(cluster, options)):
        return options
    size = device_counts.pop()
    mesh = {"data": cluster.device_count // size, "model": size}
    return replace(options, mesh=mesh, remat="none", micro_batches=options.micro_batches or 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlanRequest:
    """The arguments of `plan_step`; its methods are the ways to a plan."""

    source: Source
    cluster: Cluster
    options: PlanOptions
    progress: Listener | None
    history: SearchHistory | None
    clock: Clock
    limits: SearchLimits

    def plan(self) -> Plan | PipelinePlan:
        """One program on all devices or a pipeline: see `plan_step`."""
        if self.options.stages is not None and self.options.stages > 1:
            if self.options.offload == "optimizer":
                raise OptionError(
                    f"stages={self.options.stages} and offload='optimizer': the stages of a pipeline keep their state "
                    "on their devices",
                    where="offload",
                    remedy="leave one of them out",
                )
            if self._is_of_one_program:
                what = "has manual regions (shard_map)" if has_regions(self.source.text) else "uses the host's memory"
                raise OptionError(
                    f"stages={self.options.stages}: the program {what}, which pipelines do not cut around",
                    where="stages",
                    remedy="leave stages out: it is planned as one program on all devices",
                )
            return self._build_pipeline(self._choose_pipeline(self.clock))
        options = self.options
        if not self._is_of_one_program:
            options = single_program_options(self.cluster, self.options, self.limits)
        try:
            whole = self._plan_single_program(options, self.clock.renew())
        except MemoryBudgetError as error:
            if isinstance(error, StateTooLargeError) or self.clock.is_expired or not self._may_pipeline:
                raise self._suggest_device_count(error) from None
            return self._plan_fitting_pipeline(error)
        if self.clock.takes_first:
            return _add_note(whole, "the first plan that fits: the search ended with it")
        if not (self._may_pipeline and self._is_pipeline_worthwhile(whole)):
            return whole if options is self.options else self._search_all_meshes(whole)
        if options is not self.options:
            note = f"one program on so many devices is planned on {whole.mesh} only; stages=1 searches all"
            whole = _add_note(whole, note)
        return self._compare_with_pipeline(whole)

    def note_types(self, plan: Plan | PipelinePlan) -> Plan | PipelinePlan:
        """The plan, with what the shardings in the program's types cost."""
        typed = find_typed_values(self.source.module) if self.options.constraints == "keep" else None
        if typed is None:
            return plan
        note = typed.describe(_step_s(plan), self._price_without_constraints())
        return replace(plan, notes=(*plan.notes, note))

    def _price_without_constraints(self) -> float | None:
        """Seconds of a step without the program's shardings, planned fast; None: there is no such plan, or no time."""
        if self.clock.is_expired:
            return None
        options = replace(self.options, constraints="ignore", effort="fast")
        try:
            return plan_single_program(
                self.source, self.cluster, options, clock=self.clock.renew(interrupts=True), limits=self.limits
            ).cost.step_s
        except PlanError:
            return None

    # ---- one program on all devices ----------------------------------------------

    def _plan_single_program(self, options: PlanOptions, clock: Clock) -> Plan:
        return plan_single_program(
            self.source,
            self.cluster,
            options,
            progress=self.progress,
            history=self.history,
            clock=clock,
            limits=self.limits,
        )

    def _search_all_meshes(self, narrow: Plan) -> Plan:
        """The single-program plan when no pipeline is considered: on every mesh, in the time left."""
        if self.clock.is_expired:
            return narrow
        try:
            whole = self._plan_single_program(self.options, self.clock.renew(interrupts=True))
        except OutOfTimeError:
            return narrow
        return min(narrow, whole, key=lambda plan: plan.cost.step_s)

    # ---- a pipeline ----------------------------------------------------------------

    @property
    def _may_pipeline(self) -> bool:
        return _may_pipeline(self.cluster, self.options) and not self._is_of_one_program

    @property
    def _is_of_one_program(self) -> bool:
        """Whether no stages are cut out of the program: it has manual regions, whose meshes are of all devices, or
        values on the host."""
        text = self.source.text
        return has_regions(text) or PLACEMENT_TARGET in text or HOST_SPACE in text

    def _is_pipeline_worthwhile(self, whole: Plan) -> bool:
        has_nodes = len(self.cluster.workers) > 1
        return has_nodes and self.options.effort != "fast" and whole.cost.step_s >= self.limits.min_pipeline_step_s

    def _plan_fitting_pipeline(self, error: MemoryBudgetError) -> PipelinePlan:
        """A pipeline where one program does not fit. error: what that one said."""
        try:
            return self._build_pipeline(self._choose_pipeline(self.clock.renew(), why_not=error.message))
        except PlanError as why:
            raise self._suggest_device_count(error) from why

    def _compare_with_pipeline(self, whole: Plan) -> Plan | PipelinePlan:
        """A pipeline, if its step is shorter including its tasks' launches; else the plan, with a note on the
        reason."""
        if self.clock.is_expired:
            return _add_note(whole, f"no pipeline: {self.clock.end} came before one was looked for")
        try:
            searched = self._choose_pipeline(self.clock.renew(interrupts=True), whole_s=whole.cost.step_s)
            choice = searched.choice
            if choice.step_s >= whole.cost.step_s:
                return _add_note(whole, choice.notes[0] if choice.notes else "no pipeline is faster")
            pipeline = self._build_pipeline(searched)
        except PlanError as why:
            return _add_note(whole, f"no pipeline: {why.message}")
        task_s = hardware_profile(self.cluster.hardware).task_s
        dispatch_s = task_s * max(sum(task.is_compute for task in tasks) for tasks in pipeline.tasks.stages)
        if pipeline.step_s + dispatch_s < whole.cost.step_s:
            return pipeline
        slower = f"the best one, of {choice.stages} stages, is not shorter once its tasks are started one by one"
        return _add_note(whole, f"no pipeline: {slower}")

    def _choose_pipeline(
        self, clock: Clock, *, whole_s: float | None = None, why_not: str = ""
    ) -> PipelineSearchResult:
        return choose_pipeline(
            self.source,
            self.cluster,
            self.options,
            whole_s=whole_s,
            why_not=why_not,
            progress=self.progress,
            clock=clock,
        )

    def _build_pipeline(self, searched: PipelineSearchResult) -> PipelinePlan:
        return build_pipeline(self.source.text, self.cluster, self.options, searched, progress=self.progress)

    def _suggest_device_count(self, error: MemoryBudgetError) -> MemoryBudgetError:
        return suggest_device_count(error, self.source, self.cluster, self.options, self.clock)


def _require_host_memory(plan: Plan, cluster: Cluster) -> Plan:
    """The plan, with the host's limit. Raises MemoryBudgetError where it leaves more there than a device's share."""
    limit_bytes = host_limit_bytes(cluster, hardware_profile(cluster.hardware))
    if plan.memory.host_bytes > limit_bytes:
        raise MemoryBudgetError(
            f"the program leaves {format_bytes(plan.memory.host_bytes)} a device in the memory of the hosts, which "
            f"have {format_bytes(limit_bytes)} for each",
            where="host_memory_gib",
            remedy='leave less there, split it over more devices (mesh=, force="fsdp"), or say in the cluster file, by '
            "host_memory_gib, what the hosts have for one device",
        )
    return replace(plan, memory=replace(plan.memory, host_limit_bytes=limit_bytes))


def _may_pipeline(cluster: Cluster, options: PlanOptions) -> bool:
    """Whether stages are left to the planner, and no other option asks for one program."""
    is_free = options.stages is None and options.mesh is None and options.force is None and options.mode == "search"
    is_free = is_free and options.offload != "optimizer"
    return is_free and cluster.device_count > 1 and not (options.argument_axes or options.output_axes)


def _step_s(plan: Plan | PipelinePlan) -> float:
    return plan.step_s if isinstance(plan, PipelinePlan) else plan.cost.step_s


def _add_note(whole: Plan, note: str) -> Plan:
    return replace(whole, notes=(*whole.notes, note))
