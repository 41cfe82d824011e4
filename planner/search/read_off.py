"""Plans that message passing reads off a chain to bound, or that are descended to from there, and made to fit."""

from __future__ import annotations

import math
from dataclasses import replace

from shardwright.errors import MemoryBudgetError
from shardwright.planner.memory.budget import SizeRange
from shardwright.planner.memory.fitting import fitted
from shardwright.planner.search.found import LEAST_GAIN, Found
from shardwright.planner.search.mesh_search import MeshSearch
from shardwright.planner.segments.chain import Chain, SolvedChain
from shardwright.planner.segments.descent import descend, placed


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
    return if_faster(search, found, other)


def fitted_among_all(
    search: MeshSearch, found: Found, chain: Chain, read: SolvedChain, within: tuple[SizeRange, ...] = ()
) -> Found:
    """The plan that is read off a chain with all strategies of its mesh, or the fastest that fits of those that prices
    of memory give there, if that is faster than one that is known; with what bounds that.

    chain: one without runs, whose moves are all followed. within: what the plans that are tried keep to, as what is
    read off does.
    """
    start = search.found(chain.with_price(None), read, found.notes)
    below_s = found.cost.step_s * (1 - LEAST_GAIN)
    if start.cost.step_s >= below_s:
        return found
    try:
        made = fitted(search, start, below_s, within, known_to(search, start.chain, found))
    except MemoryBudgetError:
        return found
    return placed_near(search, found, made)


def placed_near(search: MeshSearch, found: Found, made: Found) -> Found:
    """A plan of a chain with all strategies of its mesh as one on the mesh of another that is known, if it fits and is
    faster; with what bounds that."""
    at, fine = made.chain.strategies(made.solved.states), found.chain.graph
    near, solved = placed(made.chain, at, fine, time_limit_s=search.time_limit_s())
    other = search.found(near, solved, found.notes)
    return if_faster(search, found, other) if search.fits(other) else found


def known_to(search: MeshSearch, chain: Chain, found: Found) -> Found | None:
    """A plan as one of a chain with all strategies of its mesh; None where that leaves one of its own out."""
    states = chain.states_of(found.chain.strategies(found.solved.states))
    if states is None:
        return None
    return search.found(chain, SolvedChain(states=states, value=math.inf, rolled_bound=0.0), found.notes)


def if_faster(search: MeshSearch, found: Found, other: Found) -> Found:
    """Another plan that fits, with what bounds the one that is known, if it is faster than that."""
    if other.cost.step_s >= found.cost.step_s * (1 - LEAST_GAIN):
        return found
    bound_s = min(found.cost.lower_bound_s, other.cost.step_s)
    cost = replace(other.cost, lower_bound_s=bound_s, bound_scope=found.cost.bound_scope)
    made = replace(other, start=found.start, price=found.price, cost=cost)
    search.tell_of(made)
    return made
