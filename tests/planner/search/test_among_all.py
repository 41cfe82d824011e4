"""Prices of memory among all strategies on three axes: the plans that they give, as plans of the mesh."""

from __future__ import annotations

import math

import pytest

from shardwright.planner.constraints.forced import ForcedStrategy
from shardwright.planner.limits import SearchLimits
from shardwright.planner.memory.lagrangian import LagrangianSearch, fit_plan
from shardwright.planner.memory.tuning import RISING_MULTIPLIERS
from shardwright.planner.search.primal_recovery import fit_over_all_strategies
from shardwright.planner.search.search import Search
from shardwright.planner.segments.bound import solve_tied
from shardwright.planner.segments.descent import reprice_plan
from shardwright.planner.segments.segment_chain import Chain, ChainSolution
from tests.planner.search.test_branching import best_that_fits_s, with_less_memory
from tests.planner.segments.test_descent import COARSE, FINE


def all_strategies(search: Search) -> tuple[Chain, ChainSolution]:
    """All strategies on three axes, and the fastest plan that message passing reads off them."""
    chain = search.build_bounding_chain(FINE, even_rank=9, uneven_rank=9).untie()
    return chain, solve_tied(chain)


def test_they_find_the_best_plan_that_fits_where_descents_do_not() -> None:
    """By integer programs over all strategies; none is solved for the plan that is compared with that."""
    search, fastest = with_less_memory(16, 2048, SearchLimits(max_exact_states=0))
    best_s = best_that_fits_s(search, fastest)
    descended = fit_plan(search, fastest)
    result = fit_over_all_strategies(search, descended, *all_strategies(search))
    assert descended.cost.step_s > 1.5 * best_s
    assert result.cost.step_s <= 1.01 * best_s
    assert search.bytes_needed(result) <= search.limit_bytes
    assert result.chain.graph.prices is descended.chain.graph.prices, "it can be mixed with plans of the mesh"


@pytest.mark.parametrize("knows", [True, False])
def test_where_a_plan_is_known_to_fit_no_dear_price_is_tried(knows: bool) -> None:
    search, fastest = with_less_memory(16, 2048, SearchLimits(max_exact_states=0))
    chain, read = all_strategies(search)
    start = search.evaluate(chain, read, ())
    states = chain.states_of((candidate := fit_plan(search, fastest)).chain.strategies(candidate.solution.states))
    assert states is not None
    within = search.evaluate(chain, ChainSolution(states=states, value=math.inf, tied_bound=0.0), ())
    fitting = LagrangianSearch(search, start, math.inf, (), within if knows else None)
    fitting.find_best()
    dearest = max(each.multiplier for each in fitting.evaluations) * start.memory.peak_bytes / start.cost.step_s
    assert (dearest <= max(RISING_MULTIPLIERS)) == knows
    assert within.cost.step_s == pytest.approx(candidate.cost.step_s)


@pytest.mark.parametrize("seed", [16, 29])
def test_a_plan_is_the_same_with_the_prices_of_its_mesh(seed: int) -> None:
    search, fastest = with_less_memory(seed, 2048)
    chain, read = all_strategies(search)
    at = chain.strategies(read.states)
    near, solved = reprice_plan(chain, at, fastest.chain.graph, time_limit_s=20.0)
    assert near.strategies(solved.states) == at
    assert search.evaluate(near, solved, ()).cost.step_s == pytest.approx(search.evaluate(chain, read, ()).cost.step_s)


def test_a_plan_has_states_where_each_of_its_strategies_is_one() -> None:
    search, _ = with_less_memory(16, 2048)
    chain, read = all_strategies(search)
    at = chain.strategies(read.states)
    assert chain.states_of(at) == read.states
    assert search.build_chain(COARSE, ForcedStrategy(), frozenset()).states_of(at) is None
