"""Plans that are descended to from what message passing reads off a chain to bound, and made to fit the memory."""

from __future__ import annotations

from dataclasses import replace

from shardwright.errors import MemoryBudgetError
from shardwright.planner.budget import SizeRange
from shardwright.planner.chain import Chain, SolvedChain
from shardwright.planner.descent import descend
from shardwright.planner.fitting import fitted
from shardwright.planner.found import LEAST_GAIN, Found
from shardwright.planner.mesh_search import MeshSearch


def descended(search: MeshSearch, found: Found, chain: Chain, read: SolvedChain) -> Found:
    """The plan that is descended to from an assignment of a chain, or one near it that fits, if that is faster than one
    that is known."""
    return fitted_from(search, found, read_as_plan(search, found, chain, read))


def read_as_plan(search: MeshSearch, found: Found, chain: Chain, read: SolvedChain) -> Found:
    """The plan that is descended to from an assignment of a chain, at the chain's price of memory."""
    axes, fine = [axis.name for axis in found.mesh.axes], found.chain.graph
    at, time_limit_s = chain.strategies(read.states), search.time_limit_s()
    near, solved = descend(chain, at, fine, axes, time_limit_s=time_limit_s, price=chain.price)
    start = found.start
    if start is not None and not chain.runs:  # repeats that were read off apart stay so
        start = replace(start, chain=start.chain.apart())
    return replace(search.found(near, solved, found.notes), start=start)


def fitted_from(search: MeshSearch, found: Found, other: Found, within: tuple[SizeRange, ...] = ()) -> Found:
    """Another plan, or one near it that fits, if that is faster than one that is known; with what bounds that.

    within: what the other one keeps to, and plans near it that are tried for what fits.
    """
    below_s = found.cost.step_s * (1 - LEAST_GAIN)
    if other.cost.step_s >= below_s:
        return found
    try:
        other = fitted(search, other, below_s, within, found)
    except MemoryBudgetError:
        return found
    if other.cost.step_s >= below_s:
        return found
    bound_s = min(found.cost.lower_bound_s, other.cost.step_s)
    cost = replace(other.cost, lower_bound_s=bound_s, bound_scope=found.cost.bound_scope)
    made = replace(other, start=found.start, price=found.price, cost=cost)
    search.tell_of(made)
    return made
