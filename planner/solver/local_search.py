"""A good assignment quickly: the integer program's starting point, and its fallback when time runs out."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from shardwright.planner.solver.pbqp import FloatArray, IntArray, Problem
from shardwright.planner.solver.tuning import MAX_DESCENT_SWEEPS


def find_incumbent(problem: Problem, fixed_states: Mapping[int, int] | None = None) -> IntArray:
    """States by greedy elimination, improved one variable at a time until no change helps.

    fixed_states: of some variables, assigned first.
    """
    near = _neighbours(problem)
    return _descend(problem, near, _greedy(problem, near, fixed_states or {}))


def improve(problem: Problem, states: IntArray) -> IntArray:
    """`states`, changed one variable at a time until no change helps."""
    return _descend(problem, _neighbours(problem), states.copy())


def _neighbours(problem: Problem) -> list[dict[int, FloatArray]]:
    near: list[dict[int, FloatArray]] = [{} for _ in problem.costs]
    for (v, w), matrix in problem.edges.items():
        near[v][w], near[w][v] = matrix, matrix.T
    return near


def _greedy(problem: Problem, near: list[dict[int, FloatArray]], fixed_states: Mapping[int, int]) -> IntArray:
    """Assign variables by decreasing degree. Each takes its best state, given assigned neighbours' states and the most
    favourable states of the others."""
    states = np.full(len(problem.costs), -1, np.int64)
    for v, state in fixed_states.items():
        states[v] = state
    for v in sorted(np.flatnonzero(states < 0).tolist(), key=lambda v: (-len(near[v]), v)):
        total = problem.costs[v].copy()
        for w, matrix in near[v].items():
            total += matrix[:, states[w]] if states[w] >= 0 else (matrix + problem.costs[w]).min(axis=1)
        states[v] = int(np.argmin(total))
    return states


def _descend(problem: Problem, near: list[dict[int, FloatArray]], states: IntArray) -> IntArray:
    is_settled = [False] * len(states)  # whether no neighbour has changed since its last visit
    for _ in range(MAX_DESCENT_SWEEPS):
        changed = False
        for v, cost in enumerate(problem.costs):
            if is_settled[v]:
                continue
            is_settled[v] = True
            total = cost.copy()
            for w, matrix in near[v].items():
                total += matrix[:, states[w]]
            best = int(np.argmin(total))
            if total[best] < total[states[v]]:
                states[v], changed = best, True
                for w in near[v]:
                    is_settled[w] = False
        if not changed:
            break
    return states
