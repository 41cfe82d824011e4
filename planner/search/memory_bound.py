"""What every plan that fits the memory takes at least.

Each price p of a byte gives a bound of seconds, minimum(seconds + p × bytes) - p × budget (`budget`). It is concave in
the price, and no price is one, too: it says what plans take that need not fit. So the best price is looked for
upwards from the one that a plan was found at, or downwards, as long as that raises the bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from shardwright.planner.memory.budget import MemoryPrice, Peak, SizeRange
from shardwright.planner.plans.assemble import decide
from shardwright.planner.search.found import Found, Tried
from shardwright.planner.search.mesh_search import MeshSearch
from shardwright.planner.segments.bound import lower_bound
from shardwright.planner.segments.chain import Chain, SolvedChain
from shardwright.planner.segments.layout import Layout
from shardwright.planner.solver.warm_start import WarmStart
from shardwright.plans import CostSummary

#: What a bound under a price of memory is of: what a compiler stores may hang on how it is split.
OF_WHAT_FITS = "; of plans that fit the memory and store what is live where the unsplit program takes most"

#: What it is of, too, where the price is the search's.
ALIKE = ", with all repeats of a run laid out alike"

#: Prices that are tried upwards at most, as many downwards, and the ratio of one to the next.
_MOST_PRICES = 2
_RATIO = 2.0

#: The same where tangents say which price is next, the ratio to a dearer one where none of them falls, and the relative
#: gap at which a price is solved.
_MOST_TANGENTS = 6
_DEARER = 16.0
CLOSE = 1e-3

#: The same where that little decides.
FINE = 1e-4


class Bound(NamedTuple):
    """Seconds a step that all plans that fit take at least, and the chain that says so, at a price or none."""

    seconds: float
    chain: Chain

    def of(self, cost: CostSummary) -> CostSummary:
        """What a plan costs, with this bound if it is a better one."""
        if self.seconds <= cost.lower_bound_s:
            return cost
        scope = cost.bound_scope
        if self.chain.price is not None and not scope.endswith(OF_WHAT_FITS):
            scope += OF_WHAT_FITS
        return replace(cost, lower_bound_s=min(self.seconds, cost.step_s), bound_scope=scope)


def bound_at_price(chain: Chain, limit_bytes: int, time_limit_s: float) -> Bound:
    """The bound that a chain's own price of memory gives."""
    return without_budget(lower_bound(chain, time_limit_s), chain, limit_bytes)


def without_budget(bound_s: float, chain: Chain, limit_bytes: int) -> Bound:
    """The bound of plans that fit, from one of what all assignments of a chain cost with their memory at its price."""
    free_s = chain.price.total * limit_bytes if chain.price is not None else 0.0
    return Bound(bound_s - free_s, chain)


def least_that_fits(chain: Chain, price: MemoryPrice | None, limit_bytes: int, time_limit_s: float) -> Bound:
    """The best bound that multiples of a price give, or none."""

    def at(price: MemoryPrice) -> Bound:
        return bound_at_price(chain.with_price(price), limit_bytes, time_limit_s)

    def climbed(best: Bound, price: MemoryPrice, ratio: float) -> Bound:
        for _ in range(_MOST_PRICES):
            made = at(price)
            if made.seconds <= best.seconds:
                break
            best, price = made, price.times(ratio)
        return best

    unpriced = bound_at_price(chain, limit_bytes, time_limit_s)
    if price is None:
        return unpriced
    best = climbed(unpriced, price, _RATIO)
    return best if best is not unpriced else climbed(unpriced, price.times(1 / _RATIO), 1 / _RATIO)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dual:
    """The bound that prices of memory give, of all plans of a chain.

    peaks: priced alike. solve: what solves the chain at a price to a relative gap, with a bound of all its plans;
    `Chain.solve` has all repeats of a run decide alike. within: what the plans keep to that are bounded.
    """

    search: MeshSearch
    chain: Chain
    peaks: Sequence[Peak]
    solve: Callable[[Chain, float], SolvedChain]
    within: tuple[SizeRange, ...] = ()

    def at(self, price: float, near: Tangent | None = None, close: float = CLOSE) -> Tangent:
        """The bound at a price of a byte. near: at another price, where message passing ends much like here. close: the
        relative gap at which it is solved."""
        chain = self.chain.with_price(MemoryPrice.shared(self.peaks, price, self.within))
        chain.start = WarmStart() if near is None else near.chain.start
        made = self.tangent(price, chain, self.solve(chain, close))
        chain.forget_reductions()  # tangents of several prices are kept
        return made

    def tangent(self, price: float, chain: Chain, solved: SolvedChain) -> Tangent:
        """The bound at the price that a chain has, as it was solved."""
        decisions, limit = decide(chain.graph, solved.states), self.search.limit_bytes
        layout = chain.graph.layout
        model = self.search.memory_model(layout.hubs)
        taken = sum(model.taken_at(_decided(peak, solved, layout), decisions) for peak in self.peaks) / len(self.peaks)
        free_s = price * limit
        return Tangent(price, solved.rolled_bound - free_s, solved.value - free_s, taken - limit, chain, solved)

    def climb(self, low: Tangent, high: Tangent, bound_s: float = 0.0, close: float = CLOSE) -> Iterator[Tangent]:
        """The higher of two tangents, then those at prices between them, or dearer ones, as long as these may promise
        more than is known, by a part of `close`.

        The bound is concave, and highest between a price at which too many bytes are taken and one at which there is
        room: what is tried next is where their tangents meet (Kelley's cutting planes, 1960). A solution that costs
        more there than they promise, as one that is read off messages may, says no more than they do.
        """
        bound_s = max(bound_s, low.bound_s, high.bound_s)
        yield high
        for _ in range(_MOST_TANGENTS):
            if low.slope <= 0 or self.search.is_late():
                return
            price = _DEARER * high.price if high.slope >= 0 else low.meets(high)
            promised_s = low.promises(price) if high.slope < 0 else math.inf
            if promised_s <= bound_s * (1 + close):
                return
            made = self.at(price, close=close)
            bound_s = max(bound_s, made.bound_s)
            yield made
            if made.seconds >= promised_s:
                return
            if high.slope >= 0:
                low, high = high, made
            elif made.slope > 0:
                low = made
            else:
                high = made


