"""Planning in this process, with no server: `shardwright.plan`."""

from __future__ import annotations

from os import PathLike
from typing import Any

from shardwright.cluster import Cluster
from shardwright.errors import OptionError
from shardwright.options import Force, Mesh, plan_options
from shardwright.plans import Plan


def plan(
    hlo_text: str,
    cluster: Cluster | str | PathLike[str] | int,
    *,
    mesh: Mesh = None,
    force: Force = None,
    memory_budget: int | None = None,
    stages: int | None = None,
    micro_batches: int | None = None,
    schedule: str | None = None,
    effort: str | None = None,
    deadline: float | None = None,
) -> Plan:
    """A checked plan for HLO text on a cluster.

    Args:
      hlo_text: what `step.lower(...)`, `shardwright lower` or a framework printed.
      cluster: a Cluster, the path of a cluster file, or a number of local CPU devices.
      mesh, force and the rest: as in `Session.parallelize`.

    Raises HloSyntaxError, ClusterConfigError, OptionError, AnnotationError or PlanError.
    """
    from shardwright import planner

    options = plan_options(
        mesh=mesh, force=force, memory_budget=memory_budget, stages=stages, micro_batches=micro_batches,
        schedule=schedule, effort=effort, deadline=deadline,
    )  # fmt: skip
    return planner.plan(hlo_text, _cluster(cluster), options)


def _cluster(cluster: Any) -> Cluster:
    if isinstance(cluster, Cluster):
        return cluster
    if isinstance(cluster, bool):
        raise OptionError(f"{cluster!r} is no cluster", where="cluster")
    return Cluster.local(cluster) if isinstance(cluster, int) else Cluster.load(cluster)
