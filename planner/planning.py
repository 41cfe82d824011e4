"""One program on all devices, or a pipeline of stages: the faster one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shardwright.clusters.cluster import Cluster
from shardwright.cost import hardware_profile
from shardwright.errors import MemoryBudgetError, PlanError
from shardwright.options.plan_options import PlanOptions
from shardwright.planner.clock import Clock, OutOfTimeError
from shardwright.planner.graph.source import Source
from shardwright.planner.limits import SearchLimits
from shardwright.planner.min_devices import suggest_device_count
from shardwright.planner.pipeline.build import build_pipeline, choose_pipeline
from shardwright.planner.search.feasibility import StateTooLargeError
from shardwright.planner.search.search import plan as plan_whole
from shardwright.planner.warm_start.search_records import SearchHistory
from shardwright.plans.pipeline_plan import PipelinePlan
from shardwright.plans.plan import Plan
from shardwright.progress import PlanProgress

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
    clock = clock or Clock(options.deadline_s)
    source = Source(hlo) if isinstance(hlo, str) else hlo
    step_plan = _plan(source, cluster, options, progress, history, clock, limits)
    return replace(step_plan, planning_s=clock.elapsed_s) if isinstance(step_plan, PipelinePlan) else step_plan


def _plan(
    source: Source,
    cluster: Cluster,
    options: PlanOptions,
    progress: Listener | None,
    history: SearchHistory | None,
    clock: Clock,
    limits: SearchLimits,
) -> Plan | PipelinePlan:
    if options.stages is not None and options.stages > 1:
        searched = choose_pipeline(source, cluster, options, progress=progress, clock=clock)
        return build_pipeline(source.text, cluster, options, searched, progress=progress)
    narrowed = single_program_options(cluster, options, limits)
    try:
        whole = plan_whole(
            source, cluster, narrowed, progress=progress, history=history, clock=clock.renew(), limits=limits
        )
    except MemoryBudgetError as error:
        if isinstance(error, StateTooLargeError) or clock.is_expired or not _may_pipeline(cluster, options):
            raise suggest_device_count(error, source, cluster, options, clock) from None
        return _plan_fitting_pipeline(source, cluster, options, error, progress, clock)
    if not (_may_pipeline(cluster, options) and _is_pipeline_worthwhile(cluster, options, whole, limits)):
        return (
            whole
            if narrowed is options
            else _search_all_meshes(source, cluster, options, whole, progress, history, clock, limits)
        )
    if narrowed is not options:
        whole = _add_note(
            whole, f"one program on so many devices is planned on {whole.mesh} only; stages=1 searches all"
        )
    return _choose_pipeline(source, cluster, options, whole, progress, clock)


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


def _search_all_meshes(
    source: Source,
    cluster: Cluster,
    options: PlanOptions,
    narrow: Plan,
    progress: Listener | None,
    history: SearchHistory | None,
    clock: Clock,
    limits: SearchLimits,
) -> Plan:
    """The single-program plan when no pipeline is considered: on every mesh, in the time left."""
    if clock.is_expired:
        return narrow
    try:
        interruptible = clock.renew(interrupts=True)
        whole = plan_whole(
            source, cluster, options, progress=progress, history=history, clock=interruptible, limits=limits
        )
    except OutOfTimeError:
        return narrow
    return min(narrow, whole, key=lambda plan: plan.cost.step_s)


def _may_pipeline(cluster: Cluster, options: PlanOptions) -> bool:
    """Whether stages are left to the planner, and no other option asks for one program."""
    is_free = options.stages is None and options.mesh is None and options.force is None and options.mode == "search"
    return is_free and cluster.device_count > 1 and not (options.argument_axes or options.output_axes)


def _is_pipeline_worthwhile(cluster: Cluster, options: PlanOptions, whole: Plan, limits: SearchLimits) -> bool:
    return len(cluster.workers) > 1 and options.effort != "fast" and whole.cost.step_s >= limits.min_pipeline_step_s


def _plan_fitting_pipeline(
    source: Source,
    cluster: Cluster,
    options: PlanOptions,
    error: MemoryBudgetError,
    progress: Listener | None,
    clock: Clock,
) -> PipelinePlan:
    try:
        searched = choose_pipeline(
            source, cluster, options, why_not=error.message, progress=progress, clock=clock.renew()
        )
        return build_pipeline(source.text, cluster, options, searched, progress=progress)
    except PlanError as why:
        raise suggest_device_count(error, source, cluster, options, clock) from why


def _choose_pipeline(
    source: Source, cluster: Cluster, options: PlanOptions, whole: Plan, progress: Listener | None, clock: Clock
) -> Plan | PipelinePlan:
    """A pipeline, if its step is shorter including its tasks' launches; else the plan, with a note on the reason."""
    if clock.is_expired:
        return _add_note(whole, "no pipeline: the deadline came before one was looked for")
    try:
        interruptible = clock.renew(interrupts=True)
        searched = choose_pipeline(
            source, cluster, options, whole_s=whole.cost.step_s, progress=progress, clock=interruptible
        )
        choice = searched.choice
        if choice.step_s >= whole.cost.step_s:
            return _add_note(whole, choice.notes[0] if choice.notes else "no pipeline is faster")
        pipeline = build_pipeline(source.text, cluster, options, searched, progress=progress)
    except PlanError as why:
        return _add_note(whole, f"no pipeline: {why.message}")
    task_s = hardware_profile(cluster.hardware).task_s
    dispatch_s = task_s * max(sum(task.is_compute for task in tasks) for tasks in pipeline.tasks.stages)
    if pipeline.step_s + dispatch_s < whole.cost.step_s:
        return pipeline
    slower = f"the best one, of {choice.stages} stages, is not shorter once its tasks are started one by one"
    return _add_note(whole, f"no pipeline: {slower}")


def _add_note(whole: Plan, note: str) -> Plan:
    return replace(whole, notes=(*whole.notes, note))
