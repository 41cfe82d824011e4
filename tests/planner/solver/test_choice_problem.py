"""Reductions, bounds and the integer program against exhaustive search on small random problems."""

from __future__ import annotations

import math
import time
from itertools import combinations, product

import numpy as np
import pytest

from shardwright.errors import PlanError
from shardwright.planner.solver import dual, ilp, pbqp
from shardwright.planner.solver.local_search import find_incumbent
from shardwright.planner.solver.pbqp import Problem
from shardwright.planner.solver.solve import solve
from tests.planner.busy_machine import others_have_the_machine

SEEDS = range(60)


def random_problem(seed: int) -> Problem:
    """Up to seven variables of up to four states; some pairs impossible, some costs equal."""
    random = np.random.default_rng(seed)
    count = int(random.integers(2, 8))
    costs = [random.integers(0, 9, random.integers(1, 5)).astype(float) for _ in range(count)]
    problem = Problem(costs=costs)
    for v, w in combinations(range(count), 2):
        if random.random() < 0.6:
            matrix = random.integers(0, 9, (len(costs[v]), len(costs[w]))).astype(float)
            matrix[random.random(matrix.shape) < 0.1] = np.inf
            problem.add_edge(v, w, matrix)
    return problem


def exhaustive(problem: Problem) -> float:
    return min(problem.value(np.array(states)) for states in product(*(range(len(cost)) for cost in problem.costs)))


@pytest.mark.parametrize("seed", SEEDS)
def test_solve_finds_the_exhaustive_optimum(seed: int) -> None:
    problem = random_problem(seed)
    best = exhaustive(problem)
    if not np.isfinite(best):
        with pytest.raises(PlanError):
            solve(problem, time_limit_s=10)
        return
    solution = solve(problem, time_limit_s=10)
    assert solution.value == pytest.approx(best)
    assert problem.value(solution.states) == pytest.approx(solution.value)
    assert solution.lower_bound == pytest.approx(best)


@pytest.mark.parametrize("seed", SEEDS)
def test_reductions_keep_the_optimum_and_find_the_way_back(seed: int) -> None:
    problem = random_problem(seed)
    best = exhaustive(problem)
    if not np.isfinite(best):
        return
    reduction = pbqp.reduce(problem)
    core_states = min(
        product(*(range(len(cost)) for cost in reduction.core.costs)),
        key=lambda states: reduction.core.value(np.array(states, np.int64)),
    )
    states = np.array(core_states, np.int64)
    assert reduction.core.value(states) + reduction.constant == pytest.approx(best)
    assert problem.value(reduction.complete(states)) == pytest.approx(best)


@pytest.mark.parametrize("seed", SEEDS[:20])
def test_integer_program_alone_finds_the_optimum(seed: int) -> None:
    problem = random_problem(seed)
    best = exhaustive(problem)
    if np.isfinite(best):
        solution = ilp.solve(problem, time_limit_s=10)
        assert solution.value == pytest.approx(best)
        assert solution.lower_bound == pytest.approx(best)


@pytest.mark.parametrize("seed", SEEDS)
def test_message_passing_never_overbounds_and_keeps_what_is_better(seed: int) -> None:
    problem = random_problem(seed)
    best = exhaustive(problem)
    if any(not np.isfinite(m).any(axis=a).all() for m in problem.edges.values() for a in (0, 1)):
        return  # `tighten` asks for a finite entry in every row and column
    bound = dual.tighten(problem)
    assert bound.lower_bound <= best + 1e-9
    if np.isfinite(best) and best < bound.value - 1e-9:
        assert exhaustive(problem.restrict(bound.surviving_states(bound.value))) == pytest.approx(best)


def test_incumbent_is_an_assignment() -> None:
    problem = random_problem(3)
    states = find_incumbent(problem)
    assert all(0 <= i < len(cost) for i, cost in zip(states, problem.costs, strict=True))


def hard_problem(count: int) -> Problem:
    """Variables of six states, every two of them with an edge."""
    random = np.random.default_rng(0)
    problem = Problem(costs=[random.random(6) for _ in range(count)])
    for v, w in combinations(range(count), 2):
        problem.add_edge(v, w, random.random((6, 6)))
    return problem


def test_time_limit_leaves_a_valid_bound() -> None:
    """With no time the integer program still gives the incumbent, and a bound under it."""
    problem = hard_problem(30)
    solution = ilp.solve(problem, time_limit_s=0.05)
    assert 0.0 <= solution.lower_bound <= solution.value
    assert problem.value(solution.states) == pytest.approx(solution.value)


@pytest.mark.parametrize("seed", range(20))
def test_an_integer_program_finds_what_is_below_a_known_value_or_bounds_all_by_it(seed: int) -> None:
    problem = random_problem(seed)
    optimum = exhaustive(problem)
    if not math.isfinite(optimum):
        return
    better = ilp.solve(problem, time_limit_s=10, below=optimum + 0.5)
    assert better.value == pytest.approx(optimum)
    assert better.lower_bound <= optimum + 1e-6
    none = ilp.solve(problem, time_limit_s=10, below=optimum - 0.5)
    assert none.value >= optimum - 1e-6
    assert none.lower_bound == pytest.approx(optimum - 0.5)


@pytest.mark.dear
def test_an_integer_program_ends_by_the_work_that_it_may_take() -> None:
    problem = hard_problem(60)
    solution = ilp.solve(problem, time_limit_s=math.inf, most_work=0.0)
    assert problem.value(solution.states) == pytest.approx(solution.value)
    assert solution.lower_bound <= ilp.solve(problem, time_limit_s=2).lower_bound


def test_an_integer_program_ends_by_cpu_time_however_busy_the_machine_is() -> None:
    problem = hard_problem(5)
    cut_short = ilp.solve(problem, time_limit_s=math.inf, most_cpu_s=0.0)
    assert 0.0 <= cut_short.lower_bound < cut_short.value
    assert problem.value(cut_short.states) == pytest.approx(cut_short.value)
    begun_s = time.perf_counter()
    with others_have_the_machine():
        solved = ilp.solve(problem, time_limit_s=math.inf, most_cpu_s=2.0)
    assert time.perf_counter() - begun_s > 2.0
    assert solved.lower_bound == pytest.approx(solved.value)
    assert solved.value <= cut_short.value


def test_equal_pairs_of_edges_are_joined_once_and_others_apart() -> None:
    random = np.random.default_rng(1)
    left, cost, right = random.random((3, 4)), random.random(3), random.random((3, 5))
    joins = pbqp.EdgeJoinCache()
    first = joins.of(left, cost, right)
    np.testing.assert_allclose(first, (left[:, :, None] + cost[:, None, None] + right[:, None, :]).min(axis=0))
    assert joins.of(left.copy(), cost.copy(), right.copy()) is first
    others = [joins.of(left + 1, cost, right), joins.of(left, cost + 1, right), joins.of(left, cost, right + 1)]
    for other in others:
        np.testing.assert_allclose(other, first + 1)


def test_a_matrix_that_loses_nothing_is_handed_on() -> None:
    problem = random_problem(3)
    whole = [np.arange(len(cost)) for cost in problem.costs]
    v, w = min(edge for edge, matrix in problem.edges.items() if len(matrix) > 1)
    fewer = [states[1:] if i == v else states for i, states in enumerate(whole)]
    assert problem.restrict(whole).edges[v, w] is problem.edges[v, w]
    np.testing.assert_array_equal(problem.restrict(fewer).edges[v, w], problem.edges[v, w][1:])
