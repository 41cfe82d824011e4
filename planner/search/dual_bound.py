"""Lagrangian lower bounds on the plans within the memory budget.

    bound(λ) = min over plans (seconds + λ × bytes) − λ × budget,  λ in seconds per byte (`memory.constraint`)

The dual is concave in λ; λ = 0 covers infeasible plans, too. The search starts from the plan's own multiplier and goes
up, or else down, while the bound improves.
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
from shardwright.planner.search.tuning import CUT_GAP, MAX_CUTS, MAX_MULTIPLIERS, MULTIPLIER_GROWTH, MULTIPLIER_RATIO
from shardwright.planner.segments.bound import lower_bound
from shardwright.planner.segments.segment_chain import Chain, ChainSolution
from shardwright.planner.segments.variables import ProgramVariables
from shardwright.planner.solver.warm_start import WarmStart
from shardwright.plans.plan import CostSummary

#: Scope of a bound with a memory multiplier: XLA's buffers may depend on the sharding.
SCOPE_FEASIBLE = "; of plans that fit the memory and store what is live where the unsplit program takes most"

#: Additional scope when the multiplier comes from the search.
SCOPE_TIED = ", with all repeats of a run laid out alike"


class LowerBound(NamedTuple):
    """Lower bound on the step of all feasible plans in seconds, with the chain proving it (with or without
    multipliers)."""

    seconds: float
    chain: Chain

    def apply_to(self, cost: CostSummary) -> CostSummary:
        """The cost with this bound when it is higher."""
        if self.seconds <= cost.lower_bound_s:
            return cost
        scope = cost.bound_scope
        if self.chain.multipliers is not None and not scope.endswith(SCOPE_FEASIBLE):
            scope += SCOPE_FEASIBLE
        return replace(cost, lower_bound_s=min(self.seconds, cost.step_s), bound_scope=scope)


def bound_with_multipliers(chain: Chain, limit_bytes: int, time_limit_s: float) -> LowerBound:
    """The bound of a chain under its own memory multipliers."""
    return subtract_budget(lower_bound(chain, time_limit_s), chain, limit_bytes)


def subtract_budget(bound_s: float, chain: Chain, limit_bytes: int) -> LowerBound:
    """The bound of feasible plans: the Lagrangian bound of all assignments minus λ × budget."""
    free_s = chain.multipliers.total * limit_bytes if chain.multipliers is not None else 0.0
    return LowerBound(bound_s - free_s, chain)


def bound_feasible_plans(chain: Chain, price: Multipliers | None, limit_bytes: int, time_limit_s: float) -> LowerBound:
    """The best bound over scaled copies of the multipliers, including zero."""

    def at(price: Multipliers) -> LowerBound:
        return bound_with_multipliers(chain.with_multipliers(price), limit_bytes, time_limit_s)

    def climb_from(best: LowerBound, price: Multipliers, ratio: float) -> LowerBound:
        for _ in range(MAX_MULTIPLIERS):
            bound = at(price)
            if bound.seconds <= best.seconds:
                break
            best, price = bound, price.scale(ratio)
        return best

    unpriced = bound_with_multipliers(chain, limit_bytes, time_limit_s)
    if price is None:
        return unpriced
    best = climb_from(unpriced, price, MULTIPLIER_RATIO)
    return (
        best if best is not unpriced else climb_from(unpriced, price.scale(1 / MULTIPLIER_RATIO), 1 / MULTIPLIER_RATIO)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LagrangianDual:
    """The Lagrangian dual of a chain's memory constraints.

    search: evaluates plans and memory.
    chain: all plans to bound.
    constraints: share one multiplier equally.
    solve: solves a chain to a relative gap, with a bound over all its plans; `Chain.solve` ties the repeats of a run.
    branching_bounds: size ranges restricting the plans.
    """

    search: MeshSearch
    chain: Chain
    constraints: Sequence[MemoryConstraint]
    solve: Callable[[Chain, float], ChainSolution]
    branching_bounds: tuple[BranchingBound, ...] = ()

    def evaluate(self, price: float, near: DualCut | None = None, close: float = CUT_GAP) -> DualCut:
        """The cut at a multiplier (seconds per byte).

        near: a cut at another multiplier, used to warm-start message passing.
        close: relative gap of the solution.
        """
        chain = self.chain.with_multipliers(Multipliers.split_equally(self.constraints, price, self.branching_bounds))
        chain.warm_start = WarmStart() if near is None else near.chain.warm_start
        cut = self.to_cut(price, chain, self.solve(chain, close))
        chain.forget_reductions()  # several cuts stay alive
        return cut

    def to_cut(self, price: float, chain: Chain, solved: ChainSolution) -> DualCut:
        """The cut at the chain's multiplier, from its solution."""
        decisions, limit = decide(chain.graph, solved.states), self.search.limit_bytes
        layout = chain.graph.variables
        model = self.search.memory_model(layout.shared_layouts)
        mean_bytes = sum(
            model.bytes_at(_decidable_part(peak, solved, layout), decisions) for peak in self.constraints
        ) / len(self.constraints)
        free_s = price * limit
        return DualCut(price, solved.tied_bound - free_s, solved.value - free_s, mean_bytes - limit, chain, solved)

    def maximize(self, low: DualCut, high: DualCut, bound_s: float = 0.0, close: float = CUT_GAP) -> Iterator[DualCut]:
        """Yields the higher of two cuts, then cuts at multipliers between or above them, while these may raise the
        bound by more of it than `close`.

        The dual is concave, with its maximum between an over-budget cut and one with slack: the next multiplier is the
        intersection of their tangents (Kelley's cutting planes, 1960). A solution above the predicted value (possible
        with rounded messages) adds no information and ends the loop.
        """
        bound_s = max(bound_s, low.bound_s, high.bound_s)
        yield high
        for _ in range(MAX_CUTS):
            if low.slope <= 0 or self.search.must_stop():
                return
            price = MULTIPLIER_GROWTH * high.multiplier if high.slope >= 0 else low.intersect(high)
            promised_s = low.value_at(price) if high.slope < 0 else math.inf
            if promised_s <= bound_s * (1 + close):
                return
            cut = self.evaluate(price, close=close)
            bound_s = max(bound_s, cut.bound_s)
            yield cut
            if cut.lagrangian_s >= promised_s:
                return
            if high.slope >= 0:
                low, high = high, cut
            elif cut.slope > 0:
                low = cut
            else:
                high = cut


