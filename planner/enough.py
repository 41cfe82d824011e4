"""How many devices would do where no plan fits the memory, by making a plan for so many.

What a device needs does not fall as the number of devices grows: what is computed of one row of a batch, or gathered
for use, stays as large. So the thrifty plan of `sparing` is made for two, four, … times the nodes until one fits: it
is a plan that can be had there, which makes the number enough, though fewer devices may be.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardwright.errors import AnnotationError, MemoryBudgetError, OptionError, PlanError
from shardwright.planner.collector import collector_paused
from shardwright.planner.search.search import Search
from shardwright.planner.search.sparing import sparing_plan
from shardwright.report.units import format_bytes

if TYPE_CHECKING:
    from shardwright.cluster import Cluster
    from shardwright.config import PlanOptions
    from shardwright.planner.graph.source import Source

#: Multiples of the cluster that are tried.
TIMES = (2, 4, 8, 16)


def with_enough_devices(
    error: MemoryBudgetError, source: Source, cluster: Cluster, options: PlanOptions
) -> MemoryBudgetError:
    """`error`, its remedy with how many devices would do, as far as a plan that can be made at once tells."""
    found = _devices_that_do(source, cluster, replace(options, mesh=None, stages=1))
    return MemoryBudgetError(error.message, where=error.where, remedy=f"{error.remedy}, or use {found}")


def _devices_that_do(source: Source, cluster: Cluster, options: PlanOptions) -> str:
    if options.deadline_s is None and options.force is None and options.mode == "search":
        with collector_paused():
            for times in TIMES:
                larger = _multiplied(cluster, times)
                search = Search(source, larger, options)
                try:
                    outcome = sparing_plan(search)
                except (PlanError, AnnotationError, OptionError):  # a batch or pins that so many devices do not divide
                    break
                if outcome is not None and outcome.found is not None:
                    needed = format_bytes(search.needed_bytes(outcome.found))
                    return (
                        f"{larger.device_count} devices ({len(larger.nodes)} nodes), where a fully sharded plan needs "
                        f"{needed} a device"
                    )
    return "more devices"


def _multiplied(cluster: Cluster, times: int) -> Cluster:
    """The cluster with every node that has devices so many times."""
    nodes = (node for _ in range(times) for node in cluster.workers)
    return replace(cluster, nodes=tuple(replace(node, index=index) for index, node in enumerate(nodes)))
