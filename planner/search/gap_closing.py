"""Gap closing on three-axis meshes: a tighter bound and a better plan, with costlier prices.

The first bound counts uneven and high-rank moves by the bytes a device must receive (`relaxed_prices`), possibly far
below XLA's moves. When the gap exceeds `limits.target_gap`, moves of every rank are followed through XLA's partitioner
(heads not divisible by the axes are a fourth dimension). A remaining gap may stem from tied repeats in short runs:
these are untied.

1. Large programs try one axis at a time first (`local_search`).
2. The bound is tightened before further plans: it is cheaper. Then pairs of axes are tried.
3. With the gap still open, repeats are untied and message passing runs to near the relaxation's optimum. Its rounded
   assignment is itself a plan and a better start of the descent than any on two axes.

Under a binding memory budget, a multiplier maximizes the bound (`dual_bound.LagrangianDual`), and a plan is rounded
from a cut with slack; likewise when the plan has slack but faster plans do not fit. The descended plan is fitted like
any other (`lagrangian`) while it can still beat the incumbent. A duality gap is closed by branching on one value's size
(`branching`). There, and with untied repeats, multipliers are tried over all strategies: cheaper computationally than
descents (`primal_recovery.fit_over_all_strategies`).

When edges have many entries and exact prices are expensive, messages are first rounded with fewer moves followed: they
converge closer then, and the descent corrects the underpriced moves.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardwright.planner.clock import OutOfTimeError
from shardwright.planner.memory.constraint import MemoryConstraint, Multipliers
from shardwright.planner.plans.assemble import decide
from shardwright.planner.search.branching import Branch
from shardwright.planner.search.dual_bound import (
    DualCut,
    LagrangianDual,
    LowerBound,
    bound_feasible_plans,
    subtract_budget,
)
from shardwright.planner.search.mesh_search import MeshSearch
from shardwright.planner.search.primal_recovery import (
    descend_to_plan,
    fit_if_faster,
    recover_plan,
)
from shardwright.planner.search.solutions import CandidatePlan
from shardwright.planner.search.tuning import MAX_REFINED_ENTRIES, ROUNDING_MULTIPLIERS, WIDE_GAP
from shardwright.planner.segments.bound import solve_tied
from shardwright.planner.segments.segment_chain import Chain, ChainSolution
from shardwright.planner.solver.warm_start import WarmStart
from shardwright.planner.tuning import EXACT_RANK

if TYPE_CHECKING:
    from shardwright.planner.search.search import Search


def close_gap(search: Search, incumbent: CandidatePlan, bounding: Chain | None = None) -> CandidatePlan:
    """A three-axis plan that fits, or a faster one, with a better bound. A deadline returns the best so far.

    bounding: the chain of its bound, if any.
    """
    clock, target_gap = search.clock, search.limits.target_gap
    if incumbent.cost.gap <= target_gap or clock.is_expired:
        return incumbent
    most = search.max_rank
    interrupts, clock.may_stop = clock.may_stop, True
    try:
        search.report("search", str(incumbent.mesh))
        if search.is_large and incumbent.multipliers is None and incumbent.cost.gap <= WIDE_GAP:
            incumbent = search.block_coordinate_descent(incumbent, target_gap, together=1)
            if incumbent.cost.gap <= target_gap:
                return incumbent
        is_followed = bounding is not None and search.with_exact_moves(bounding, most) is bounding
        if bounding is not None and is_followed:
            chain = priced = bounding
        else:
            chain = priced = search.build_bounding_chain(incumbent.mesh, even_rank=most, uneven_rank=most)
        if incumbent.multipliers is not None or not is_followed:
            bound = bound_feasible_plans(chain, incumbent.multipliers, search.limit_bytes, search.time_limit_s())
            incumbent, priced = (
                replace(incumbent, cost=bound.apply_to(incumbent.cost), multipliers=bound.chain.multipliers),
                bound.chain,
            )
            search.report_plan(incumbent)
        better = search.limits.fine_target_gap if _has_few_entries(search, priced) else target_gap
        if incumbent.multipliers is None:
            incumbent = search.block_coordinate_descent(incumbent, better, together=2)
            better = target_gap if search.is_large else better
        ranks = [(EXACT_RANK, better), (most, target_gap)]
        if incumbent.cost.gap > target_gap and incumbent.multipliers is None:
            incumbent = _raise_bound(search, incumbent, LowerBound(solve_tied(chain.untie()).tied_bound, chain))
        if incumbent.cost.gap > target_gap and _has_few_entries(search, chain.untie()):
            incumbent, ranks = _close_gap_untied(search, incumbent, chain.untie()), [(EXACT_RANK, target_gap)]
        for rank, most_open in ranks:
            if incumbent.cost.gap <= most_open or clock.is_expired:
                break
            search.report("search", str(incumbent.mesh))
            incumbent = _recover_at(
                search, incumbent, search.with_exact_moves(chain, rank).with_multipliers(incumbent.multipliers)
            )
        if incumbent.cost.gap > target_gap and _count_edge_entries(chain.untie()) <= MAX_REFINED_ENTRIES:
            incumbent = search.refine_over_all_strategies(incumbent, chain.untie())
    except OutOfTimeError:
        incumbent = search.reported_plan or incumbent  # including the last plan of an interrupted pass
    finally:
        clock.may_stop = interrupts
    return incumbent


def _has_few_entries(search: MeshSearch, chain: Chain) -> bool:
    """Whether message passing takes seconds."""
    return _count_edge_entries(chain) <= search.limits.max_cheap_entries


def _count_edge_entries(chain: Chain) -> int:
    """Entries of all edges between decisions; repeats of a run count once."""
    kinds = dict.fromkeys(kind for kind, _ in chain.cores())
    return sum(edge.size for kind in kinds for edge in kind.reduction.core.edges.values())


def _close_gap_untied(search: Search, incumbent: CandidatePlan, chain: Chain) -> CandidatePlan:
    """The plan with the best Lagrangian bound, or a faster one rounded at some multiplier.

    chain: with untied repeats.
    """
    target_gap = search.limits.target_gap
    chain.warm_start = WarmStart()
    solution, model = solve_tied(chain), search.memory_model(chain.graph.variables.shared_layouts)
    incumbent = _raise_bound(search, incumbent, LowerBound(solution.tied_bound, chain))
    if incumbent.cost.gap <= search.limits.fine_target_gap:
        return incumbent
    peaks = [peak for peak, _ in incumbent.multipliers.constraints] if incumbent.multipliers is not None else []
    peaks = peaks or [model.constraint_at_peak(decide(chain.graph, solution.states))]
    peaks = [peak for peak in peaks if model.bytes_at(peak, incumbent.decisions) <= search.limit_bytes]
    dual = LagrangianDual(search=search, chain=chain, constraints=peaks, solve=solve_tied)
    low = dual.to_cut(0.0, chain, solution) if peaks else None  # else no peak bounds feasible plans
    if low is None or low.slope <= 0:
        return _recover_feasible(search, incumbent, chain, solution)
    if incumbent.cost.gap <= target_gap:
        return incumbent
    high: DualCut | None = None
    is_in_vain = False
    for cut in dual.maximize(low, dual.evaluate(low.multiplier_for(incumbent.cost.step_s), low)):
        incumbent = _raise_bound(search, incumbent, LowerBound(cut.bound_s, cut.chain))
        if cut.slope <= 0 and incumbent.cost.gap > target_gap and not is_in_vain:  # the next multipliers are close
            previous, incumbent = incumbent, search.fit_over_all_strategies(incumbent, cut.chain, cut.solution)
            is_in_vain = incumbent is previous
        if incumbent.cost.gap <= target_gap:
            return incumbent
        low, high = (cut, high) if cut.slope > 0 else (low, cut)
    if high is None:
        return incumbent
    root = Branch(bound_s=incumbent.cost.lower_bound_s, dual=dual, low=low, high=high)
    return search.branch_and_bound(incumbent, root, target_gap)


def _raise_bound(search: MeshSearch, incumbent: CandidatePlan, bound: LowerBound) -> CandidatePlan:
    """The plan with the bound and its multipliers, when that is higher."""
    if bound.seconds <= incumbent.cost.lower_bound_s:
        return incumbent
    incumbent = replace(incumbent, cost=bound.apply_to(incumbent.cost), multipliers=bound.chain.multipliers)
    search.report_plan(incumbent)
    return incumbent


def _recover_at(search: MeshSearch, incumbent: CandidatePlan, chain: Chain) -> CandidatePlan:
    """The plan descended from a chain's rounded messages, with the final bound."""
    solution = solve_tied(chain)
    if not chain.runs:
        incumbent = _raise_bound(search, incumbent, subtract_budget(solution.tied_bound, chain, search.limit_bytes))
    return recover_plan(search, incumbent, chain, solution)


