"""Planning in this process, with no server: `shardwright.plan`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any, Unpack

from shardwright.builders.base import Builder
from shardwright.builders.choices import add_candidates, list_choices, read_options, take_fastest
from shardwright.clusters.cluster import Cluster
from shardwright.errors import OptionError
from shardwright.options.plan_options import MEASURED
from shardwright.options.user_options import UserOptions, show_options
from shardwright.progress import BestSoFar
from shardwright.user_plans import PipelinePlan, Plan, to_user_plan

if TYPE_CHECKING:
    from shardwright.hlo import Module
    from shardwright.hlo.entry import Names
    from shardwright.options.plan_options import PlanOptions
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
    from shardwright.xla.formats import read_program

    builder, checked = read_options(options)
    if checked.background:
        raise OptionError(
            "a plan that is made here is not improved while it runs",
            where="background",
            remedy="pass it to Session.parallelize, or give a deadline",
        )
    if checked.effort == MEASURED:
        raise OptionError(
            "a plan that is made here is not measured",
            where="effort",
            remedy='pass it to Session.parallelize, or run "shardwright tune"',
        )
    hlo_text = read_program(hlo)
    if names is not None:
        checked = replace(checked, argument_names=name_parameters(parse(hlo_text), names))
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
    listener = BestSoFar(progress) if progress is not None else None
    choices = list_choices(builder, options, cluster, lambda: _variables_of(hlo_text, options.argument_names))
    choice, made, others = take_fastest(
        choices,
        lambda each: plan_with_cache(hlo_text, cluster, each, store=store, progress=listener),
        lambda plan: plan,
    )
    return to_user_plan(add_candidates(choice.record(made), others))


def _variables_of(hlo_text: str, names: Sequence[str]) -> tuple[Module, Sequence[str], Mapping[int, int]]:
    """A program's module, the names of its arguments, and output → argument updated in place, by flat number.

    names: of the arguments; empty: the text's.
    """
    from shardwright.hlo import parse
    from shardwright.hlo.entry import flat_aliases, parameter_names
    from shardwright.planner.graph.donation import alias_donors

    module = parse(hlo_text)
    return module, names or parameter_names(module), flat_aliases(alias_donors(module))


def _cluster(cluster: Any) -> Cluster:
    if isinstance(cluster, Cluster):
        return cluster
    if isinstance(cluster, bool):
        raise OptionError(
            f"{cluster!r} is no cluster", where="cluster", remedy="pass a Cluster, a file or a number of devices"
        )
    return Cluster.local(cluster) if isinstance(cluster, int) else Cluster.load(cluster, for_planning=True)
