"""Plans near the known one that differ along two of three axes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.options.plan_options import PlanOptions
from shardwright.planner.constraints.forced import ForcedStrategy
from shardwright.planner.search.local_search import block_coordinate_descent
from shardwright.planner.search.search import Search
from shardwright.planner.search.solutions import CandidatePlan
from shardwright.planner.segments.descent import descend, lift_plan
from tests.planner.segments.test_descent import COARSE, EIGHT, FINE, large_program


def descend_to_plan(search: Search) -> CandidatePlan:
    """What one axis at a time ends at."""
    coarse = search.build_chain(COARSE, ForcedStrategy(), frozenset())
    at, axes = lift_plan(coarse, coarse.solve(20.0).states, FINE)
    near, solved = descend(coarse, at, search.refine_graph(coarse, FINE), axes, time_limit_s=20.0)
    return search.evaluate(near, solved, ())


def test_two_axes_get_to_the_optimum_where_one_is_stuck() -> None:
    search = Search(large_program(35, 2048), EIGHT, PlanOptions())
    stuck = descend_to_plan(search)
    best_s = search.build_chain(FINE, ForcedStrategy(), frozenset()).solve(20.0).value
    assert stuck.cost.step_s > 1.01 * best_s
    assert block_coordinate_descent(search, stuck, 0.0, together=1).cost.step_s == stuck.cost.step_s
    result = block_coordinate_descent(search, stuck, 0.0, together=2)
    assert result.cost.step_s == pytest.approx(best_s, rel=1e-3)
    assert search.reported_plan is result


def test_it_ends_at_a_gap_that_may_be_open() -> None:
    search = Search(large_program(35, 2048), EIGHT, PlanOptions())
    stuck = descend_to_plan(search)
    outcome = replace(stuck, cost=replace(stuck.cost, lower_bound_s=0.9 * stuck.cost.step_s))
    assert block_coordinate_descent(search, outcome, 0.2, together=2) is outcome
    result = block_coordinate_descent(search, outcome, 0.0, together=2)
    assert result.cost.lower_bound_s == outcome.cost.lower_bound_s


def test_what_does_not_fit_is_not_taken() -> None:
    text = large_program(35, 2048)
    stuck = descend_to_plan(Search(text, EIGHT, PlanOptions()))
    faster = block_coordinate_descent(Search(text, EIGHT, PlanOptions()), stuck, 0.0, together=2)
    tight = Search(text, EIGHT, PlanOptions())
    tight.limit_bytes = tight.bytes_needed(faster) - 1
    result = block_coordinate_descent(tight, descend_to_plan(tight), 0.0, together=2)
    assert faster.cost.step_s < result.cost.step_s <= stuck.cost.step_s
