"""Gaps that are closed where memory binds: prices of it, repeats apart, and plans that are read off there."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from shardwright.errors import MemoryBudgetError
from shardwright.options.plan_options import PlanOptions
from shardwright.planner.clock import OutOfTimeError
from shardwright.planner.constraints.forced import ForcedStrategy
from shardwright.planner.limits import SearchLimits
from shardwright.planner.memory.constraint import BranchingBound, Multipliers
from shardwright.planner.memory.ilp_with_memory_rows import solve_with_memory_rows
from shardwright.planner.memory.lagrangian import LagrangianSearch
from shardwright.planner.plans.assemble import decide
from shardwright.planner.search.branching import Branch
from shardwright.planner.search.dual_bound import SCOPE_FEASIBLE, DualCut, LagrangianDual
from shardwright.planner.search.gap_closing import close_gap
from shardwright.planner.search.search import Search
from shardwright.planner.search.solutions import CandidatePlan
from shardwright.planner.search.tuning import MIN_GAIN
from shardwright.planner.segments.bound import solve_tied
from shardwright.planner.segments.descent import descend, lift_plan
from shardwright.planner.segments.segment_chain import Chain, ChainSolution
from tests.planner.programs import gpt2, lower
from tests.planner.segments.test_descent import COARSE, EIGHT, FINE, large_program


def dual_and_optimum(
    seed: int, limits: SearchLimits = SearchLimits(), kind: type[Search] = Search
) -> tuple[LagrangianDual, DualCut, float]:
    """The bound that prices give of a random program, its tangent at none, and the fastest plan that fits: one integer
    program over all strategies on three axes, bytes at the peak being a row of it."""
    search = kind(large_program(seed), EIGHT, PlanOptions(), limits=limits)
    fine, bounding = search.build_chain(FINE, ForcedStrategy(), frozenset()), search.build_bounding_chain(FINE)
    candidate = search.evaluate(fine, fine.solve(20.0), ())
    memory = search.memory_model(fine.graph.variables.shared_layouts)
    peak = memory.constraint_at_peak(candidate.decisions)
    search.limit_bytes = int(0.9 * memory.bytes_at(peak, candidate.decisions))
    best = solve_with_memory_rows(fine, search.limit_bytes, [peak], lambda states: (0, peak), 20.0)
    assert best is not None
    dual = LagrangianDual(search=search, chain=bounding.untie(), constraints=[peak], solve=solve_tied)
    return dual, dual.to_cut(0.0, dual.chain, solve_tied(dual.chain)), best.value


@pytest.mark.dear
@pytest.mark.parametrize("seed", [0, 11])
@pytest.mark.parametrize("times", [0.03, 30.0])
def test_tangents_lead_to_the_price_that_bounds_most(seed: int, times: float) -> None:
    """From a price that is too low, and from one that is too high; under the fastest plan that fits."""
    dual, low, best_s = dual_and_optimum(seed)
    first = times * low.multiplier_for(best_s)
    climbed_s = max(made.bound_s for made in dual.maximize(low, dual.evaluate(first)))
    others_s = max(dual.evaluate(first / times * 2.0**power).bound_s for power in range(-6, 3))
    assert climbed_s >= 0.998 * others_s
    assert 1.01 * low.bound_s < climbed_s <= best_s


def test_what_is_no_cut_ends_it() -> None:
    """A solution read off messages that costs more than both tangents promise says nothing new."""
    dual, low, best_s = dual_and_optimum(0)
    high = dual.evaluate(2 * low.multiplier_for(best_s))

    def solve_poorly(chain: Chain, close: float) -> ChainSolution:
        return replace(solve_tied(chain, close), value=2 * best_s + high.multiplier * dual.search.limit_bytes)

    assert len(list(dual.maximize(low, high))) > 2
    assert len(list(replace(dual, solve=solve_poorly).maximize(low, high))) == 2


def thrifty(
    seed: int, part: float, kind: type[Search] = Search, limits: SearchLimits = SearchLimits()
) -> tuple[Search, CandidatePlan]:
    """A plan of a random program that takes less memory than the fastest one on three axes, and no word of a price:
    there is enough for it, and for so much of what the fastest one takes more."""
    search = kind(large_program(seed), EIGHT, PlanOptions(remat="none", micro_batches=1), limits=limits)
    chain = search.build_chain(COARSE, ForcedStrategy(), frozenset())
    start = search.to_mesh_solution(chain, chain.solve(20.0), ())
    at, axes = lift_plan(chain, start.solution.states, FINE)
    fine = search.refine_graph(chain, FINE)
    near, solved = descend(chain, at, fine, axes, time_limit_s=20.0)
    fastest = search.evaluate(near, solved, ())
    peak = search.memory_model(near.graph.variables.shared_layouts).constraint_at_peak(fastest.decisions)
    price = Multipliers(constraints=((peak, fastest.cost.step_s / fastest.memory.peak_bytes),))
    descent = descend(chain, near.strategies(solved.states), fine, axes, time_limit_s=20.0, price=price)
    result = replace(search.evaluate(*descent, ()), coarse_solution=start)
    most, least = search.bytes_needed(fastest), search.bytes_needed(result)
    assert least < 0.9 * most
    search.limit_bytes = int(least + part * (most - least))
    return search, result


def test_a_plan_found_at_no_price_is_bounded_by_one() -> None:
    search, result = thrifty(0, part=0.0)
    unpriced_s = solve_tied(search.build_bounding_chain(FINE, even_rank=9, uneven_rank=9).untie()).tied_bound
    candidate = close_gap(search, result)
    assert 1.01 * unpriced_s < candidate.cost.lower_bound_s <= candidate.cost.step_s
    assert candidate.cost.bound_scope.endswith(SCOPE_FEASIBLE)


class _RefusingFit(LagrangianSearch):
    def find_best(self) -> CandidatePlan:
        raise MemoryBudgetError("does not fit", where="memory_budget")


class _FitsNothing(Search):
    """A plan fits as it is, or not at all."""

    lagrangian_search = _RefusingFit


def test_what_does_not_fit_is_read_off_again_for_less() -> None:
    """Where the unsplit program peaks there is room for the fastest plan, which peaks elsewhere."""
    search, result = thrifty(53, part=0.5, kind=_FitsNothing)
    candidate = close_gap(search, result)
    assert candidate.cost.step_s < result.cost.step_s * (1 - MIN_GAIN)
    assert search.bytes_needed(candidate) <= search.limit_bytes


class _OnlyClimbs(Search):
    """What follows a climb leaves the plan as it is; plans are read off in a climb as often as `gains` says.

    reads: how often one was looked for.
    """

    gains: float = 0
    reads: int = 0

    def fit_over_all_strategies(
        self, incumbent: CandidatePlan, chain: Chain, assignment: ChainSolution, within: tuple[BranchingBound, ...] = ()
    ) -> CandidatePlan:
        self.reads += 1
        return replace(incumbent) if self.reads <= self.gains else incumbent

    def branch_and_bound(self, incumbent: CandidatePlan, root: Branch, most_open: float) -> CandidatePlan:
        return incumbent

    def refine_over_all_strategies(self, plan: CandidatePlan, chain: Chain) -> CandidatePlan:
        return plan


def test_a_climb_reads_plans_off_until_one_was_in_vain() -> None:
    """At every price that leaves room, as long as each gives a plan."""
    reads: dict[float, int] = {}
    for gains in (0, 1, math.inf):
        limits = SearchLimits(target_gap=-1.0, fine_target_gap=-1.0)  # no plan is close enough
        search, result = thrifty(11, part=0.0, kind=_OnlyClimbs, limits=limits)
        assert isinstance(search, _OnlyClimbs)
        search.gains = gains
        close_gap(search, result)
        reads[gains] = search.reads
    assert reads[math.inf] > 2
    assert (reads[0], reads[1]) == (1, 2)


class _LateOncePlanFound(Search):
    """The deadline comes as soon as a plan is reported that is faster than `known_s`."""

    known_s: float = 0.0

    def report_plan(self, plan: CandidatePlan) -> None:
        super().report_plan(plan)
        if plan.cost.step_s < self.known_s:
            raise OutOfTimeError("in the middle")


def test_a_deadline_in_the_middle_of_a_pass_leaves_the_plan_that_it_found() -> None:
    search, result = thrifty(53, part=1.0, kind=_LateOncePlanFound)
    assert isinstance(search, _LateOncePlanFound)
    search.known_s = result.cost.step_s * (1 - MIN_GAIN)
    candidate = close_gap(search, result)
    assert candidate.cost.step_s < result.cost.step_s * (1 - MIN_GAIN)
    assert 0 < candidate.cost.lower_bound_s <= candidate.cost.step_s


@pytest.mark.dear
def test_what_is_solved_at_another_price_begins_where_the_last_one_ended() -> None:
    """And tangents keep nothing of how they were solved but that."""
    is_warm: list[bool] = []

    def solve(chain: Chain, close: float) -> ChainSolution:
        assert chain.warm_start is not None
        is_warm.append(bool(chain.warm_start.moved))
        return solve_tied(chain, close)

    search = Search(lower(gpt2(layers=1, batch=32, length=32)), EIGHT, PlanOptions())
    chain = search.build_bounding_chain(FINE)
    read = solve_tied(chain)
    peak = search.memory_model(chain.graph.variables.shared_layouts).constraint_at_peak(
        decide(chain.graph, read.states)
    )
    dual = LagrangianDual(search=search, chain=chain, constraints=[peak], solve=solve)
    low = dual.to_cut(0.0, chain, read)
    first = dual.evaluate(read.value / (low.slope + search.limit_bytes))
    anew, again = dual.evaluate(1.05 * first.multiplier), dual.evaluate(1.05 * first.multiplier, first)
    assert is_warm == [False, False, True]
    assert again.bound_s == pytest.approx(anew.bound_s, rel=2e-3)
    assert first.chain._kinds == again.chain._kinds == {}
