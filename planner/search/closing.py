"""Where the bound of a plan on three axes leaves too much open: both are looked for again, with dearer prices.

The first bound counts uneven moves, and those of many dimensions, by what a device must receive (`least_moves`), which
may be far less than XLA makes of them. So, where the plan that is known may be over the optimum by more than
`MOST_OPEN`, moves of every rank are followed through its partitioner (heads that the axes do not divide are a fourth
dimension). What is still open then may be what the bound of one repeat loses where a run has few: they are put apart.

The bound comes before most plans, for they are dearer: only what one axis at a time gains in a large program is looked
for first, and then pairs of axes (`nearer`). If too much is open still, repeats are apart and message passing goes on
until it is near the relaxation's optimum: an assignment read off there, being a plan itself, is a better start than any
on two axes, and is descended from.

Where memory binds, a price of it is looked for that bounds most (`memory_bound.Dual`), and a plan is read off where
what is cheapest leaves room. That holds for a plan that takes less than there is, too, if faster ones take more. What
the descent ends at is made to fit as any plan is (`fitting`), as long as it can be faster than what is known.
What prices leave open is closed by branches, of one value's size at a time (`branching`). In these, and where repeats
are apart, prices are tried among all strategies: that takes less than descents do (`read_off.fitted_among_all`).

Where all that is dear, for edges have many entries, what messages end at is read off with fewer moves followed first:
they get nearer then, and what the true prices make of the moves that were too cheap is the descent's to mend.
"""

from __future__ import annotations

from dataclasses import replace

from shardwright.planner.clock import OutOfTimeError
from shardwright.planner.costs.relaxed_prices import EXACT_RANK
from shardwright.planner.memory.budget import MemoryPrice, Peak
from shardwright.planner.memory.fitting import NEARLY_FREE
from shardwright.planner.plans.assemble import decide
from shardwright.planner.search.branching import Branch, branched
from shardwright.planner.search.found import Found
from shardwright.planner.search.memory_bound import Bound, Dual, Tangent, least_that_fits, without_budget
from shardwright.planner.search.mesh_search import MeshSearch
from shardwright.planner.search.nearer import nearer
from shardwright.planner.search.read_off import descended, fitted_among_all, fitted_from, read_as_plan
from shardwright.planner.search.refining import refined_among_all
from shardwright.planner.segments.bound import best_alike
from shardwright.planner.segments.chain import Chain, SolvedChain
from shardwright.planner.solver.warm_start import WarmStart

#: The gap that a plan may have; and the one down to which a plan is looked for all the same, once a gap had to be
#: closed, where the edges between decisions have so few entries that message passing takes seconds (17 million: 9 s).
MOST_OPEN, BETTER = 0.01, 0.005
FEW_ENTRIES = 25_000_000

#: Entries with which prices of memory for each peak are tried, some twenty at 0.12 s a million.
MOST_REFINED = 50_000_000

#: The gap over which it is the bound, more than the plan, that is far from the optimum.
WIDE_OPEN = 0.03

#: Prices of a byte at which a plan is read off where the fastest one does not fit, as `fitting` counts them: nearly
#: nothing first, for what takes less at no cost.
_PRICES = (NEARLY_FREE, 8 * NEARLY_FREE, 64 * NEARLY_FREE)


def closed(search: MeshSearch, found: Found, bounding: Chain | None = None) -> Found:
    """A plan on three axes that fits, or a faster one that does, with a better bound. A deadline leaves what is
    known by then. bounding: the chain that its bound is of, if it has one."""
    clock = search.clock
    if found.cost.gap <= MOST_OPEN or clock.is_late:
        return found
    most = search.most_rank
    interrupts, clock.interrupts = clock.interrupts, True
    try:
        search.report("search", str(found.mesh))
        if search.is_large and found.price is None and found.cost.gap <= WIDE_OPEN:
            found = nearer(search, found, MOST_OPEN, together=1)
            if found.cost.gap <= MOST_OPEN:
                return found
        is_followed = bounding is not None and search.following(bounding, most) is bounding
        if bounding is not None and is_followed:
            chain = priced = bounding
        else:
            chain = priced = search.chain_to_bound(found.mesh, even_rank=most, uneven_rank=most)
        if found.price is not None or not is_followed:
            bound = least_that_fits(chain, found.price, search.limit_bytes, search.time_limit_s())
            found, priced = replace(found, cost=bound.of(found.cost), price=bound.chain.price), bound.chain
            search.tell_of(found)
        better = BETTER if _has_few_entries(priced) else MOST_OPEN
        if found.price is None:
            found = nearer(search, found, better, together=2)
            better = MOST_OPEN if search.is_large else better
        ranks = [(EXACT_RANK, better), (most, MOST_OPEN)]
        if found.cost.gap > MOST_OPEN and found.price is None:
            found = _bounded(search, found, Bound(best_alike(chain.apart()).rolled_bound, chain))
        if found.cost.gap > MOST_OPEN and _has_few_entries(chain.apart()):
            found, ranks = _closed_apart(search, found, chain.apart()), [(EXACT_RANK, MOST_OPEN)]
        for rank, most_open in ranks:
            if found.cost.gap <= most_open or clock.is_late:
                break
            search.report("search", str(found.mesh))
            found = _read_off(search, found, search.following(chain, rank).with_price(found.price))
        if found.cost.gap > MOST_OPEN and _entries(chain.apart()) <= MOST_REFINED:
            found = refined_among_all(search, found, chain.apart())
    except OutOfTimeError:
        found = search.told_of or found  # what was found in the middle of a pass counts
    finally:
        clock.interrupts = interrupts
    return found


