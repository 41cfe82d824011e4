"""Planning in this process, with no server: `shardwright.plan`."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any, Unpack

from shardwright.builders.base import Builder
from shardwright.builders.choices import add_candidates, list_choices, read_options, take_fastest
from shardwright.clusters.cluster import Cluster
from shardwright.errors import OptionError, PlanError
from shardwright.interrupts import first_interrupt
from shardwright.options.plan_options import MEASURED
from shardwright.options.user_options import UserOptions, show_options
from shardwright.progress import BestSoFar
from shardwright.tuning import MOST_INTERRUPTED
from shardwright.user_plans import PipelinePlan, Plan, to_user_plan

if TYPE_CHECKING:
    from shardwright.hlo import Module
    from shardwright.hlo.entry import Names
    from shardwright.options.plan_options import PlanOptions
    from shardwright.planner import PlanProgress
    from shardwright.plans import pipeline_plan as pipelined
    from shardwright.plans import plan as planned
    from shardwright.xla.formats import ProgramSource

_interrupted: dict[str, Plan | PipelinePlan] = {}

_log = logging.getLogger("shardwright")


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

    Ctrl-C ends the search: KeyboardInterrupt, and the same call again returns the best plan so far. A second Ctrl-C
    leaves at once.

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
    """The plan under checked options, of a strategy builder if there is one; see `plan`.

    Where Ctrl-C ends it, the best plan so far is kept, and is the answer to the same call afterwards.
    """
    key = hashlib.sha256(repr((hlo_text, cluster.content_hash, options, builder)).encode()).hexdigest()
    if (kept := _interrupted.pop(key, None)) is not None:
        _log.warning("the best plan that was found until planning was interrupted is used; the next call plans anew")
        return kept
    plan, was_interrupted = plan_until_interrupted(hlo_text, cluster, options, builder, cache=cache, progress=progress)
    if was_interrupted:
        _interrupted[key] = plan
        for oldest in list(_interrupted)[:-MOST_INTERRUPTED]:
            del _interrupted[oldest]
        raise KeyboardInterrupt("planning was interrupted; the same call again returns the best plan so far")
    return plan


def plan_until_interrupted(
    hlo_text: str,
    cluster: Cluster,
    options: PlanOptions,
    builder: Builder | None = None,
    *,
    cache: bool = True,
    progress: Callable[[PlanProgress], None] | None = None,
) -> tuple[Plan | PipelinePlan, bool]:
    """The plan, and whether Ctrl-C ended the search: then it is the best one so far.

    Raises KeyboardInterrupt where there was none yet, and at a second Ctrl-C.
    """
    from shardwright.planner.cache.plan_cache import plan_with_cache
    from shardwright.planner.cache.store import default_store
    from shardwright.planner.clock import Clock, Interruption

    store, interruption, count = default_store("plans") if cache else None, Interruption(), 0
    listener = BestSoFar(progress) if progress is not None else None
    choices = list_choices(builder, options, cluster, lambda: _variables_of(hlo_text, options.argument_names))

    def make(variant: PlanOptions) -> planned.Plan | pipelined.PipelinePlan:
        nonlocal count
        if interruption.at_s is not None and count:
            raise PlanError("planning was interrupted")
        clock = Clock(variant.deadline_s, interruption=interruption)
        plan = plan_with_cache(hlo_text, cluster, variant, store=store, progress=listener, clock=clock)
        count += 1
        return plan

    def stop() -> None:
        interruption.begin()
        _log.warning("planning ends with the best plan so far; Ctrl-C once more leaves at once")

    with first_interrupt(stop) as interrupt:
        try:
            choice, made, others = take_fastest(choices, make, lambda plan: plan)
        except PlanError as error:
            if interrupt.came:
                raise KeyboardInterrupt("planning was interrupted before there was any plan") from error
            raise
        return to_user_plan(add_candidates(choice.record(made), others)), interrupt.came


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
