"""Plans that message passing reads off a chain to bound, or that are descended to from there, and made to fit."""

from __future__ import annotations

import math
from dataclasses import replace

from shardwright.errors import MemoryBudgetError
from shardwright.planner.memory.constraint import BranchingBound
from shardwright.planner.memory.lagrangian import fit_plan
from shardwright.planner.search.mesh_search import MeshSearch
from shardwright.planner.search.solutions import MIN_GAIN, CandidatePlan
from shardwright.planner.segments.descent import descend, reprice_plan
from shardwright.planner.segments.segment_chain import Chain, ChainSolution


def recover_plan(search: MeshSearch, found: CandidatePlan, chain: Chain, read: ChainSolution) -> CandidatePlan:
    """The plan that is descended to from an assignment of a chain, or one near it that fits, if that is faster than one
    that is known."""
    return fit_if_faster(search, found, descend_to_plan(search, found, chain, read))


def descend_to_plan(search: MeshSearch, found: CandidatePlan, chain: Chain, read: ChainSolution) -> CandidatePlan:
    """The plan that is descended to from an assignment of a chain, at the chain's price of memory."""
    axes, fine = [axis.name for axis in found.mesh.axes], found.chain.graph
    at, time_limit_s = chain.strategies(read.states), search.time_limit_s()
    near, solved = descend(chain, at, fine, axes, time_limit_s=time_limit_s, price=chain.multipliers)
    start = found.coarse_solution
    if start is not None and not chain.runs:  # repeats that were read off apart stay so
        start = replace(start, chain=start.chain.untie())
    return replace(search.evaluate(near, solved, found.notes), coarse_solution=start)


def fit_if_faster(
    search: MeshSearch, found: CandidatePlan, other: CandidatePlan, within: tuple[BranchingBound, ...] = ()
) -> CandidatePlan:
    """Another plan, or one near it that fits, if that is faster than one that is known; with what bounds that.

    within: what the other one keeps to, and plans near it that are tried for what fits.
    """
    below_s = found.cost.step_s * (1 - MIN_GAIN)
    if other.cost.step_s >= below_s:
        return found
    try:
        other = fit_plan(search, other, below_s, within, found)
    except MemoryBudgetError:
        return found
    return choose_faster(search, found, other)


def fit_over_all_strategies(
    search: MeshSearch, found: CandidatePlan, chain: Chain, read: ChainSolution, within: tuple[BranchingBound, ...] = ()
) -> CandidatePlan:
    """The plan that is read off a chain with all strategies of its mesh, or the fastest that fits of those that prices
    of memory give there, if that is faster than one that is known; with what bounds that.

    chain: one without runs, whose moves are all followed. within: what the plans that are tried keep to, as what is
    read off does.
    """
    start = search.evaluate(chain.with_multipliers(None), read, found.notes)
    below_s = found.cost.step_s * (1 - MIN_GAIN)
    if start.cost.step_s >= below_s:
        return found
    try:
        made = fit_plan(search, start, below_s, within, to_bounding_chain(search, start.chain, found))
    except MemoryBudgetError:
        return found
    return from_bounding_chain(search, found, made)


def from_bounding_chain(search: MeshSearch, found: CandidatePlan, made: CandidatePlan) -> CandidatePlan:
    """A plan of a chain with all strategies of its mesh as one on the mesh of another that is known, if it fits and is
    faster; with what bounds that."""
    at, fine = made.chain.strategies(made.solution.states), found.chain.graph
    near, solved = reprice_plan(made.chain, at, fine, time_limit_s=search.time_limit_s())
    other = search.evaluate(near, solved, found.notes)
    return choose_faster(search, found, other) if search.fits(other) else found


def to_bounding_chain(search: MeshSearch, chain: Chain, found: CandidatePlan) -> CandidatePlan | None:
    """A plan as one of a chain with all strategies of its mesh; None where that leaves one of its own out."""
    states = chain.states_of(found.chain.strategies(found.solution.states))
    if states is None:
        return None
    return search.evaluate(chain, ChainSolution(states=states, value=math.inf, tied_bound=0.0), found.notes)


def choose_faster(search: MeshSearch, found: CandidatePlan, other: CandidatePlan) -> CandidatePlan:
    """Another plan that fits, with what bounds the one that is known, if it is faster than that."""
    if other.cost.step_s >= found.cost.step_s * (1 - MIN_GAIN):
        return found
    bound_s = min(found.cost.lower_bound_s, other.cost.step_s)
    cost = replace(other.cost, lower_bound_s=bound_s, bound_scope=found.cost.bound_scope)
    made = replace(other, coarse_solution=found.coarse_solution, multipliers=found.multipliers, cost=cost)
    search.report_plan(made)
    return made
