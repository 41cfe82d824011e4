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
from shardwright.planner.tuning import MAX_TIE_SHARE


def refine_multipliers(search: MeshSearch, plan: CandidatePlan) -> CandidatePlan:
    """The feasible plan, or a faster one nearby, with a better bound. A deadline returns the best so far."""
    clock = search.clock
    if plan.cost.gap <= search.limits.target_gap or plan.multipliers is None or clock.is_expired:
        return plan
    interrupts, clock.may_stop = clock.may_stop, True
    try:
        search.report("search", str(plan.mesh))
        if plan.is_refined or plan.unconstrained_solution is None:
            return _improve_plan(search, plan, search.lagrangian_search(search, plan, plan.cost.step_s))
        start = search.evaluate(plan.chain.with_multipliers(None), plan.unconstrained_solution, plan.notes)
        fitting = search.lagrangian_search(search, start, plan.cost.step_s)
        if plan.dual_bound_s:
            plan = _improve_bound(search, plan, fitting, plan, constant_cost_s(plan.chain.graph))
        return _improve_plan(search, plan, fitting)
    finally:
        clock.may_stop = interrupts


def refine_over_all_strategies(search: MeshSearch, plan: CandidatePlan, chain: Chain) -> CandidatePlan:
    """`refine_multipliers` over all strategies of the plan's mesh.

    chain: a bounding chain without runs, with all moves followed.
    """
    if plan.cost.gap <= search.limits.target_gap or search.must_stop():
        return plan
    chain = chain.with_multipliers(None)
    incumbent, start = to_bounding_chain(search, chain, plan), search.evaluate(chain, solve_tied(chain), plan.notes)
    if incumbent is None or search.fits(start):
        return plan
    fitting = search.lagrangian_search(search, start, plan.cost.step_s, (), incumbent)
    plan = _improve_bound(search, plan, fitting, incumbent)
    if plan.cost.gap <= search.limits.target_gap:
        return plan
    candidate = refined_by_prices(fitting, incumbent, _target_step_s(search, plan))
    return from_bounding_chain(search, plan, candidate) if candidate is not incumbent else plan


def constant_cost_s(graph: CostGraph) -> float:
    """Lower bound on the cost outside a chain's variables with tied repeats, seconds."""
    return graph.min_recompute_s() - MAX_TIE_SHARE * graph.min_compute_s()


def _improve_bound(
    search: MeshSearch, plan: CandidatePlan, fitting: LagrangianSearch, incumbent: CandidatePlan, besides_s: float = 0.0
) -> CandidatePlan:
    """The plan with the bound of per-peak multipliers, when that is higher.

    incumbent: the same plan in the fitted chain.
    besides_s: cost outside that chain, seconds.
    """
    bound_s, price = improve_bound(fitting, incumbent, plan.cost.step_s * (1 - search.limits.target_gap) - besides_s)
    if bound_s + besides_s <= plan.cost.lower_bound_s:
        return plan
    bound = LowerBound(bound_s + besides_s, fitting.start_plan.chain.with_multipliers(price))
    bounded_plan = replace(plan, cost=bound.apply_to(plan.cost), multipliers=price)
    search.report_plan(bounded_plan)
    return bounded_plan


def _improve_plan(search: MeshSearch, plan: CandidatePlan, fitting: LagrangianSearch) -> CandidatePlan:
    """The plan, or a faster one from per-peak multipliers when the gap exceeds the target."""
    if plan.cost.gap <= search.limits.target_gap:
        return plan
    return choose_faster(search, plan, refined_by_prices(fitting, plan, _target_step_s(search, plan)))


def _target_step_s(search: MeshSearch, plan: CandidatePlan) -> float:
    """Step time at the target gap above the known bound, seconds."""
    return plan.cost.lower_bound_s / (1 - search.limits.target_gap)
