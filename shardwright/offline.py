"""Planning in this process, with no server: `shardwright.plan`."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from typing import TYPE_CHECKING, Any

from shardwright.cluster import Cluster
from shardwright.errors import OptionError
from shardwright.options import Force, MemoryBudget, Mesh, plan_options
from shardwright.plans import Plan

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
    mode: str | None = None,
    stages: int | None = None,
    micro_batches: int | None = None,
    schedule: str | None = None,
    progress: Callable[[PlanProgress], None] | None = None,
) -> Plan:
    """A checked plan for HLO text on a cluster.

    Args:
      hlo_text: what `step.lower(...)`, `shardwright lower` or a framework printed.
      cluster: a Cluster, the path of a cluster file, or a number of local CPU devices.
      progress: called as planning goes on, in this thread.
      mesh, force and the rest: as in `Session.parallelize`.

    Raises HloSyntaxError, ClusterConfigError, OptionError, AnnotationError or PlanError.
    """
    from shardwright import planner

    options = plan_options(
        mesh=mesh, force=force, memory_budget=memory_budget, deadline=deadline, effort=effort, rewrites=rewrites,
        mode=mode, stages=stages, micro_batches=micro_batches, schedule=schedule,
    )  # fmt: skip
    return planner.plan(hlo_text, _cluster(cluster), options, progress=progress)


def _cluster(cluster: Any) -> Cluster:
    if isinstance(cluster, Cluster):
        return cluster
    if isinstance(cluster, bool):
        raise OptionError(f"{cluster!r} is no cluster", where="cluster")
    return Cluster.local(cluster) if isinstance(cluster, int) else Cluster.load(cluster)
