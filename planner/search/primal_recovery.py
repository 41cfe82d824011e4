"""Primal recovery: plans rounded from a bounding chain's messages, refined by descent, and fitted to the memory."""

from __future__ import annotations

import math
from dataclasses import replace

from shardwright.errors import MemoryBudgetError
from shardwright.planner.memory.constraint import BranchingBound
from shardwright.planner.memory.lagrangian import fit_plan
from shardwright.planner.search.mesh_search import MeshSearch
from shardwright.planner.search.solutions import CandidatePlan
from shardwright.planner.search.tuning import MIN_GAIN
from shardwright.planner.segments.descent import descend, reprice_plan
from shardwright.planner.segments.segment_chain import Chain, ChainSolution


def recover_plan(
    search: MeshSearch, incumbent: CandidatePlan, chain: Chain, assignment: ChainSolution
) -> CandidatePlan:
    """The incumbent, or a faster feasible plan descended from an assignment of a chain."""
    return fit_if_faster(search, incumbent, descend_to_plan(search, incumbent, chain, assignment))


def descend_to_plan(
    search: MeshSearch, incumbent: CandidatePlan, chain: Chain, assignment: ChainSolution
) -> CandidatePlan:
    """The plan descended from an assignment of a chain, under the chain's memory multipliers."""
    axes, fine = [axis.name for axis in incumbent.mesh.axes], incumbent.chain.graph
    at, time_limit_s = chain.strategies(assignment.states), search.time_limit_s()
    near, solved = descend(chain, at, fine, axes, time_limit_s=time_limit_s, price=chain.multipliers)
    start = incumbent.coarse_solution
    if start is not None and not chain.runs:  # untied repeats stay untied
        start = replace(start, chain=start.chain.untie())
    return replace(search.evaluate(near, solved, incumbent.notes), coarse_solution=start)


def fit_if_faster(
    search: MeshSearch, incumbent: CandidatePlan, other: CandidatePlan, within: tuple[BranchingBound, ...] = ()
) -> CandidatePlan:
    """The incumbent, or the faster feasible plan at or near `other`, with the incumbent's bound.

    within: size ranges of the other plan and its fitted neighbors.
    """
    below_s = incumbent.cost.step_s * (1 - MIN_GAIN)
    if other.cost.step_s >= below_s:
        return incumbent
    try:
        other = fit_plan(search, other, below_s, within, incumbent)
    except MemoryBudgetError:
        return incumbent
    return choose_faster(search, incumbent, other)


def fit_over_all_strategies(
    search: MeshSearch,
    incumbent: CandidatePlan,
    chain: Chain,
    assignment: ChainSolution,
    within: tuple[BranchingBound, ...] = (),
) -> CandidatePlan:
    """The incumbent, or a faster feasible plan, with the incumbent's bound: the rounded plan of a chain with
    all strategies of its mesh, or the fastest feasible one at some multiplier there.

    chain: without runs, with all moves followed.
    assignment: the rounded assignment.
    within: size ranges of the rounded and the fitted plans.
    """
    start = search.evaluate(chain.with_multipliers(None), assignment, incumbent.notes)
    below_s = incumbent.cost.step_s * (1 - MIN_GAIN)
    if start.cost.step_s >= below_s:
        return incumbent
    try:
        feasible_plan = fit_plan(search, start, below_s, within, to_bounding_chain(search, start.chain, incumbent))
    except MemoryBudgetError:
        return incumbent
    return from_bounding_chain(search, incumbent, feasible_plan)


def from_bounding_chain(search: MeshSearch, incumbent: CandidatePlan, plan: CandidatePlan) -> CandidatePlan:
    """The incumbent, or a bounding chain's plan translated to its mesh when feasible and faster; with the
    incumbent's bound."""
    at, fine = plan.chain.strategies(plan.solution.states), incumbent.chain.graph
    near, solved = reprice_plan(plan.chain, at, fine, time_limit_s=search.time_limit_s())
    other = search.evaluate(near, solved, incumbent.notes)
    return choose_faster(search, incumbent, other) if search.fits(other) else incumbent


def to_bounding_chain(search: MeshSearch, chain: Chain, plan: CandidatePlan) -> CandidatePlan | None:
    """A plan translated to a chain with all strategies of its mesh; None when a strategy is missing there."""
    states = chain.states_of(plan.chain.strategies(plan.solution.states))
    if states is None:
        return None
    return search.evaluate(chain, ChainSolution(states=states, value=math.inf, tied_bound=0.0), plan.notes)


def choose_faster(search: MeshSearch, incumbent: CandidatePlan, other: CandidatePlan) -> CandidatePlan:
    """The faster of the incumbent and a feasible plan, with the incumbent's bound."""
    if other.cost.step_s >= incumbent.cost.step_s * (1 - MIN_GAIN):
        return incumbent
    bound_s = min(incumbent.cost.lower_bound_s, other.cost.step_s)
    cost = replace(other.cost, lower_bound_s=bound_s, bound_scope=incumbent.cost.bound_scope)
    bounded_plan = replace(
        other, coarse_solution=incumbent.coarse_solution, multipliers=incumbent.multipliers, cost=cost
    )
    search.report_plan(bounded_plan)
    return bounded_plan
