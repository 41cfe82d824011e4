"""Message passing on the dual of the linear relaxation: a certified bound, and states that cannot be optimal.

Costs are moved between variables and their edges so that the value of every assignment stays what it was (a
reparametrization). Then the sum of all minima, of variables and of edges, is a lower bound, and a state that
raises it above a known assignment's value is in no better assignment: it can go.

A sweep visits the variables in order. Each takes from the edges to those before it all that they hold against its
states, and gives what it has to the edges to those after it, in equal parts; the next sweep comes back (SRMP:
Kolmogorov, "A New Look at Reweighted Message Passing", 2015). On graphs as sparse as these it needs fewer sweeps than
passing messages edge by edge (MPLP++), and each costs half. Where the relaxation is tight, which it mostly is on
training steps, this leaves the integer program next to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.planner.clock import Clock
from shardwright.planner.local_search import improve, incumbent
from shardwright.planner.pbqp import LEAST, FloatArray, IntArray, Problem

#: Rounds, of a sweep there and back, at most; and the relative gain over the last `_PATIENCE` of them below which they
#: end. After the first and every `_DECODED`-th an assignment is read off.
_ROUNDS = 150
_PATIENCE = 5
_LEAST_GAIN = 1e-5
_DECODED = 3

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

    close: relative gap at which to stop. clock: when it is late, no further round begins.
    """
    passing = _Passing(problem)
    states = incumbent(problem)
    value = problem.value(states)
    history: list[float] = []
    for number in range(_ROUNDS):
        passing.sweep(backwards=False)
        passing.sweep(backwards=True)
        bound = passing.bound()
        history.append(bound)
        if number == 0 or number % _DECODED == _DECODED - 1:
            found = improve(problem, passing.decode())
            if problem.value(found) < value:
                states, value = found, problem.value(found)
        gain = bound - history[-1 - _PATIENCE] if number >= _PATIENCE else np.inf
        if value - bound <= close * abs(value) or gain <= _LEAST_GAIN * abs(bound):
            break
        if clock is not None and clock.is_late:
            break
    return Bounded(states=states, value=value, lower_bound=min(history[-1], value), raised=passing.raised())


class _Passing:
    """Costs on their way. unary: of variables. pairs: of edges, changed in place.

    before / after: per variable, its edges to smaller and larger ones, its own states as rows.
    """

    def __init__(self, problem: Problem) -> None:
        self.unary = [cost.copy() for cost in problem.costs]
        self.pairs = {edge: problem.edges[edge].copy() for edge in sorted(problem.edges)}
        self.before: list[list[FloatArray]] = [[] for _ in self.unary]
        self.after: list[list[FloatArray]] = [[] for _ in self.unary]
        for (v, w), matrix in self.pairs.items():
            self.after[v].append(matrix)
            self.before[w].append(matrix.T)

    def sweep(self, *, backwards: bool) -> None:
        """Visit all variables once."""
        taken, given = (self.after, self.before) if backwards else (self.before, self.after)
        for v in reversed(range(len(self.unary))) if backwards else range(len(self.unary)):
            self.unary[v] = _visit(self.unary[v], taken[v], given[v])

    def bound(self) -> float:
        """What no assignment costs less than."""
        least = sum(LEAST(cost) for cost in self.unary)
        return float(least + sum(LEAST(matrix, None) for matrix in self.pairs.values()))

    def decode(self) -> IntArray:
        """States in order of the variables, each the cheapest with those before it. After a round each variable
        knows of those after it."""
        states = np.zeros(len(self.unary), np.int64)
        totals = [cost.copy() for cost in self.unary]
        later: list[list[int]] = [[] for _ in self.unary]
        for v, w in self.pairs:
            later[v].append(w)
        for v, others in enumerate(later):
            states[v] = int(np.argmin(totals[v]))
            for w in others:
                totals[w] += self.pairs[v, w][states[v]]
        return states

    def raised(self) -> tuple[FloatArray, ...]:
        """How far each state raises the bound, counting its variable and its edges."""
        raised = [cost - cost.min() for cost in self.unary]
        for (v, w), matrix in self.pairs.items():
            least = matrix.min()
            raised[v] = raised[v] + (matrix.min(axis=1) - least)
            raised[w] = raised[w] + (matrix.min(axis=0) - least)
        return tuple(raised)


def _visit(cost: FloatArray, taken: Sequence[FloatArray], given: Sequence[FloatArray]) -> FloatArray:
    """What a variable keeps of its costs after it took from some edges and gave to others, in place."""
    for matrix in taken:
        least = LEAST(matrix, 1)
        np.subtract(matrix, least[:, None], out=matrix)
        cost = cost + least
    if not given:
        return cost
    share = cost / max(len(taken), len(given))
    column = share[:, None]
    for matrix in given:
        np.add(matrix, column, out=matrix)
    return cost - len(given) * share if len(given) < len(taken) else np.zeros_like(cost)
