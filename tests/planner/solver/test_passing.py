"""Message passing on random problems, and where one variable stands for many."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from shardwright.planner.solver.message_passing import MessagePassing


def random_edge(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    return rng.integers(0, 50, (rows, columns)).astype(float)


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_lost_on_the_way(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, 5, 5).tolist()
    costs = [rng.integers(0, 50, size).astype(float) for size in sizes]
    pairs = [(0, 1), (1, 0), (1, 2), (0, 3), (2, 4), (3, 4)]
    edges = [(v, w, random_edge(rng, sizes[v], sizes[w])) for v, w in pairs]
    passing = MessagePassing(costs, edges)
    bounds = [passing.round() for _ in range(30)]
    best = min(
        sum(cost[x] for cost, x in zip(costs, states, strict=True)) + sum(m[states[v], states[w]] for v, w, m in edges)
        for states in product(*map(range, sizes))
    )
    assert np.all(np.diff(bounds) >= -1e-9)
    assert bounds[-1] <= best + 1e-9
    assert bounds[-1] > sum(cost.min() for cost in costs) + sum(m.min() for *_, m in edges)
    moved = [cost.copy() for cost in costs]
    for (v, w, _), (left, right) in zip(edges, passing.messages, strict=True):
        moved[v] += left
        moved[w] += right
    for now, expected in zip(passing.unary, moved, strict=True):
        np.testing.assert_allclose(now, expected, atol=1e-9)
    anew = passing.restrict([np.arange(size) for size in sizes])  # which knows of no round
    assert bounds[-1] == pytest.approx(anew.bound(), abs=1e-9)
    for one, other in zip(passing.min_marginals(), anew.min_marginals(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-9)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("repeats", [2, 3, 4])
def test_an_edge_to_the_next_repeat_bounds_a_ring_of_them(seed: int, repeats: int) -> None:
    rng = np.random.default_rng(seed)
    cost, edge = rng.integers(0, 50, 4).astype(float), random_edge(rng, 4, 4)
    passing = MessagePassing([cost], [(0, 0, edge)])
    bound = [passing.round() for _ in range(20)][-1]
    best = min(
        sum(cost[x] + edge[x, states[(i + 1) % repeats]] for i, x in enumerate(states))
        for states in product(range(4), repeat=repeats)
    )
    assert cost.min() + edge.min() <= bound + 1e-9
    assert repeats * bound <= best + 1e-9


def test_impossible_pairs_stay_so() -> None:
    edge = np.array([[np.inf, 1.0], [2.0, np.inf]])
    passing = MessagePassing([np.array([0.0, 5.0]), np.array([3.0, 0.0])], [(0, 1, edge)])
    bounds = [passing.round() for _ in range(5)]
    assert bounds[-1] == pytest.approx(1.0)
    assert passing.decode().tolist() == [0, 1]


@pytest.mark.parametrize("seed", range(5))
def test_momentum_comes_further_in_fewer_rounds_than_sweeps_alone(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, columns, states = 3, 20, 16
    pairs = [(v, v + 1) for v in range(rows * columns) if (v + 1) % columns]
    pairs += [(v, v + columns) for v in range((rows - 1) * columns)]
    costs = [rng.random(states) for _ in range(rows * columns)]
    edges = [(v, w, rng.random((states, states))) for v, w in pairs]
    passing, alone = MessagePassing(costs, edges), MessagePassing(costs, edges)
    every_state = [np.arange(states)] * len(costs)
    bounds = [passing.round() for _ in range(40)]
    for _ in range(150):
        swept = alone.round()
        alone = alone.restrict(every_state)  # which knows of no round
    assert bounds[-1] > swept
    assert np.all(np.diff(bounds) >= -1e-9)
    assert bounds[-1] == pytest.approx(passing.restrict(every_state).bound(), rel=1e-12)
