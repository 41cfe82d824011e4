"""The last of a search that memory binds, where more is open than a plan may leave: a price of memory for each peak.

All that came before prices the peaks of plans alike. What `cutting_planes` finds at prices of their own is a faster
plan under the bound that is known. It is looked for where plans were looked for before: among all strategies of a mesh
where message passing over them takes a fraction of a second, by descents on other meshes of three axes, and else in the
chain that the plan is of.
"""

from __future__ import annotations

from dataclasses import replace

from shardwright.planner.memory.cutting_planes import improve_bound
from shardwright.planner.memory.cutting_planes import improve_plan as refined_by_prices
from shardwright.planner.memory.lagrangian import LagrangianSearch
from shardwright.planner.search.dual_bound import LowerBound
from shardwright.planner.search.mesh_search import MeshSearch
from shardwright.planner.search.primal_recovery import choose_faster, from_bounding_chain, to_bounding_chain
from shardwright.planner.search.solutions import CandidatePlan
from shardwright.planner.segments.bound import solve_tied
from shardwright.planner.segments.cost_graph import CostGraph
from shardwright.planner.segments.segment_chain import Chain
from shardwright.planner.strategies.tie_break import MAX_SHARE

#: The gap that a plan may have.
TARGET_GAP = 0.01


def refine_multipliers(search: MeshSearch, found: CandidatePlan) -> CandidatePlan:
    """A plan that fits, or a faster one near those that were looked at, with a better bound. A deadline leaves what is
    known by then."""
    clock = search.clock
    if found.cost.gap <= TARGET_GAP or found.multipliers is None or clock.is_expired:
        return found
    interrupts, clock.may_stop = clock.may_stop, True
    try:
        search.report("search", str(found.mesh))
        if found.is_refined or found.unconstrained_solution is None:
            return _improve_plan(search, found, LagrangianSearch(search, found, found.cost.step_s))
        start = search.evaluate(found.chain.with_multipliers(None), found.unconstrained_solution, found.notes)
        fitting = LagrangianSearch(search, start, found.cost.step_s)
        if found.dual_bound_s:
            found = _improve_bound(search, found, fitting, found, constant_cost_s(found.chain.graph))
        return _improve_plan(search, found, fitting)
    finally:
        clock.may_stop = interrupts


def refine_over_all_strategies(search: MeshSearch, found: CandidatePlan, chain: Chain) -> CandidatePlan:
    """The same, of all strategies of the plan's mesh.

    chain: to bound, without runs, whose moves are all followed.
    """
    if found.cost.gap <= TARGET_GAP or search.must_stop():
        return found
    chain = chain.with_multipliers(None)
    known, start = to_bounding_chain(search, chain, found), search.evaluate(chain, solve_tied(chain), found.notes)
    if known is None or search.fits(start):
        return found
    fitting = LagrangianSearch(search, start, found.cost.step_s, (), known)
    found = _improve_bound(search, found, fitting, known)
    if found.cost.gap <= TARGET_GAP:
        return found
    made = refined_by_prices(fitting, known, _target_step_s(found))
    return from_bounding_chain(search, found, made) if made is not known else found


def constant_cost_s(graph: CostGraph) -> float:
    """What plans take at least that no choice of a chain's variables says, for those whose repeats decide alike."""
    return graph.min_recompute_s() - MAX_SHARE * graph.min_compute_s()


def _improve_bound(
    search: MeshSearch, found: CandidatePlan, fitting: LagrangianSearch, known: CandidatePlan, besides_s: float = 0.0
) -> CandidatePlan:
    """A plan with the bound that prices for each peak give, if that is a better one. known: the same in the chain that
    is fitted. besides_s: what all take besides what that says."""
    bound_s, price = improve_bound(fitting, known, found.cost.step_s * (1 - TARGET_GAP) - besides_s)
    if bound_s + besides_s <= found.cost.lower_bound_s:
        return found
    bound = LowerBound(bound_s + besides_s, fitting.start_plan.chain.with_multipliers(price))
    made = replace(found, cost=bound.apply_to(found.cost), multipliers=price)
    search.report_plan(made)
    return made


def _improve_plan(search: MeshSearch, found: CandidatePlan, fitting: LagrangianSearch) -> CandidatePlan:
    """A plan, or a faster one that prices for each peak give, if more is open than it may leave."""
    if found.cost.gap <= TARGET_GAP:
        return found
    return choose_faster(search, found, refined_by_prices(fitting, found, _target_step_s(found)))


def _target_step_s(found: CandidatePlan) -> float:
    """What a plan may take under the bound that is known."""
    return found.cost.lower_bound_s / (1 - TARGET_GAP)
