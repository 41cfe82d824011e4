"""Planning in this process, with no server: `shardwright.plan`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any, Unpack

from shardwright.clusters.cluster import Cluster
from shardwright.errors import OptionError
from shardwright.options.user_options import UserOptions, plan_options, show_options
from shardwright.user_plans import PipelinePlan, Plan, to_user_plan

if TYPE_CHECKING:
    from shardwright.hlo.entry import Names
    from shardwright.planner import PlanProgress
    from shardwright.xla.formats import ProgramSource


@show_options
def plan(
    hlo: ProgramSource,
    cluster: Cluster | str | PathLike[str] | int,
    *,
    names: Names | None = None,
    progress: Callable[[PlanProgress], None] | None = None,
    cache: bool = True,
    **options: Unpack[UserOptions],
) -> Plan | PipelinePlan:
    """A checked plan for a program on a cluster: one program for all devices, or a pipeline of stages.

    Args:
      hlo: HLO text, from `step.lower(...)`, `shardwright lower` or a framework; or StableHLO text, the bytes of a
        serialized HloModuleProto or of StableHLO bytecode, or the path of a file with one of them.
      cluster: a Cluster, the path of a cluster file, or a number of local CPU devices.
      names: of the arguments, in pins and reports: all in order, or some by number or by the text's own name. Default:
        the text's.
      progress: called as planning goes on, in this thread.
      cache: answer from plans that this user made before, and keep this one; a folder in
        `$SHARDWRIGHT_CACHE` is used instead of the platform's, `off` there is `cache=False`.

    Raises HloSyntaxError, ClusterConfigError, OptionError, AnnotationError or PlanError.
    """
    from shardwright.hlo import parse
    from shardwright.hlo.entry import name_parameters
    from shardwright.planner.cache.plan_cache import plan_with_cache
    from shardwright.planner.cache.store import default_store
    from shardwright.xla.formats import read_program

    store = default_store("plans") if cache else None
    checked = plan_options(**options)
    hlo_text = read_program(hlo)
    if names is not None:
        checked = replace(checked, argument_names=name_parameters(parse(hlo_text), names))
    return to_user_plan(plan_with_cache(hlo_text, _cluster(cluster), checked, store=store, progress=progress))


def _cluster(cluster: Any) -> Cluster:
    if isinstance(cluster, Cluster):
        return cluster
    if isinstance(cluster, bool):
        raise OptionError(
            f"{cluster!r} is no cluster", where="cluster", remedy="pass a Cluster, a file or a number of devices"
        )
    return Cluster.local(cluster) if isinstance(cluster, int) else Cluster.load(cluster, for_planning=True)
