"""A price of memory for each peak, where one for all of them leaves more open than a plan may."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwright.planner.limits import SearchLimits
from shardwright.planner.memory.constraint import Multipliers
from shardwright.planner.memory.cutting_planes import improve_bound
from shardwright.planner.memory.lagrangian import LagrangianSearch, fit_plan
from shardwright.planner.search.dual_bound import SCOPE_FEASIBLE
from shardwright.planner.search.multiplier_refinement import refine_multipliers, refine_over_all_strategies
from shardwright.planner.search.primal_recovery import to_bounding_chain
from shardwright.planner.search.search import Search
from shardwright.planner.search.solutions import CandidatePlan
from shardwright.planner.segments.bound import solve_tied
from shardwright.planner.segments.segment_chain import Chain
from shardwright.plans.plan import CostSummary
from tests.planner.search.test_branching import best_that_fits_s, with_less_memory
from tests.planner.segments.test_descent import FINE

#: Gap down to which they refine.
TARGET_GAP = SearchLimits().target_gap


class _RecordingFit(LagrangianSearch):
    """Records the prices that it evaluates in its search."""

    search: _RecordingSearch

    def evaluate_multipliers(self, terms: Multipliers) -> tuple[CandidatePlan, float]:
        self.search.prices.append(terms.total)
        return LagrangianSearch.evaluate_multipliers(self, terms)


class _RecordingSearch(Search):
    lagrangian_search = _RecordingFit

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.prices: list[float] = []


def at_one_price(seed: int, gap: float = 1.0) -> tuple[_RecordingSearch, CandidatePlan, float]:
    """A random program, the plan that fits where all peaks have one price, so far over its bound, and what the best one
    takes."""
    search, fastest = with_less_memory(seed, 2048, SearchLimits(max_exact_states=0), _RecordingSearch)
    assert isinstance(search, _RecordingSearch)
    best_s = best_that_fits_s(search, fastest)
    candidate = fit_plan(search, fastest)
    return search, replace(candidate, cost=with_gap(candidate.cost, gap)), best_s


def with_gap(cost: CostSummary, gap: float) -> CostSummary:
    return replace(cost, lower_bound_s=cost.step_s * (1 - gap), bound_scope="all plans")


def all_strategies(search: Search) -> Chain:
    return search.build_bounding_chain(FINE, even_rank=9, uneven_rank=9).untie()


@pytest.mark.dear
def test_among_all_strategies_they_find_a_faster_plan_that_fits() -> None:
    search, result, best_s = at_one_price(112)
    candidate = refine_over_all_strategies(search, result, all_strategies(search))
    assert result.cost.step_s > 1.05 * best_s
    assert candidate.cost.step_s <= 1.001 * best_s
    assert search.bytes_needed(candidate) <= search.limit_bytes
    assert candidate.chain.graph.prices is result.chain.graph.prices, "it can be mixed with plans of the mesh"


def test_where_plans_are_descended_to_they_find_faster_ones() -> None:
    search, result, best_s = at_one_price(29)
    candidate = refine_multipliers(search, result)
    assert result.cost.step_s > 1.5 * best_s
    assert candidate.cost.step_s <= 1.01 * best_s
    assert search.bytes_needed(candidate) <= search.limit_bytes
    assert candidate.cost.lower_bound_s == result.cost.lower_bound_s


@pytest.mark.dear
def test_what_they_promise_bounds_the_best_plan_that_fits() -> None:
    search, result, best_s = at_one_price(20)
    chain = all_strategies(search)
    outcome, start = to_bounding_chain(search, chain, result), search.evaluate(chain, solve_tied(chain), ())
    assert outcome is not None
    bound_s, price = improve_bound(
        LagrangianSearch(search, start, result.cost.step_s, (), outcome), outcome, result.cost.step_s
    )
    assert 1.001 * start.solution.tied_bound < bound_s <= best_s * (1 + 1e-6)
    assert price.total > 0
    candidate = refine_over_all_strategies(search, result, chain)
    assert bound_s * (1 - 1e-6) <= candidate.cost.lower_bound_s <= best_s * (1 + 1e-6)
    assert candidate.cost.bound_scope.endswith(SCOPE_FEASIBLE)


@pytest.mark.dear
def test_nothing_is_tried_where_little_is_open() -> None:
    search, result, _ = at_one_price(16, gap=TARGET_GAP / 2)
    assert refine_multipliers(search, result) is result
    assert refine_over_all_strategies(search, result, all_strategies(search)) is result
    assert not search.prices


def test_a_plan_that_leaves_little_open_ends_it() -> None:
    """What is found is under the bound that is known, and no further price is tried."""
    search, result, best_s = at_one_price(29)
    bounded = replace(result, cost=replace(result.cost, lower_bound_s=best_s * (1 - TARGET_GAP / 2)))
    free = refine_multipliers(search, result)
    number = len(search.prices)
    assert refine_multipliers(search, bounded).cost.step_s == free.cost.step_s
    assert len(search.prices) - number < number
