"""Message passing on the dual of the linear relaxation: a certified bound, and states that cannot be optimal.

Costs are moved between variables and their edges so that the value of every assignment stays what it was (a
reparametrization). Then the sum of all minima, of variables and of edges, is a lower bound, and a state that
raises it above a known assignment's value is in no better assignment: it can go. One handshake moves the costs of
an edge and its two ends so that this sum grows as much as the three alone allow (MPLP++: Tourani, Shekhovtsov,
Rother, Savchynskyy, 2018). Where the relaxation is tight, which it mostly is on training steps, this leaves
the integer program next to nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwright.planner.clock import Clock
from shardwright.planner.local_search import improve, incumbent
from shardwright.planner.pbqp import FloatArray, IntArray, Problem

#: Sweeps over all edges, at most; and the relative gain over the last `_PATIENCE` of them below which they end.
_SWEEPS = 300
_PATIENCE = 10
_LEAST_GAIN = 1e-5

#: `min` of an array along an axis; the method of the same name takes a third longer on small ones.
LEAST = np.minimum.reduce

#: Relative gap that counts as none: rounding in the last digits, over thousands of additions.
TIGHT = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounded:
    """What message passing found.

    states / value: the best assignment so far. lower_bound: no assignment is under it.
    raised: per variable, how far each of its states raises the bound.
    """

    states: IntArray
    value: float
    lower_bound: float
    raised: tuple[FloatArray, ...]

    def kept(self, value: float) -> tuple[IntArray, ...]:
        """Per variable, the states that may be part of a better assignment than one of `value`."""
        slack = value - self.lower_bound + TIGHT * abs(value)
        return tuple(np.flatnonzero(each <= slack) for each in self.raised)


def tighten(problem: Problem, close: float = TIGHT, clock: Clock | None = None) -> Bounded:
    """Bound `problem` and drop states. Every row and column of an edge must have a finite entry.

    close: relative gap at which to stop. clock: when it is late, no further sweep begins.
    """
    unary = [cost.copy() for cost in problem.costs]
    edges = sorted(problem.edges)
    pairs = {edge: problem.edges[edge].copy() for edge in edges}
    states = incumbent(problem)
    value = problem.value(states)
    history: list[float] = []
    for sweep in range(_SWEEPS):
        for edge in edges if sweep % 2 == 0 else reversed(edges):
            _handshake(unary, edge, pairs[edge])
        bound = _bound(unary, pairs)
        history.append(bound)
        if sweep % _PATIENCE == 0:
            found = improve(problem, _decode(unary, pairs, len(unary)))
            if problem.value(found) < value:
                states, value = found, problem.value(found)
        gain = bound - history[-1 - _PATIENCE] if sweep >= _PATIENCE else np.inf
        if value - bound <= close * abs(value) or gain <= _LEAST_GAIN * abs(bound):
            break
        if clock is not None and clock.is_late:
            break
    raised = _raised(unary, pairs)
    return Bounded(states=states, value=value, lower_bound=min(history[-1], value), raised=raised)


def _handshake(unary: list[FloatArray], edge: tuple[int, int], matrix: FloatArray) -> None:
    """Move costs between one edge's matrix (in place) and its ends so that the three minima's sum is largest."""
    v, w = edge
    matrix += unary[v][:, None] + unary[w]
    left = LEAST(matrix, 1)
    left *= 0.5
    matrix -= left[:, None]
    right = LEAST(matrix, 0)
    matrix -= right
    rest = LEAST(matrix, 1)
    matrix -= rest[:, None]
    left += rest
    unary[v], unary[w] = left, right


def _bound(unary: list[FloatArray], pairs: dict[tuple[int, int], FloatArray]) -> float:
    return float(sum(LEAST(cost) for cost in unary) + sum(LEAST(matrix, None) for matrix in pairs.values()))


def _decode(unary: list[FloatArray], pairs: dict[tuple[int, int], FloatArray], count: int) -> IntArray:
    """States in order of the variables, each the cheapest with those before it."""
    totals = [cost.copy() for cost in unary]
    later: dict[int, list[tuple[int, FloatArray]]] = {}
    for (v, w), matrix in pairs.items():
        later.setdefault(v, []).append((w, matrix))
    states = np.zeros(count, np.int64)
    for v in range(count):
        states[v] = int(np.argmin(totals[v]))
        for w, matrix in later.get(v, ()):
            totals[w] = totals[w] + matrix[states[v]]
    return states


def _raised(unary: list[FloatArray], pairs: dict[tuple[int, int], FloatArray]) -> tuple[FloatArray, ...]:
    """How far each state raises the bound, counting its variable and its edges."""
    raised = [cost - cost.min() for cost in unary]
    for (v, w), matrix in pairs.items():
        least = matrix.min()
        raised[v] = raised[v] + (matrix.min(axis=1) - least)
        raised[w] = raised[w] + (matrix.min(axis=0) - least)
    return tuple(raised)