def _has_few_entries(chain: Chain) -> bool:
    """Whether message passing takes seconds."""
    return _entries(chain) <= FEW_ENTRIES


def _entries(chain: Chain) -> int:
    """Entries of all edges between decisions, those of a run's repeats once."""
    kinds = dict.fromkeys(kind for kind, _ in chain.cores())
    return sum(edge.size for kind in kinds for edge in kind.reduction.core.edges.values())


def _closed_apart(search: MeshSearch, found: Found, chain: Chain) -> Found:
    """A plan with the best bound that prices of memory give, or a faster one that is read off at one of them.

    chain: one whose repeats decide each for itself.
    """
    chain.start = WarmStart()
    read, model = best_alike(chain), search.memory_model(chain.graph.layout.hubs)
    found = _bounded(search, found, Bound(read.rolled_bound, chain))
    if found.cost.gap <= BETTER:
        return found
    peaks = [peak for peak, _ in found.price.peaks] if found.price is not None else []
    peaks = peaks or [model.peak(decide(chain.graph, read.states))]
    peaks = [peak for peak in peaks if model.taken_at(peak, found.decisions) <= search.limit_bytes]
    dual = Dual(search=search, chain=chain, peaks=peaks, solve=best_alike)
    low = dual.tangent(0.0, chain, read) if peaks else None  # what a plan that fits may take bounds none
    if low is None or low.slope <= 0:
        return _thriftier(search, found, chain, read)
    if found.cost.gap <= MOST_OPEN:
        return found
    high: Tangent | None = None
    is_in_vain = False
    for made in dual.climb(low, dual.at(low.reaches(found.cost.step_s), low)):
        found = _bounded(search, found, Bound(made.bound_s, made.chain))
        if made.slope <= 0 and found.cost.gap > MOST_OPEN and not is_in_vain:  # the next prices are near this one
            known, found = found, fitted_among_all(search, found, made.chain, made.solved)
            is_in_vain = found is known
        if found.cost.gap <= MOST_OPEN:
            return found
        low, high = (made, high) if made.slope > 0 else (low, made)
    if high is None:
        return found
    root = Branch(bound_s=found.cost.lower_bound_s, dual=dual, low=low, high=high)
    return branched(search, found, root, MOST_OPEN)


def _bounded(search: MeshSearch, found: Found, bound: Bound) -> Found:
    """A plan with a bound, if that is a better one, and the price that it is at."""
    if bound.seconds <= found.cost.lower_bound_s:
        return found
    found = replace(found, cost=bound.of(found.cost), price=bound.chain.price)
    search.tell_of(found)
    return found


def _read_off(search: MeshSearch, found: Found, chain: Chain) -> Found:
    """The plan that is descended to from what message passing reads off a chain, with the bound that it ends at."""
    read = best_alike(chain)
    if not chain.runs:
        found = _bounded(search, found, without_budget(read.rolled_bound, chain, search.limit_bytes))
    return descended(search, found, chain, read)


def _thriftier(search: MeshSearch, found: Found, chain: Chain, read: SolvedChain) -> Found:
    """What `descended` gives where that fits; else, of what is read off at prices of memory where it peaks, the
    fastest that does.

    What bounds has a price where the unsplit program peaks. A plan that has room there may peak elsewhere, of what it
    stores because of how it lies, and all strategies of the mesh may have one that does not and is as fast.
    """
    unit, peaks = found.cost.step_s / found.memory.peak_bytes, list[Peak]()
    model = search.memory_model(chain.graph.layout.hubs)
    other = read_as_plan(search, found, chain, read)
    for price in _PRICES:
        if search.fits(other) or search.is_late():
            break
        peaks += [model.peak(other.decisions), model.peak_of_buffers(other.held, other.decisions)]
        chain = chain.with_price(MemoryPrice.shared(peaks, price * unit))
        made = read_as_plan(search, found, chain, best_alike(chain))
        if made.cost.step_s >= found.cost.step_s:  # between the two may be one that fits
            break
        other = made
    return fitted_from(search, found, other)