def _decidable_part(peak: MemoryConstraint, solved: ChainSolution, layout: ProgramVariables) -> MemoryConstraint:
    """The part of a constraint with a multiplier: excludes values recomputed per consumer whose consumers are
    recomputed, too."""
    paid = layout.last_consumer
    values = {leaf: times for leaf, times in peak.values.items() if (leaf[0], -1) in solved.states or leaf in paid}
    turned = frozenset(operand for operand in peak.transposed_operands if (operand[0], -1) in solved.states)
    return replace(peak, values=values, transposed_operands=turned)


class DualCut(NamedTuple):
    """A cutting plane of the dual at one multiplier.

    multiplier: seconds per byte.
    bound_s: lower bound at the multiplier, seconds.
    lagrangian_s: Lagrangian value of the cheapest plan minus the budget term, seconds.
    slope: bytes beyond the budget (subgradient).
    chain: with this multiplier.
    solution: the cheapest plan.
    """

    multiplier: float
    bound_s: float
    lagrangian_s: float
    slope: float
    chain: Chain
    solution: ChainSolution

    def intersect(self, other: DualCut) -> float:
        """The multiplier at the intersection of a rising and a falling tangent."""
        between = other.lagrangian_s - self.lagrangian_s + self.slope * self.multiplier - other.slope * other.multiplier
        return between / (self.slope - other.slope)

    def value_at(self, price: float) -> float:
        """Upper limit on the dual at another multiplier."""
        return self.lagrangian_s + self.slope * (price - self.multiplier)

    def multiplier_for(self, seconds: float) -> float:
        """The multiplier with this value on a rising tangent."""
        return self.multiplier + (seconds - self.lagrangian_s) / self.slope


def remove_force(search: MeshSearch, plan: CandidatePlan, unforced: MeshSolution) -> CandidatePlan:
    """The forced plan within the unforced chain of its mesh (`unforced`). When the fastest unforced plan exceeds the
    budget, with an initial multiplier for `tighten_dual_bound`."""
    model = search.memory_model(unforced.chain.graph.variables.shared_layouts)
    fastest = decide(unforced.chain.graph, unforced.solution.states)
    peak = model.constraint_at_peak(fastest)
    needed_bytes = model.bytes_at(peak, fastest)
    free_plan = replace(
        plan, chain=unforced.chain, solution=unforced.solution, unconstrained_solution=unforced.solution
    )
    if (
        not model.bytes_at(peak, plan.decisions) <= search.limit_bytes < needed_bytes
    ):  # the constraint must be violated by the fastest and met by the plan
        return free_plan
    price = Multipliers(constraints=((peak, unforced.step_s / needed_bytes),))
    return replace(free_plan, multipliers=price, dual_bound_s=unforced.solution.tied_bound)


def tighten_dual_bound(search: MeshSearch, plan: CandidatePlan) -> CandidatePlan:
    """A feasible plan with the best Lagrangian bound over its chain."""
    price, fastest = plan.multipliers, plan.unconstrained_solution
    if price is None or fastest is None or not price.total or plan.is_from_coarser_mesh:  # bounded by all strategies
        return plan
    if search.clock.is_expired:
        return plan

    def nearly(chain: Chain, close: float) -> ChainSolution:
        return chain.solve(search.time_limit_s(), close)

    dual = LagrangianDual(
        search=search, chain=plan.chain, constraints=[peak for peak, _ in price.constraints], solve=nearly
    )
    low, high = dual.to_cut(0.0, plan.chain, fastest), dual.evaluate(price.total)
    bounds_s = (cut.bound_s for cut in dual.maximize(low, high, plan.dual_bound_s))
    return replace(plan, dual_bound_s=max((plan.dual_bound_s, *bounds_s)))