def _decided(peak: Peak, solved: SolvedChain, layout: Layout) -> Peak:
    """What of a peak has a price: not what is made anew and read by nothing but what is, too."""
    paid = layout.last_read
    values = {leaf: times for leaf, times in peak.values.items() if (leaf[0], -1) in solved.states or leaf in paid}
    turned = frozenset(operand for operand in peak.turned if (operand[0], -1) in solved.states)
    return replace(peak, values=values, turned=turned)


class Tangent(NamedTuple):
    """What a price of a byte gives. bound_s: seconds that it promises. seconds / slope: what the plan that is the
    cheapest there costs, less what the budget does, and how much more that is per price: bytes beyond the budget.
    chain / solved: at that price, and that plan."""

    price: float
    bound_s: float
    seconds: float
    slope: float
    chain: Chain
    solved: SolvedChain

    def meets(self, other: Tangent) -> float:
        """The price at which two tangents meet, one that rises and one that falls."""
        between = other.seconds - self.seconds + self.slope * self.price - other.slope * other.price
        return between / (self.slope - other.slope)

    def promises(self, price: float) -> float:
        """What no bound at another price is over."""
        return self.seconds + self.slope * (price - self.price)

    def reaches(self, seconds: float) -> float:
        """The price at which a tangent that rises promises so much."""
        return self.price + (seconds - self.seconds) / self.slope


def freed(search: MeshSearch, found: Found, tried: Tried) -> Found:
    """A plan that follows a forced strategy, as one of those that are `tried` on its mesh without any: with the price
    of memory that `bounded_by_price` begins at, where the fastest of those takes more than there is."""
    model = search.memory_model(tried.chain.graph.layout.hubs)
    fastest = decide(tried.chain.graph, tried.solved.states)
    peak = model.peak(fastest)
    taken = model.taken_at(peak, fastest)
    made = replace(found, chain=tried.chain, solved=tried.solved, fastest=tried.solved)
    if not model.taken_at(peak, found.decisions) <= search.limit_bytes < taken:  # what a plan may take bounds none
        return made
    price = MemoryPrice(peaks=((peak, tried.step_s / taken),))
    return replace(made, price=price, price_bound_s=tried.solved.rolled_bound)


def bounded_by_price(search: MeshSearch, found: Found) -> Found:
    """A plan that fits, with what prices of memory say that every plan of its chain that fits takes at least."""
    price, fastest = found.price, found.fastest
    if price is None or fastest is None or not price.total or found.is_from_another_mesh:  # all strategies bound that
        return found
    if search.clock.is_late:
        return found

    def nearly(chain: Chain, close: float) -> SolvedChain:
        return chain.solve(search.time_limit_s(), close)

    dual = Dual(search=search, chain=found.chain, peaks=[peak for peak, _ in price.peaks], solve=nearly)
    low, high = dual.tangent(0.0, found.chain, fastest), dual.at(price.total)
    bounds_s = (each.bound_s for each in dual.climb(low, high, found.price_bound_s))
    return replace(found, price_bound_s=max((found.price_bound_s, *bounds_s)))
