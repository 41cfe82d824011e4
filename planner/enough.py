"""How many devices would do where no plan fits the memory, by making a plan for so many.

What a device needs does not fall as the number of devices grows: what is computed of one row of a batch, or gathered
for use, stays as large. So the thrifty plan of `sparing` is made for two, four, … times the nodes until one fits, then
for numbers between that and the last that is not enough: it is a plan that can be had there, which makes the number
enough, though fewer devices may be.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from shardwright.errors import AnnotationError, MemoryBudgetError, OptionError, PlanError
from shardwright.planner.clock import OutOfTimeError
from shardwright.planner.collector import collector_paused
from shardwright.planner.search.search import Search
from shardwright.planner.search.sparing import thriftiest_plan
from shardwright.report.units import format_bytes

if TYPE_CHECKING:
    from shardwright.cluster import Cluster
    from shardwright.config import PlanOptions
    from shardwright.planner.clock import Clock
    from shardwright.planner.graph.source import Source
    from shardwright.planner.search.found import Outcome

#: Multiples of the cluster that are tried, each twice the one before it.
MOST_DOUBLINGS = 4


def with_enough_devices(
    error: MemoryBudgetError, source: Source, cluster: Cluster, options: PlanOptions, clock: Clock
) -> MemoryBudgetError:
    """`error`, its remedy with how many devices would do, as far as a plan that can be made at once tells.

    clock: of the whole of planning.
    """
    found = _devices_that_do(source, cluster, replace(options, mesh=None, stages=1), clock)
    remedy = f"{error.remedy}, or use {found}" if found else error.remedy
    return MemoryBudgetError(error.message, where=error.where, remedy=remedy)


def _devices_that_do(source: Source, cluster: Cluster, options: PlanOptions, clock: Clock) -> str:
    """How many devices, in words; nothing where more do not help."""
    if options.force is not None or options.mode != "search" or clock.is_late:
        return "more devices"

    def search_on(times: int) -> Search:
        return Search(source, _multiplied(cluster, times), options, clock=clock.fresh(interrupts=True))

    with collector_paused():
        try:
            enough = _least_that_does(search_on, clock)
        except OutOfTimeError:
            enough = None
    if enough is None or enough.found is None:
        return "more devices" if clock.is_late else ""
    larger, needed = enough.search.cluster, enough.search.needed_bytes(enough.found)
    return (
        f"{larger.device_count} devices ({len(larger.nodes)} nodes), where a fully sharded plan needs "
        f"{format_bytes(needed)} a device"
    )


def _least_that_does(search_on: Callable[[int], Search], clock: Clock) -> Outcome | None:
    """What takes little on the least multiple of the cluster that a plan fits on, of those tried."""
    alone = search_on(1)
    most_bytes = alone.cluster.device_count * alone.limit_bytes
    too_few = max(1, math.ceil(alone.program.state_bytes / most_bytes) - 1)
    times, enough, needed = 2 ** too_few.bit_length(), None, math.inf
    for _ in range(MOST_DOUBLINGS):
        made = None if clock.is_late else _thriftiest_on(search_on, times)
        if made is not None and made.found is not None:
            enough = made
            break
        if made is None or 2 * made.least_bytes - needed > alone.limit_bytes:  # what does not fall is too much alone
            return None
        needed, too_few, times = made.least_bytes, times, 2 * times
    while enough is not None and times - too_few > 1 and not clock.is_late:
        between = (times + too_few) // 2
        made = _thriftiest_on(search_on, between)
        if made is not None and made.found is not None:
            enough, times = made, between
        else:
            too_few = between
    return enough


def _thriftiest_on(search_on: Callable[[int], Search], times: int) -> Outcome | None:
    """What takes little on so many times the cluster, whether it fits or not; None where there is nothing."""
    try:
        return thriftiest_plan(search_on(times))
    except (PlanError, AnnotationError, OptionError):  # a batch or pins that so many devices do not divide
        return None


def _multiplied(cluster: Cluster, times: int) -> Cluster:
    """The cluster with every node that has devices so many times."""
    nodes = (node for _ in range(times) for node in cluster.workers)
    return replace(cluster, nodes=tuple(replace(node, index=index) for index, node in enumerate(nodes)))
