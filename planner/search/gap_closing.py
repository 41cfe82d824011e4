"""Where the bound of a plan on three axes leaves too much open: both are looked for again, with dearer prices.

The first bound counts uneven moves, and those of many dimensions, by what a device must receive (`least_moves`), which
may be far less than XLA makes of them. So, where the plan that is known may be over the optimum by more than
`TARGET_GAP`, moves of every rank are followed through its partitioner (heads that the axes do not divide are a fourth
dimension). What is still open then may be what the bound of one repeat loses where a run has few: they are put apart.

The bound comes before most plans, for they are dearer: only what one axis at a time gains in a large program is looked
for first, and then pairs of axes (`nearer`). If too much is open still, repeats are apart and message passing goes on
until it is near the relaxation's optimum: an assignment read off there, being a plan itself, is a better start than any
on two axes, and is descended from.

Where memory binds, a price of it is looked for that bounds most (`memory_bound.LagrangianDual`), and a plan is read off
where what is cheapest leaves room. That holds for a plan that takes less than there is, too, if faster ones take more.
What the descent ends at is made to fit as any plan is (`fitting`), as long as it can be faster than what is known. What
prices leave open is closed by branches, of one value's size at a time (`branching`). In these, and where repeats are
apart, prices are tried among all strategies: that takes less than descents do (`read_off.fit_over_all_strategies`).

Where all that is dear, for edges have many entries, what messages end at is read off with fewer moves followed first:
they get nearer then, and what the true prices make of the moves that were too cheap is the descent's to mend.
"""

from __future__ import annotations

from dataclasses import replace

from shardwright.planner.clock import OutOfTimeError
from shardwright.planner.costs.relaxed_prices import EXACT_RANK
from shardwright.planner.memory.constraint import MemoryConstraint, Multipliers
from shardwright.planner.memory.lagrangian import MIN_MULTIPLIER
from shardwright.planner.plans.assemble import decide
from shardwright.planner.search.branching import Branch, branch_and_bound
from shardwright.planner.search.dual_bound import (
    DualCut,
    LagrangianDual,
    LowerBound,
    bound_feasible_plans,
    subtract_budget,
)
from shardwright.planner.search.local_search import block_coordinate_descent
from shardwright.planner.search.mesh_search import MeshSearch
from shardwright.planner.search.multiplier_refinement import refine_over_all_strategies
from shardwright.planner.search.primal_recovery import (
    descend_to_plan,
    fit_if_faster,
    fit_over_all_strategies,
    recover_plan,
)
from shardwright.planner.search.solutions import CandidatePlan
from shardwright.planner.segments.bound import solve_tied
from shardwright.planner.segments.segment_chain import Chain, ChainSolution
from shardwright.planner.solver.warm_start import WarmStart

#: The gap that a plan may have; and the one down to which a plan is looked for all the same, once a gap had to be
#: closed, where the edges between decisions have so few entries that message passing takes seconds (17 million: 9 s).
TARGET_GAP, FINE_TARGET_GAP = 0.01, 0.005
MAX_CHEAP_ENTRIES = 25_000_000

#: Entries with which prices of memory for each peak are tried, some twenty at 0.12 s a million.
MAX_REFINED_ENTRIES = 50_000_000

#: The gap over which it is the bound, more than the plan, that is far from the optimum.
WIDE_GAP = 0.03

#: Prices of a byte at which a plan is read off where the fastest one does not fit, as `fitting` counts them: nearly
#: nothing first, for what takes less at no cost.
_MULTIPLIERS = (MIN_MULTIPLIER, 8 * MIN_MULTIPLIER, 64 * MIN_MULTIPLIER)


def close_gap(search: MeshSearch, found: CandidatePlan, bounding: Chain | None = None) -> CandidatePlan:
    """A plan on three axes that fits, or a faster one that does, with a better bound. A deadline leaves what is
    known by then. bounding: the chain that its bound is of, if it has one."""
    clock = search.clock
    if found.cost.gap <= TARGET_GAP or clock.is_expired:
        return found
    most = search.max_rank
    interrupts, clock.may_stop = clock.may_stop, True
    try:
        search.report("search", str(found.mesh))
        if search.is_large and found.multipliers is None and found.cost.gap <= WIDE_GAP:
            found = block_coordinate_descent(search, found, TARGET_GAP, together=1)
            if found.cost.gap <= TARGET_GAP:
                return found
        is_followed = bounding is not None and search.with_exact_moves(bounding, most) is bounding
        if bounding is not None and is_followed:
            chain = priced = bounding
        else:
            chain = priced = search.build_bounding_chain(found.mesh, even_rank=most, uneven_rank=most)
        if found.multipliers is not None or not is_followed:
            bound = bound_feasible_plans(chain, found.multipliers, search.limit_bytes, search.time_limit_s())
            found, priced = (
                replace(found, cost=bound.apply_to(found.cost), multipliers=bound.chain.multipliers),
                bound.chain,
            )
            search.report_plan(found)
        better = FINE_TARGET_GAP if _has_few_entries(priced) else TARGET_GAP
        if found.multipliers is None:
            found = block_coordinate_descent(search, found, better, together=2)
            better = TARGET_GAP if search.is_large else better
        ranks = [(EXACT_RANK, better), (most, TARGET_GAP)]
        if found.cost.gap > TARGET_GAP and found.multipliers is None:
            found = _raise_bound(search, found, LowerBound(solve_tied(chain.untie()).tied_bound, chain))
        if found.cost.gap > TARGET_GAP and _has_few_entries(chain.untie()):
            found, ranks = _close_gap_untied(search, found, chain.untie()), [(EXACT_RANK, TARGET_GAP)]
        for rank, most_open in ranks:
            if found.cost.gap <= most_open or clock.is_expired:
                break
            search.report("search", str(found.mesh))
            found = _recover_at(search, found, search.with_exact_moves(chain, rank).with_multipliers(found.multipliers))
        if found.cost.gap > TARGET_GAP and _count_edge_entries(chain.untie()) <= MAX_REFINED_ENTRIES:
            found = refine_over_all_strategies(search, found, chain.untie())
    except OutOfTimeError:
        found = search.reported_plan or found  # what was found in the middle of a pass counts
    finally:
        clock.may_stop = interrupts
    return found


