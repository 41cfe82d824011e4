"""Feasibility of the state alone: a memory bound no sharding avoids, checked before any search.

Every element of the state (parameters and optimizer state) resides on at least one device, between steps too. Hence
some device holds at least the mean, in one program over all devices and in a pipeline alike. What may go to the host
does not count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwright.errors import MemoryBudgetError
from shardwright.planner.clock import OutOfTimeError
from shardwright.planner.memory.messages import TooLargeError
from shardwright.planner.search.min_memory_plan import find_min_memory_plan
from shardwright.units import format_bytes

if TYPE_CHECKING:
    from shardwright.planner.search.search import Search
    from shardwright.planner.search.solutions import SearchResult


class StateTooLargeError(MemoryBudgetError):
    """The state alone does not fit; neither does a pipeline."""


def _min_memory_plan_in_time(search: Search) -> SearchResult | None:
    """The minimum-memory plan; None without one or after a deadline. It only quantifies the shortage."""
    search.clock.may_stop = True
    try:
        return find_min_memory_plan(search)
    except OutOfTimeError:
        return None


def check_state_fits(search: Search) -> None:
    """Raises StateTooLargeError, with the need of a minimum-memory plan when there is one."""
    devices, limit, whole = search.cluster.device_count, search.limit_bytes, search.program.state_bytes
    if whole <= devices * limit:
        return
    if search.offloadable_state and whole - search.program.optimizer_state_bytes <= devices * limit:
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
