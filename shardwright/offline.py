"""Planning in this process, with no server: `shardwright.plan`."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from typing import TYPE_CHECKING, Any, Unpack

from shardwright.clusters.cluster import Cluster
from shardwright.errors import OptionError
from shardwright.options.user_options import UserOptions, plan_options, show_options
from shardwright.user_plans import PipelinePlan, Plan, to_user_plan

if TYPE_CHECKING:
    from shardwright.planner import PlanProgress


@show_options
def plan(
    hlo_text: str,
    cluster: Cluster | str | PathLike[str] | int,
    *,
    progress: Callable[[PlanProgress], None] | None = None,
    cache: bool = True,
    **options: Unpack[UserOptions],
) -> Plan | PipelinePlan:
    """A checked plan for HLO text on a cluster: one program for all devices, or a pipeline of stages.

    Args:
      hlo_text: from `step.lower(...)`, `shardwright lower` or a framework.
      cluster: a Cluster, the path of a cluster file, or a number of local CPU devices.
      progress: called as planning goes on, in this thread.
      cache: answer from plans that this user made before, and keep this one; a folder in
        `$SHARDWRIGHT_CACHE` is used instead of the platform's, `off` there is `cache=False`.

    Raises HloSyntaxError, ClusterConfigError, OptionError, AnnotationError or PlanError.
    """
    from shardwright.planner.cache.plan_cache import plan_with_cache
    from shardwright.planner.cache.store import default_store

    store = default_store("plans") if cache else None
    checked = plan_options(**options)
    return to_user_plan(plan_with_cache(hlo_text, _cluster(cluster), checked, store=store, progress=progress))


def _cluster(cluster: Any) -> Cluster:
    if isinstance(cluster, Cluster):
        return cluster
    if isinstance(cluster, bool):
        raise OptionError(
            f"{cluster!r} is no cluster", where="cluster", remedy="pass a Cluster, a file or a number of devices"
        )
    return Cluster.local(cluster) if isinstance(cluster, int) else Cluster.load(cluster, for_planning=True)
