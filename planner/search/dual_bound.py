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

from shardwright.planner.memory.constraint import BranchingBound, MemoryConstraint, Multipliers
from shardwright.planner.plans.assemble import decide
from shardwright.planner.search.mesh_search import MeshSearch
from shardwright.planner.search.solutions import CandidatePlan, MeshSolution
from shardwright.planner.segments.bound import lower_bound
from shardwright.planner.segments.segment_chain import Chain, ChainSolution
from shardwright.planner.segments.variables import ProgramVariables
from shardwright.planner.solver.warm_start import WarmStart
from shardwright.plans import CostSummary

#: What a bound under a price of memory is of: what a compiler stores may hang on how it is split.
SCOPE_FEASIBLE = "; of plans that fit the memory and store what is live where the unsplit program takes most"

#: What it is of, too, where the price is the search's.
SCOPE_TIED = ", with all repeats of a run laid out alike"

#: Prices that are tried upwards at most, as many downwards, and the ratio of one to the next.
_MAX_MULTIPLIERS = 2
_MULTIPLIER_RATIO = 2.0

#: The same where tangents say which price is next, the ratio to a dearer one where none of them falls, and the relative
#: gap at which a price is solved.
_MAX_CUTS = 6
_MULTIPLIER_GROWTH = 16.0
GAP_TOLERANCE = 1e-3

#: The same where that little decides.
FINE_GAP_TOLERANCE = 1e-4


class LowerBound(NamedTuple):
    """Seconds a step that all plans that fit take at least, and the chain that says so, at a price or none."""

    seconds: float
    chain: Chain

    def apply_to(self, cost: CostSummary) -> CostSummary:
        """What a plan costs, with this bound if it is a better one."""
        if self.seconds <= cost.lower_bound_s:
            return cost
        scope = cost.bound_scope
        if self.chain.multipliers is not None and not scope.endswith(SCOPE_FEASIBLE):
            scope += SCOPE_FEASIBLE
        return replace(cost, lower_bound_s=min(self.seconds, cost.step_s), bound_scope=scope)


def bound_with_multipliers(chain: Chain, limit_bytes: int, time_limit_s: float) -> LowerBound:
    """The bound that a chain's own price of memory gives."""
    return subtract_budget(lower_bound(chain, time_limit_s), chain, limit_bytes)


def subtract_budget(bound_s: float, chain: Chain, limit_bytes: int) -> LowerBound:
    """The bound of plans that fit, from one of what all assignments of a chain cost with their memory at its price."""
    free_s = chain.multipliers.total * limit_bytes if chain.multipliers is not None else 0.0
    return LowerBound(bound_s - free_s, chain)


