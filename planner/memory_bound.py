"""What every plan that fits the memory takes at least.

Each price p of a byte gives a bound of seconds, minimum(seconds + p × bytes) - p × budget (`budget`). It is concave in
the price, and no price is one, too: it says what plans take that need not fit. So the best price is looked for
upwards from the one that a plan was found at, or downwards, as long as that raises the bound.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from shardwright.planner.bound import lower_bound
from shardwright.planner.budget import MemoryPrice
from shardwright.planner.chain import Chain
from shardwright.plans import CostSummary

#: What a bound under a price of memory is of: what a compiler stores may hang on how it is split.
OF_WHAT_FITS = "; of plans that fit the memory and store what is live where the unsplit program takes most"

#: Prices that are tried upwards at most, as many downwards, and the ratio of one to the next.
_MOST_PRICES = 2
_RATIO = 2.0


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


def least_that_fits(chain: Chain, price: MemoryPrice | None, limit_bytes: int, time_limit_s: float) -> Bound:
    """The best bound that multiples of a price give, or none."""

    def at(price: MemoryPrice) -> Bound:
        priced = chain.with_price(price)
        return Bound(lower_bound(priced, time_limit_s) - price.total * limit_bytes, priced)

    def climbed(best: Bound, price: MemoryPrice, ratio: float) -> Bound:
        for _ in range(_MOST_PRICES):
            made = at(price)
            if made.seconds <= best.seconds:
                break
            best, price = made, price.times(ratio)
        return best

    unpriced = Bound(lower_bound(chain, time_limit_s), chain)
    if price is None:
        return unpriced
    best = climbed(unpriced, price, _RATIO)
    return best if best is not unpriced else climbed(unpriced, price.times(1 / _RATIO), 1 / _RATIO)
