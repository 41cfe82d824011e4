"""Planning in this process, with no server: `shardwright.plan`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Unpack

from shardwright.builders.base import Builder
from shardwright.builders.choices import add_candidates, list_choices, read_options, take_fastest
from shardwright.clusters.cluster import Cluster
from shardwright.errors import OptionError
from shardwright.options.user_options import UserOptions, show_options
from shardwright.user_plans import PipelinePlan, Plan, to_user_plan

if TYPE_CHECKING:
    from shardwright.hlo import Module
    from shardwright.options.plan_options import PlanOptions
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
    builder, checked = read_options(options)
    return plan_fastest(hlo_text, _cluster(cluster), checked, builder, cache=cache, progress=progress)


def plan_fastest(
    hlo_text: str,
    cluster: Cluster,
    options: PlanOptions,
    builder: Builder | None = None,
    *,
    cache: bool = True,
    progress: Callable[[PlanProgress], None] | None = None,
) -> Plan | PipelinePlan:
    """The plan under checked options, of a strategy builder if there is one; see `plan`."""
    from shardwright.planner.cache.plan_cache import plan_with_cache
    from shardwright.planner.cache.store import default_store

    store = default_store("plans") if cache else None
    choices = list_choices(builder, options, cluster, lambda: _read_program(hlo_text))
    choice, made, others = take_fastest(
        choices,
        lambda each: plan_with_cache(hlo_text, cluster, each, store=store, progress=progress),
        lambda plan: plan,
    )
    return to_user_plan(add_candidates(choice.record(made), others))


def _read_program(hlo_text: str) -> tuple[Module, Sequence[str], Mapping[int, int]]:
    """A program's module, the names of its arguments, and output → argument updated in place, by flat number."""
    from shardwright.hlo import parse
    from shardwright.planner.graph.donation import alias_donors
    from shardwright.planner.graph.names import parameter_names
    from shardwright.planner.rewrites.edit import flat_aliases

    module = parse(hlo_text)
    return module, parameter_names(module), flat_aliases(alias_donors(module))


def _cluster(cluster: Any) -> Cluster:
    if isinstance(cluster, Cluster):
        return cluster
    if isinstance(cluster, bool):
        raise OptionError(
            f"{cluster!r} is no cluster", where="cluster", remedy="pass a Cluster, a file or a number of devices"
        )
    return Cluster.local(cluster) if isinstance(cluster, int) else Cluster.load(cluster, for_planning=True)
