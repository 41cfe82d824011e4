"""A sufficient number of devices for a program too large for the cluster, by plans on larger clusters.

A device's memory does not vanish with more devices: the computation of one row of a batch, or a value gathered for use,
stays equally large. So the plan of `search.min_memory_plan` is built for two, four, … times the nodes until one fits,
then by bisection down to the last insufficient number. The plan proves its number sufficient; fewer devices may also be
enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from shardwright.errors import AnnotationError, MemoryBudgetError, OptionError, PlanError
from shardwright.planner.clock import OutOfTimeError
from shardwright.planner.gc_pause import gc_paused
from shardwright.planner.search.min_memory_plan import find_min_memory_plan
from shardwright.planner.search.search import Search
from shardwright.planner.tuning import MAX_DOUBLINGS
from shardwright.units import format_bytes

if TYPE_CHECKING:
    from shardwright.clusters.cluster import Cluster
    from shardwright.options.plan_options import PlanOptions
    from shardwright.planner.clock import Clock
    from shardwright.planner.graph.source import Source
    from shardwright.planner.search.solutions import SearchResult


def suggest_device_count(
    error: MemoryBudgetError, source: Source, cluster: Cluster, options: PlanOptions, clock: Clock
) -> MemoryBudgetError:
    """`error`, with a sufficient number of devices added to its remedy, by a quickly built plan.

    clock: of the whole planning.
    """
    devices = _describe_device_count(source, cluster, replace(options, mesh=None, stages=1), clock)
    remedy = f"{error.remedy}, or use {devices}" if devices else error.remedy
    return MemoryBudgetError(error.message, where=error.where, remedy=remedy)


def _describe_device_count(source: Source, cluster: Cluster, options: PlanOptions, clock: Clock) -> str:
    """A sufficient number of devices, in words; empty when more do not help."""
    if options.force is not None or options.mode != "search" or clock.is_expired:
        return "more devices"

    def search_on(times: int) -> Search:
        return Search(source, _multiply_nodes(cluster, times), options, clock=clock.renew(interrupts=True))

    with gc_paused():
        try:
            enough = _find_min_devices(search_on, clock)
        except OutOfTimeError:
            enough = None
    if enough is None or enough.best_plan is None:
        return "more devices" if clock.is_expired else ""
    larger, needed = enough.search.cluster, enough.search.bytes_needed(enough.best_plan)
    return (
        f"{larger.device_count} devices ({len(larger.nodes)} nodes), where a fully sharded plan needs "
        f"{format_bytes(needed)} a device"
    )


def _find_min_devices(search_on: Callable[[int], Search], clock: Clock) -> SearchResult | None:
    """The minimum-memory plan on the smallest multiple of the cluster with a feasible one, of those tried."""
    alone = search_on(1)
    most_bytes = alone.cluster.device_count * alone.limit_bytes
    too_few = max(1, math.ceil(alone.program.state_bytes / most_bytes) - 1)
    times, enough, needed = 2 ** too_few.bit_length(), None, math.inf
    for _ in range(MAX_DOUBLINGS):
        result = None if clock.is_expired else _min_memory_plan_on(search_on, times)
        if result is not None and result.best_plan is not None:
            enough = result
            break
        if (
            result is None or 2 * result.min_needed_bytes - needed > alone.limit_bytes
        ):  # the constant part alone is too much
            return None
        needed, too_few, times = result.min_needed_bytes, times, 2 * times
    while enough is not None and times - too_few > 1 and not clock.is_expired:
        between = (times + too_few) // 2
        result = _min_memory_plan_on(search_on, between)
        if result is not None and result.best_plan is not None:
            enough, times = result, between
        else:
            too_few = between
    return enough


def _min_memory_plan_on(search_on: Callable[[int], Search], times: int) -> SearchResult | None:
    """The minimum-memory plan on a multiple of the cluster, feasible or not; None without one."""
    try:
        return find_min_memory_plan(search_on(times))
    except (PlanError, AnnotationError, OptionError):  # a batch or pins not divisible by so many devices
        return None


def _multiply_nodes(cluster: Cluster, times: int) -> Cluster:
    """The cluster with every node that has devices repeated `times` times."""
    nodes = (node for _ in range(times) for node in cluster.workers)
    return replace(cluster, nodes=tuple(replace(node, index=index) for index, node in enumerate(nodes)))
