"""Whether the state alone fits: what no way of splitting a step can get around, known before anything is searched.

Every element of the state, parameters and what the optimizer keeps, lies on one device at least, between steps too. So
a device has the mean of it at least, in one program for all devices as in a pipeline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwright.errors import MemoryBudgetError
from shardwright.planner.clock import OutOfTimeError
from shardwright.planner.memory.messages import TooLargeError
from shardwright.planner.search.min_memory_plan import find_min_memory_plan
from shardwright.report.units import format_bytes

if TYPE_CHECKING:
    from shardwright.planner.search.search import Search
    from shardwright.planner.search.solutions import SearchResult


class StateTooLargeError(MemoryBudgetError):
    """The state alone does not fit: neither does a pipeline."""


def _min_memory_plan_in_time(search: Search) -> SearchResult | None:
    """What a plan that takes little needs; None where there is none, or a deadline came first: it only says how much
    too little there is."""
    search.clock.may_stop = True
    try:
        return find_min_memory_plan(search)
    except OutOfTimeError:
        return None


def check_state_fits(search: Search) -> None:
    """Raises StateTooLargeError, with what a plan that takes little needs, if one can be had."""
    devices, limit, whole = search.cluster.device_count, search.limit_bytes, search.program.state_bytes
    if whole <= devices * limit:
        return
    message = (
        f"no plan fits {format_bytes(limit)} a device: the state alone takes {format_bytes(whole)}, "
        f"{format_bytes(whole / devices)} on each of {devices} if they share it evenly"
    )
    thrifty = _min_memory_plan_in_time(search)
    least = thrifty.memory_error if thrifty is not None else None
    if not isinstance(least, TooLargeError):
        raise StateTooLargeError(message, where="memory_budget", remedy="use an optimizer that keeps less")
    raise StateTooLargeError(f"{message}; {least.needed}", where=least.where, remedy=least.remedy)
