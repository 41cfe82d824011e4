"""Beginning where another search ended: never wrong, and soon done where little has changed."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest

from shardwright.planner.solver import dual
from shardwright.planner.solver.pbqp import Problem
from shardwright.planner.solver.solve import solve
from shardwright.planner.solver.warm_start import VariableImage, WarmStart, positions_in, translate
from tests.planner.clocks import LookCountingClock, just_late

SEEDS = range(20)


def random_problem(seed: int, size: int = 6, states: int = 4) -> Problem:
    """Every variable joined to every other: nothing can be folded."""
    rng = np.random.default_rng(seed)
    problem = Problem(costs=[rng.random(states) for _ in range(size)])
    for v, w in combinations(range(size), 2):
        problem.add_edge(v, w, rng.random((states, states)))
    return problem


def best_of(problem: Problem) -> float:
    return min(problem.value(np.array(each)) for each in product(*(range(len(cost)) for cost in problem.costs)))


def bound_after_a_round(problem: Problem, start: WarmStart[int] | None) -> float:
    """The clock ends message passing after the first round of messages."""
    return dual.tighten(problem, clock=just_late(), start=start).lower_bound


def test_the_same_problem_goes_on_where_it_ended() -> None:
    """Nearly: what was moved for states that were dropped is from before they were."""
    cold, warm = 0.0, 0.0  # seconds open after a first round, of all problems
    for seed in SEEDS:
        problem = random_problem(seed)
        best = best_of(problem)
        cold += best - bound_after_a_round(problem, WarmStart())
        warm += best - bound_after_a_round(problem, dual.tighten(problem, start=WarmStart()).warm_start)
    assert warm < 0.5 * cold


@pytest.mark.parametrize("seed", SEEDS)
def test_no_start_makes_a_bound_or_a_value_wrong(seed: int) -> None:
    problem, rng = random_problem(seed), np.random.default_rng(seed + 100)
    moved = {edge: (rng.normal(0, 1e6, 4), rng.normal(0, 10, 4)) for edge in problem.edges}
    moved[0, 1][0][2] = np.nan
    moved[0, 9] = moved[0, 1]  # of an edge that there is not
    bound = dual.tighten(problem, start=WarmStart(moved=moved, states={0: 3, 2: 1}))
    best = best_of(problem)
    assert bound.lower_bound <= best + 1e-9
    assert bound.value == pytest.approx(problem.value(bound.states))
    assert bound.value >= best - 1e-9


@pytest.mark.dear
def test_a_start_in_terms_of_a_problem_reaches_its_core() -> None:
    cold, warm = 0.0, 0.0
    for seed in SEEDS:
        problem = random_problem(seed)
        problem.costs.append(np.zeros(4))  # is folded away
        problem.add_edge(0, 6, np.random.default_rng(seed).random((4, 4)))
        first = solve(problem, time_limit_s=10, start=WarmStart())
        assert first.warm_start is not None
        assert set(first.warm_start.states) == set(range(7))
        assert solve(problem, time_limit_s=10, start=first.warm_start).value == pytest.approx(first.value)
        after_a_round = [
            solve(problem, time_limit_s=10, start=start, clock=just_late()).lower_bound
            for start in (WarmStart(), first.warm_start)
        ]
        cold += first.value - after_a_round[0]
        warm += first.value - after_a_round[1]
    assert warm < 0.5 * cold


def test_what_costs_little_enough_is_taken_at_once() -> None:
    problem, clock = random_problem(1), LookCountingClock()
    first = dual.tighten(problem)
    warm_start = WarmStart(states=dict(enumerate(first.states.tolist())))
    bound = dual.tighten(problem, start=warm_start, enough=first.value + 1e-9, clock=clock)
    assert next(clock.looks) == 0, "no round of messages, each of which ends with a look at the clock"
    assert bound.value <= first.value + 1e-9
    assert bound.lower_bound <= first.value


def test_starts_are_told_by_names_states_and_counts() -> None:
    start = WarmStart(moved={("a", "b"): (np.array([1.0, 2.0]), np.array([3.0, 4.0, 5.0]))}, states={"a": 1, "b": 2})
    places = {
        "a": [VariableImage(7, np.array([1, 0, -1]), 2)],
        "b": [VariableImage(3, np.array([2, 1]), 3), VariableImage(9, np.array([0]))],
    }
    translation = translate(start, places, {"a": 4, "b": 4})
    assert translation.states == {7: 0, 3: 0}
    assert set(translation.moved) == {(3, 7), (7, 9)}
    of_b, of_a = translation.moved[3, 7]
    np.testing.assert_allclose(of_b, [2.5, 2.0])
    np.testing.assert_allclose(of_a, [1.0, 0.5, np.nan])
    np.testing.assert_allclose(translation.moved[7, 9][1], [0.75])


def test_what_falls_together_is_added() -> None:
    ends = np.array([1.0, 2.0]), np.array([3.0, 4.0])
    places = {name: [VariableImage(number, np.arange(2))] for name, number in {"a": 0, "b": 1, "c": 0}.items()}
    translation = translate(WarmStart(moved={("a", "b"): ends, ("b", "c"): ends}), places)
    np.testing.assert_allclose(translation.moved[0, 1], [[4.0, 6.0], [4.0, 6.0]])


def test_places_among_states() -> None:
    assert positions_in(np.array([1, 3]), 4).tolist() == [-1, 0, -1, 1]