def bound_feasible_plans(chain: Chain, price: Multipliers | None, limit_bytes: int, time_limit_s: float) -> LowerBound:
    """The best bound that multiples of a price give, or none."""

    def at(price: Multipliers) -> LowerBound:
        return bound_with_multipliers(chain.with_multipliers(price), limit_bytes, time_limit_s)

    def climb_from(best: LowerBound, price: Multipliers, ratio: float) -> LowerBound:
        for _ in range(_MAX_MULTIPLIERS):
            made = at(price)
            if made.seconds <= best.seconds:
                break
            best, price = made, price.scale(ratio)
        return best

    unpriced = bound_with_multipliers(chain, limit_bytes, time_limit_s)
    if price is None:
        return unpriced
    best = climb_from(unpriced, price, _MULTIPLIER_RATIO)
    return (
        best
        if best is not unpriced
        else climb_from(unpriced, price.scale(1 / _MULTIPLIER_RATIO), 1 / _MULTIPLIER_RATIO)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LagrangianDual:
    """The bound that prices of memory give, of all plans of a chain.

    peaks: priced alike. solve: what solves the chain at a price to a relative gap, with a bound of all its plans;
    `Chain.solve` has all repeats of a run decide alike. within: what the plans keep to that are bounded.
    """

    search: MeshSearch
    chain: Chain
    constraints: Sequence[MemoryConstraint]
    solve: Callable[[Chain, float], ChainSolution]
    branching_bounds: tuple[BranchingBound, ...] = ()

    def evaluate(self, price: float, near: DualCut | None = None, close: float = GAP_TOLERANCE) -> DualCut:
        """The bound at a price of a byte. near: at another price, where message passing ends much like here. close: the
        relative gap at which it is solved."""
        chain = self.chain.with_multipliers(Multipliers.split_equally(self.constraints, price, self.branching_bounds))
        chain.warm_start = WarmStart() if near is None else near.chain.warm_start
        made = self.to_cut(price, chain, self.solve(chain, close))
        chain.forget_reductions()  # tangents of several prices are kept
        return made

    def to_cut(self, price: float, chain: Chain, solved: ChainSolution) -> DualCut:
        """The bound at the price that a chain has, as it was solved."""
        decisions, limit = decide(chain.graph, solved.states), self.search.limit_bytes
        layout = chain.graph.variables
        model = self.search.memory_model(layout.shared_layouts)
        taken = sum(
            model.bytes_at(_decidable_part(peak, solved, layout), decisions) for peak in self.constraints
        ) / len(self.constraints)
        free_s = price * limit
        return DualCut(price, solved.tied_bound - free_s, solved.value - free_s, taken - limit, chain, solved)

    def maximize(
        self, low: DualCut, high: DualCut, bound_s: float = 0.0, close: float = GAP_TOLERANCE
    ) -> Iterator[DualCut]:
        """The higher of two tangents, then those at prices between them, or dearer ones, as long as these may promise
        more than is known, by a part of `close`.

        The bound is concave, and highest between a price at which too many bytes are taken and one at which there is
        room: what is tried next is where their tangents meet (Kelley's cutting planes, 1960). A solution that costs
        more there than they promise, as one that is read off messages may, says no more than they do.
        """
        bound_s = max(bound_s, low.bound_s, high.bound_s)
        yield high
        for _ in range(_MAX_CUTS):
            if low.slope <= 0 or self.search.must_stop():
                return
            price = _MULTIPLIER_GROWTH * high.multiplier if high.slope >= 0 else low.intersect(high)
            promised_s = low.value_at(price) if high.slope < 0 else math.inf
            if promised_s <= bound_s * (1 + close):
                return
            made = self.evaluate(price, close=close)
            bound_s = max(bound_s, made.bound_s)
            yield made
            if made.lagrangian_s >= promised_s:
                return
            if high.slope >= 0:
                low, high = high, made
            elif made.slope > 0:
                low = made
            else:
                high = made


def _decidable_part(peak: MemoryConstraint, solved: ChainSolution, layout: ProgramVariables) -> MemoryConstraint:
    """What of a peak has a price: not what is made anew and read by nothing but what is, too."""
    paid = layout.last_consumer
    values = {leaf: times for leaf, times in peak.values.items() if (leaf[0], -1) in solved.states or leaf in paid}
    turned = frozenset(operand for operand in peak.transposed_operands if (operand[0], -1) in solved.states)
    return replace(peak, values=values, transposed_operands=turned)


class DualCut(NamedTuple):
    """What a price of a byte gives. bound_s: seconds that it promises. seconds / slope: what the plan that is the
    cheapest there costs, less what the budget does, and how much more that is per price: bytes beyond the budget.
    chain / solved: at that price, and that plan."""

    multiplier: float
    bound_s: float
    lagrangian_s: float
    slope: float
    chain: Chain
    solution: ChainSolution

    def intersect(self, other: DualCut) -> float:
        """The price at which two tangents meet, one that rises and one that falls."""
        between = other.lagrangian_s - self.lagrangian_s + self.slope * self.multiplier - other.slope * other.multiplier
        return between / (self.slope - other.slope)

    def value_at(self, price: float) -> float:
        """What no bound at another price is over."""
        return self.lagrangian_s + self.slope * (price - self.multiplier)

    def multiplier_for(self, seconds: float) -> float:
        """The price at which a tangent that rises promises so much."""
        return self.multiplier + (seconds - self.lagrangian_s) / self.slope


def remove_force(search: MeshSearch, found: CandidatePlan, tried: MeshSolution) -> CandidatePlan:
    """A plan that follows a forced strategy, as one of those that are `tried` on its mesh without any: with the price
    of memory that `tighten_dual_bound` begins at, where the fastest of those takes more than there is."""
    model = search.memory_model(tried.chain.graph.variables.shared_layouts)
    fastest = decide(tried.chain.graph, tried.solution.states)
    peak = model.constraint_at_peak(fastest)
    taken = model.bytes_at(peak, fastest)
    made = replace(found, chain=tried.chain, solution=tried.solution, unconstrained_solution=tried.solution)
    if not model.bytes_at(peak, found.decisions) <= search.limit_bytes < taken:  # what a plan may take bounds none
        return made
    price = Multipliers(constraints=((peak, tried.step_s / taken),))
    return replace(made, multipliers=price, dual_bound_s=tried.solution.tied_bound)


def tighten_dual_bound(search: MeshSearch, found: CandidatePlan) -> CandidatePlan:
    """A plan that fits, with what prices of memory say that every plan of its chain that fits takes at least."""
    price, fastest = found.multipliers, found.unconstrained_solution
    if price is None or fastest is None or not price.total or found.is_from_coarser_mesh:  # all strategies bound that
        return found
    if search.clock.is_expired:
        return found

    def nearly(chain: Chain, close: float) -> ChainSolution:
        return chain.solve(search.time_limit_s(), close)

    dual = LagrangianDual(
        search=search, chain=found.chain, constraints=[peak for peak, _ in price.constraints], solve=nearly
    )
    low, high = dual.to_cut(0.0, found.chain, fastest), dual.evaluate(price.total)
    bounds_s = (each.bound_s for each in dual.maximize(low, high, found.dual_bound_s))
    return replace(found, dual_bound_s=max((found.dual_bound_s, *bounds_s)))