def _recover_feasible(
    search: MeshSearch, incumbent: CandidatePlan, chain: Chain, assignment: ChainSolution
) -> CandidatePlan:
    """Result of `recover_plan` when feasible; otherwise the fastest feasible plan rounded with multipliers at its own
    peaks.

    The bound's multipliers price the unsharded program's peak. A plan with slack there may peak elsewhere, in buffers
    of its own layouts; the mesh may have an equally fast plan without that peak.
    """
    unit, peaks = incumbent.cost.step_s / incumbent.memory.peak_bytes, list[MemoryConstraint]()
    model = search.memory_model(chain.graph.variables.shared_layouts)
    other = descend_to_plan(search, incumbent, chain, assignment)
    for price in ROUNDING_MULTIPLIERS:
        if search.fits(other) or search.must_stop():
            break
        peaks += [
            model.constraint_at_peak(other.decisions),
            model.constraint_of_buffers(other.live_buffers, other.decisions),
        ]
        chain = chain.with_multipliers(Multipliers.split_equally(peaks, price * unit))
        candidate = descend_to_plan(search, incumbent, chain, solve_tied(chain))
        if candidate.cost.step_s >= incumbent.cost.step_s:  # a feasible plan may lie between the two
            break
        other = candidate
    return fit_if_faster(search, incumbent, other)
