"""Message passing between variables and the edges that join them (SRMP).

Costs are moved between variables and edges so that the value of every assignment stays what it was (a
reparametrization). The sum of all minima, of variables and of edges, is then a lower bound of every assignment's value.

A sweep visits the variables in order. Each takes from the edges to those before it all that they hold against its
states, and gives what it has to the edges to those after it, in equal parts; the next sweep comes back (Kolmogorov,
"A New Look at Reweighted Message Passing", 2015). On graphs as sparse as these it needs fewer sweeps than passing
messages edge by edge (MPLP++), and each costs half.

Alone, such sweeps come near their end ever more slowly where costs have far to go: through hundreds of variables with
hundreds of states. But a bound holds wherever the messages are. So a round begins beyond where the last one ended, in
the direction in which it went (the momentum of Nesterov, "A method of solving a convex programming problem with
convergence rate O(1/k²)", 1983). Where that went too far, the round is taken from where the last one ended, and the
momentum starts anew (O'Donoghue and Candès, "Adaptive restart for accelerated gradient schemes", 2015).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from shardwright.planner.solver.pbqp import MINIMUM, FloatArray, IntArray
from shardwright.planner.solver.warm_start import fill_unknown

#: What is said of either end of an edge, state by state.
_Ends = tuple[FloatArray, FloatArray]

#: By what part of the best bound another one must be lower to be more than rounding.
_LOWER = 1e-12

#: An edge: the variables at its ends, and the costs of their states.
Edge = tuple[int, int, FloatArray]


class _End(NamedTuple):
    """An edge as the variable at one of its ends sees it.

    matrix: its costs. told: what the variable was told of each of its states, besides what it asks itself. of_other:
    what the other one was told, against `matrix`. axis: that the other one's states lie along. left: room for what the
    edge has left.
    """

    matrix: FloatArray
    messages: FloatArray
    of_other: FloatArray
    axis: int
    left: FloatArray


class MessagePassing:
    """Costs on their way.

    unary: of variables, now. edges: as they were given. told: per edge, for both ends, what was moved from the edge to
    the variable so far, state by state; the edge has left what it was given less both. Every row and column of an edge
    must have a finite entry. Several edges may join the same two variables, and both ends may be at one variable:
    where it stands for as many as there are repeats, of which the edge joins each to the next.
    """

    def __init__(self, costs: Sequence[FloatArray], edges: Sequence[Edge], told: Sequence[_Ends] | None = None) -> None:
        self.edges: list[Edge] = [(v, w, np.ascontiguousarray(matrix)) for v, w, matrix in edges]
        known = told or [(np.zeros(len(matrix)), np.zeros(matrix.shape[1])) for *_, matrix in self.edges]
        self._momentum = _Momentum([*costs, *(said for pair in known for said in pair)])
        self.unary = self._momentum.parts[: len(costs)]
        sides = iter(self._momentum.parts[len(costs) :])
        self.messages: list[_Ends] = list(zip(sides, sides, strict=True))
        self._before: list[list[_End]] = [[] for _ in self.unary]
        self._after: list[list[_End]] = [[] for _ in self.unary]
        self._bound = -np.inf  # after the last round
        self._is_swept = False  # whether each edge's first variable took last from it, so that no state has any left
        room = self._room = np.empty(max((matrix.size for *_, matrix in self.edges), default=0))
        for (v, w, matrix), (left, right) in zip(self.edges, self.messages, strict=True):
            rest = room[: matrix.size].reshape(matrix.shape)
            ends = _End(matrix, left, right, 1, rest), _End(matrix, right, left[:, None], 0, rest)
            if v == w:
                self._before[v] += ends
                self._after[v] += ends
            else:
                first, second = ends if v < w else ends[::-1]
                self._after[min(v, w)].append(first)
                self._before[max(v, w)].append(second)

    def round(self) -> float:
        """Visit all variables, there and back, from beyond where the last round ended; the bound then, which is no
        lower than before."""
        before, is_beyond = self._bound, self._momentum.carry_on()
        self._bound = self._sweep()
        if is_beyond and self._bound < before - _LOWER * abs(before):
            self._momentum.start_anew()
            self._bound = self._sweep()
        return self._bound

    def _sweep(self) -> float:
        for v in range(len(self.unary)):
            _visit(self.unary[v], self._before[v], self._after[v])
        for v in reversed(range(len(self.unary))):
            _visit(self.unary[v], self._after[v], self._before[v])
        self._is_swept = True
        return self.bound()

    def move(self, moved: Mapping[tuple[int, int], _Ends], most: float) -> None:
        """Move costs from variables onto edges: of states of which nothing is known (NaN) as much as of the others, and
        of none more than `most`. Edges that there are none of are passed over."""
        for (v, w, _), told in zip(self.edges, self.messages, strict=True):
            if (v, w) in moved:
                of_v, of_w = (np.clip(fill_unknown(costs), -most, most) for costs in moved[v, w])
                self._is_swept = False
                np.subtract(self.unary[v], of_v, out=self.unary[v])
                np.subtract(self.unary[w], of_w, out=self.unary[w])
                np.subtract(told[0], of_v, out=told[0])
                np.subtract(told[1], of_w, out=told[1])

    def bound(self) -> float:
        """What no assignment costs less than."""
        least = sum(MINIMUM(cost) for cost in self.unary)
        edges = [edge for edge, (v, w, _) in enumerate(self.edges) if v == w or not self._is_swept]
        return float(least + sum(MINIMUM(self._edge_residual(edge), None) for edge in edges))

    def _edge_residual(self, edge: int) -> FloatArray:
        """What an edge has left, in room that is used again."""
        left, right = self.messages[edge]
        room = self._room[: self.edges[edge][2].size].reshape(self.edges[edge][2].shape)
        found: FloatArray = np.subtract(self.edges[edge][2], right, out=room)
        found -= left[:, None]
        return found

    def decode(self) -> IntArray:
        """States in order of the variables, each the cheapest with those before it. After a round each variable
        knows of those after it."""
        states = np.zeros(len(self.unary), np.int64)
        totals = [cost.copy() for cost in self.unary]
        later: list[list[tuple[int, FloatArray, FloatArray]]] = [[] for _ in self.unary]
        for (v, w, matrix), (_, right) in zip(self.edges, self.messages, strict=True):
            later[v].append((w, matrix, right))
        for v, others in enumerate(later):
            states[v] = int(np.argmin(totals[v]))
            for w, matrix, right in others:
                totals[w] += matrix[states[v]] - right
        return states

    def min_marginals(self) -> list[FloatArray]:
        """How far each state raises the bound, counting its variable and its edges."""
        raised = [cost - cost.min() for cost in self.unary]
        for edge, (v, w, _) in enumerate(self.edges):
            left = self._edge_residual(edge)
            if self._is_swept and v != w:
                raised[max(v, w)] = raised[max(v, w)] + MINIMUM(left, 0 if v < w else 1)
                continue
            of_v, of_w = MINIMUM(left, 1), MINIMUM(left, 0)
            least = MINIMUM(of_v)
            raised[v] = raised[v] + (of_v - least)
            raised[w] = raised[w] + (of_w - least)
        return raised

    def restrict(self, kept: Sequence[IntArray]) -> MessagePassing:
        """The same with only the states `kept` of each variable."""
        costs = [cost[states] for cost, states in zip(self.unary, kept, strict=True)]
        edges = [(v, w, matrix[np.ix_(kept[v], kept[w])]) for v, w, matrix in self.edges]
        pairs = zip(self.edges, self.messages, strict=True)
        return MessagePassing(costs, edges, [(left[kept[v]], right[kept[w]]) for (v, w, _), (left, right) in pairs])


class _Momentum:
    """Numbers that move round by round, and where they were a round ago.

    parts: views of them.
    """

    def __init__(self, parts: Sequence[FloatArray]) -> None:
        self._now = np.concatenate([np.zeros(0), *parts])
        self.parts: list[FloatArray] = np.split(self._now, np.cumsum([len(part) for part in parts]))[:-1]
        self._last = self._now.copy()
        self._rounds = 0  # since the momentum started

    def carry_on(self) -> bool:
        """Go on in the direction of the last round, the further the more rounds went well; whether that is any way."""
        now = self._now.copy()
        with np.errstate(invalid="ignore"):  # differences of what is both impossible
            step = now - self._last
        is_beyond = self._rounds > 1 and bool(np.isfinite(step).all())
        if is_beyond:
            self._now += (self._rounds - 1) / (self._rounds + 2) * step
        self._last = now
        self._rounds += 1
        return is_beyond

    def start_anew(self) -> None:
        """Back to where the last round ended."""
        self._now[:] = self._last
        self._rounds = 1


def _visit(cost: FloatArray, taken: Sequence[_End], given: Sequence[_End]) -> None:
    """Have a variable take its costs from some edges and give them to others, in place."""
    for matrix, told, of_other, axis, left in taken:
        np.subtract(matrix, of_other, out=left)
        least = MINIMUM(left, axis)
        cost += least - told
        told[:] = least
    if not given:
        return
    share = cost / max(len(taken), len(given))
    for end in given:
        np.subtract(end.messages, share, out=end.messages)
    cost[:] = cost - len(given) * share if len(given) < len(taken) else 0.0
