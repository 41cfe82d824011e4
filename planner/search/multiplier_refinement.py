"""The last step under a binding memory budget: one multiplier per peak, when the gap exceeds the target.

Earlier steps share one multiplier among the peaks. `cutting_planes` with separate multipliers finds a faster plan below
the known bound. Search space, by case: all strategies of a mesh when message passing over them takes a fraction of a
second; descents on other three-axis meshes; otherwise the plan's own chain.
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


def refine_multipliers(search: MeshSearch, found: CandidatePlan) -> CandidatePlan:
    """The feasible plan, or a faster one nearby, with a better bound. A deadline returns the best so far."""
    clock = search.clock
    if found.cost.gap <= search.limits.target_gap or found.multipliers is None or clock.is_expired:
        return found
    interrupts, clock.may_stop = clock.may_stop, True
    try:
        search.report("search", str(found.mesh))
        if found.is_refined or found.unconstrained_solution is None:
            return _improve_plan(search, found, search.lagrangian_search(search, found, found.cost.step_s))
        start = search.evaluate(found.chain.with_multipliers(None), found.unconstrained_solution, found.notes)
        fitting = search.lagrangian_search(search, start, found.cost.step_s)
        if found.dual_bound_s:
            found = _improve_bound(search, found, fitting, found, constant_cost_s(found.chain.graph))
        return _improve_plan(search, found, fitting)
    finally:
        clock.may_stop = interrupts


def refine_over_all_strategies(search: MeshSearch, found: CandidatePlan, chain: Chain) -> CandidatePlan:
    """`refine_multipliers` over all strategies of the plan's mesh.

    chain: a bounding chain without runs, with all moves followed.
    """
    if found.cost.gap <= search.limits.target_gap or search.must_stop():
        return found
    chain = chain.with_multipliers(None)
    incumbent, start = to_bounding_chain(search, chain, found), search.evaluate(chain, solve_tied(chain), found.notes)
    if incumbent is None or search.fits(start):
        return found
    fitting = search.lagrangian_search(search, start, found.cost.step_s, (), incumbent)
    found = _improve_bound(search, found, fitting, incumbent)
    if found.cost.gap <= search.limits.target_gap:
        return found
    candidate = refined_by_prices(fitting, incumbent, _target_step_s(search, found))
    return from_bounding_chain(search, found, candidate) if candidate is not incumbent else found


def constant_cost_s(graph: CostGraph) -> float:
    """Lower bound on the cost outside a chain's variables with tied repeats, seconds."""
    return graph.min_recompute_s() - MAX_SHARE * graph.min_compute_s()


def _improve_bound(
    search: MeshSearch, found: CandidatePlan, fitting: LagrangianSearch, known: CandidatePlan, besides_s: float = 0.0
) -> CandidatePlan:
    """The plan with the bound of per-peak multipliers, when that is higher.

    known: the same plan in the fitted chain.
    besides_s: cost outside that chain, seconds.
    """
    bound_s, price = improve_bound(fitting, known, found.cost.step_s * (1 - search.limits.target_gap) - besides_s)
    if bound_s + besides_s <= found.cost.lower_bound_s:
        return found
    bound = LowerBound(bound_s + besides_s, fitting.start_plan.chain.with_multipliers(price))
    bounded_plan = replace(found, cost=bound.apply_to(found.cost), multipliers=price)
    search.report_plan(bounded_plan)
    return bounded_plan


def _improve_plan(search: MeshSearch, found: CandidatePlan, fitting: LagrangianSearch) -> CandidatePlan:
    """The plan, or a faster one from per-peak multipliers when the gap exceeds the target."""
    if found.cost.gap <= search.limits.target_gap:
        return found
    return choose_faster(search, found, refined_by_prices(fitting, found, _target_step_s(search, found)))


def _target_step_s(search: MeshSearch, found: CandidatePlan) -> float:
    """Step time at the target gap above the known bound, seconds."""
    return found.cost.lower_bound_s / (1 - search.limits.target_gap)
