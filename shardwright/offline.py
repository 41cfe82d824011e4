"""Planning in this process, with no server: `shardwright.plan`."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from typing import TYPE_CHECKING, Any

from shardwright.clusters.cluster import Cluster
from shardwright.errors import OptionError
from shardwright.options.user_options import Force, MemoryBudget, Mesh, plan_options
from shardwright.plans.pipeline_plan import PipelinePlan
from shardwright.plans.plan import Plan

if TYPE_CHECKING:
    from shardwright.planner import PlanProgress


def plan(
    hlo_text: str,
    cluster: Cluster | str | PathLike[str] | int,
    *,
    mesh: Mesh = None,
    force: Force = None,
    memory_budget: MemoryBudget = None,
    deadline: float | None = None,
    effort: str | None = None,
    rewrites: str | None = None,
    remat: str | None = None,
    mode: str | None = None,
    stages: int | None = None,
    micro_batches: int | None = None,
    micro_batch_inexact: bool = False,
    schedule: str | None = None,
    imbalance: float | None = None,
    constraints: str | None = None,
    progress: Callable[[PlanProgress], None] | None = None,
    cache: bool = True,
) -> Plan | PipelinePlan:
    """A checked plan for HLO text on a cluster: one program for all devices, or a pipeline of stages.

    Args:
      hlo_text: from `step.lower(...)`, `shardwright lower` or a framework.
      cluster: a Cluster, the path of a cluster file, or a number of local CPU devices.
      progress: called as planning goes on, in this thread.
      cache: answer from plans that this user made before, and keep this one; a folder in
        `$SHARDWRIGHT_CACHE` is used instead of the platform's, `off` there is `cache=False`.
      mesh, force and the rest: as in `Session.parallelize`.

    Raises HloSyntaxError, ClusterConfigError, OptionError, AnnotationError or PlanError.
    """
    from shardwright.planner.cache.plan_cache import plan_with_cache
    from shardwright.planner.cache.store import default_store

    options = plan_options(
        mesh=mesh, force=force, memory_budget=memory_budget, deadline=deadline, effort=effort, rewrites=rewrites,
        remat=remat, mode=mode, stages=stages, micro_batches=micro_batches, schedule=schedule,
        micro_batch_inexact=micro_batch_inexact, imbalance=imbalance, constraints=constraints,
    )  # fmt: skip
    store = default_store("plans") if cache else None
    return plan_with_cache(hlo_text, _cluster(cluster), options, store=store, progress=progress)


def _cluster(cluster: Any) -> Cluster:
    if isinstance(cluster, Cluster):
        return cluster
    if isinstance(cluster, bool):
        raise OptionError(
            f"{cluster!r} is no cluster", where="cluster", remedy="pass a Cluster, a file or a number of devices"
        )
    return Cluster.local(cluster) if isinstance(cluster, int) else Cluster.load(cluster, for_planning=True)