def _has_few_entries(chain: Chain) -> bool:
    """Whether message passing takes seconds."""
    return _count_edge_entries(chain) <= MAX_CHEAP_ENTRIES


def _count_edge_entries(chain: Chain) -> int:
    """Entries of all edges between decisions, those of a run's repeats once."""
    kinds = dict.fromkeys(kind for kind, _ in chain.cores())
    return sum(edge.size for kind in kinds for edge in kind.reduction.core.edges.values())


def _close_gap_untied(search: MeshSearch, found: CandidatePlan, chain: Chain) -> CandidatePlan:
    """A plan with the best bound that prices of memory give, or a faster one that is read off at one of them.

    chain: one whose repeats decide each for itself.
    """
    chain.warm_start = WarmStart()
    read, model = solve_tied(chain), search.memory_model(chain.graph.variables.shared_layouts)
    found = _raise_bound(search, found, LowerBound(read.tied_bound, chain))
    if found.cost.gap <= FINE_TARGET_GAP:
        return found
    peaks = [peak for peak, _ in found.multipliers.constraints] if found.multipliers is not None else []
    peaks = peaks or [model.constraint_at_peak(decide(chain.graph, read.states))]
    peaks = [peak for peak in peaks if model.bytes_at(peak, found.decisions) <= search.limit_bytes]
    dual = LagrangianDual(search=search, chain=chain, constraints=peaks, solve=solve_tied)
    low = dual.to_cut(0.0, chain, read) if peaks else None  # what a plan that fits may take bounds none
    if low is None or low.slope <= 0:
        return _recover_feasible(search, found, chain, read)
    if found.cost.gap <= TARGET_GAP:
        return found
    high: DualCut | None = None
    is_in_vain = False
    for made in dual.maximize(low, dual.evaluate(low.multiplier_for(found.cost.step_s), low)):
        found = _raise_bound(search, found, LowerBound(made.bound_s, made.chain))
        if made.slope <= 0 and found.cost.gap > TARGET_GAP and not is_in_vain:  # the next prices are near this one
            known, found = found, fit_over_all_strategies(search, found, made.chain, made.solution)
            is_in_vain = found is known
        if found.cost.gap <= TARGET_GAP:
            return found
        low, high = (made, high) if made.slope > 0 else (low, made)
    if high is None:
        return found
    root = Branch(bound_s=found.cost.lower_bound_s, dual=dual, low=low, high=high)
    return branch_and_bound(search, found, root, TARGET_GAP)


def _raise_bound(search: MeshSearch, found: CandidatePlan, bound: LowerBound) -> CandidatePlan:
    """A plan with a bound, if that is a better one, and the price that it is at."""
    if bound.seconds <= found.cost.lower_bound_s:
        return found
    found = replace(found, cost=bound.apply_to(found.cost), multipliers=bound.chain.multipliers)
    search.report_plan(found)
    return found


def _recover_at(search: MeshSearch, found: CandidatePlan, chain: Chain) -> CandidatePlan:
    """The plan that is descended to from what message passing reads off a chain, with the bound that it ends at."""
    read = solve_tied(chain)
    if not chain.runs:
        found = _raise_bound(search, found, subtract_budget(read.tied_bound, chain, search.limit_bytes))
    return recover_plan(search, found, chain, read)


def _recover_feasible(search: MeshSearch, found: CandidatePlan, chain: Chain, read: ChainSolution) -> CandidatePlan:
    """What `recover_plan` gives where that fits; else, of what is read off at prices of memory where it peaks, the
    fastest that does.

    What bounds has a price where the unsplit program peaks. A plan that has room there may peak elsewhere, of what it
    stores because of how it lies, and all strategies of the mesh may have one that does not and is as fast.
    """
    unit, peaks = found.cost.step_s / found.memory.peak_bytes, list[MemoryConstraint]()
    model = search.memory_model(chain.graph.variables.shared_layouts)
    other = descend_to_plan(search, found, chain, read)
    for price in _MULTIPLIERS:
        if search.fits(other) or search.must_stop():
            break
        peaks += [
            model.constraint_at_peak(other.decisions),
            model.constraint_of_buffers(other.live_buffers, other.decisions),
        ]
        chain = chain.with_multipliers(Multipliers.split_equally(peaks, price * unit))
        made = descend_to_plan(search, found, chain, solve_tied(chain))
        if made.cost.step_s >= found.cost.step_s:  # between the two may be one that fits
            break
        other = made
    return fit_if_faster(search, found, other)
