"""Sequential reweighted message passing (SRMP) between variables and the edges joining them.

Messages move costs between variables and edges; every assignment keeps its value (a reparametrization). The sum of all
minima, of variables and of edges, is then a lower bound on every assignment's value.

A sweep visits the variables in order. Each collects from its edges to earlier variables all their cost against its
states, then distributes its own cost in equal parts over its edges to later variables; the next sweep runs backward
(Kolmogorov, "A New Look at Reweighted Message Passing", 2015). On graphs this sparse it needs fewer sweeps than
messages edge by edge (MPLP++), each at half the cost.

Sweeps alone converge ever more slowly when costs have far to travel: through hundreds of variables with hundreds of
states. But the bound holds at any messages. A round therefore starts beyond the end of the last one, in its direction
(Nesterov's momentum, "A method of solving a convex programming problem with convergence rate O(1/k²)", 1983). After an
overshoot the round is repeated from the end of the last one, and the momentum restarts (O'Donoghue and Candès,
"Adaptive restart for accelerated gradient schemes", 2015).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from shardwright.planner.solver.pbqp import MINIMUM, FloatArray, IntArray
from shardwright.planner.solver.tuning import ROUNDING
from shardwright.planner.solver.warm_start import fill_unknown

#: Messages to both ends of an edge, one number per state.
_Ends = tuple[FloatArray, FloatArray]


#: An edge: the variables at its ends, and the costs of their states.
Edge = tuple[int, int, FloatArray]


class _End(NamedTuple):
    """An edge seen from the variable at one of its ends.

    matrix: the edge's costs.
    messages: to this variable, per state.
    of_other: messages to the other variable, broadcast against `matrix`.
    axis: axis of `matrix` along the other variable's states.
    left: scratch array: the edge's residual costs.
    """

    matrix: FloatArray
    messages: FloatArray
    of_other: FloatArray
    axis: int
    left: FloatArray


class MessagePassing:
    """A reparametrized problem and its messages.

    unary: current costs per variable.
    edges: the given edges.
    messages: per edge and end, the cost moved from the edge to that variable so far, per state. An edge's residual is
        its given matrix less both.

    Every row and column of an edge must have a finite entry. Parallel edges are allowed. An edge may join a variable to
    itself: the variable then stands in place of a chain of equal ones, and the edge joins each to the next.
    """

    def __init__(
        self, costs: Sequence[FloatArray], edges: Sequence[Edge], initial: Sequence[_Ends] | None = None
    ) -> None:
        self.edges: list[Edge] = [(v, w, np.ascontiguousarray(matrix)) for v, w, matrix in edges]
        messages = initial or [(np.zeros(len(matrix)), np.zeros(matrix.shape[1])) for *_, matrix in self.edges]
        self._momentum = _Momentum([*costs, *(said for pair in messages for said in pair)])
        self.unary = self._momentum.parts[: len(costs)]
        sides = iter(self._momentum.parts[len(costs) :])
        self.messages: list[_Ends] = list(zip(sides, sides, strict=True))
        self._before: list[list[_End]] = [[] for _ in self.unary]
        self._after: list[list[_End]] = [[] for _ in self.unary]
        self._bound = -np.inf  # after the last round
        self._is_swept = False  # each edge's first variable collected last: no state of it has residual cost
        # One scratch array for all edges: a residual is read before the next one is computed.
        room = self._room = np.empty(max((matrix.size for *_, matrix in self.edges), default=0))
        for (v, w, matrix), (to_v, to_w) in zip(self.edges, self.messages, strict=True):
            rest = room[: matrix.size].reshape(matrix.shape)
            ends = _End(matrix, to_v, to_w, 1, rest), _End(matrix, to_w, to_v[:, None], 0, rest)
            if v == w:  # a chain of equal variables: each comes before the next, and after the last
                self._before[v] += ends
                self._after[v] += ends
            else:
                first, second = ends if v < w else ends[::-1]
                self._after[min(v, w)].append(first)
                self._before[max(v, w)].append(second)

    def round(self) -> float:
        """One sweep forward and back, starting beyond the end of the last round. Returns the new bound, never lower
        than before."""
        before, is_beyond = self._bound, self._momentum.carry_on()
        self._bound = self._sweep()
        if is_beyond and self._bound < before - ROUNDING * abs(before):
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
        """Move costs from variables onto edges: at unknown states (NaN) the mean of the known ones; `most` at most per
        state. Unknown edges are skipped."""
        for (v, w, _), messages in zip(self.edges, self.messages, strict=True):
            if (v, w) in moved:
                of_v, of_w = (np.clip(fill_unknown(costs), -most, most) for costs in moved[v, w])
                self._is_swept = False
                np.subtract(self.unary[v], of_v, out=self.unary[v])
                np.subtract(self.unary[w], of_w, out=self.unary[w])
                np.subtract(messages[0], of_v, out=messages[0])
                np.subtract(messages[1], of_w, out=messages[1])

    def bound(self) -> float:
        """Lower bound on every assignment's value."""
        least = sum(MINIMUM(cost) for cost in self.unary)
        # After a sweep the residuals of all other edges have minimum 0.
        edges = [edge for edge, (v, w, _) in enumerate(self.edges) if v == w or not self._is_swept]
        return float(least + sum(MINIMUM(self._edge_residual(edge), None) for edge in edges))

    def _edge_residual(self, edge: int) -> FloatArray:
        """An edge's residual costs, in a shared scratch array."""
        to_v, to_w = self.messages[edge]
        room = self._room[: self.edges[edge][2].size].reshape(self.edges[edge][2].shape)
        residual: FloatArray = np.subtract(self.edges[edge][2], to_w, out=room)
        residual -= to_v[:, None]
        return residual

    def decode(self) -> IntArray:
        """States chosen in variable order, each the cheapest given the earlier ones. After a round each variable's
        costs include those of later variables."""
        states = np.zeros(len(self.unary), np.int64)
        totals = [cost.copy() for cost in self.unary]
        later: list[list[tuple[int, FloatArray, FloatArray]]] = [[] for _ in self.unary]
        for (v, w, matrix), (_, to_w) in zip(self.edges, self.messages, strict=True):
            later[v].append((w, matrix, to_w))
        for v, others in enumerate(later):
            states[v] = int(np.argmin(totals[v]))
            for w, matrix, to_w in others:
                totals[w] += matrix[states[v]] - to_w  # the message is in the costs of w already
        return states

    def min_marginals(self) -> list[FloatArray]:
        """Rise of the bound per variable and state, counting the variable and its edges."""
        raised = [cost - cost.min() for cost in self.unary]
        for edge, (v, w, _) in enumerate(self.edges):
            residual = self._edge_residual(edge)
            if self._is_swept and v != w:
                raised[max(v, w)] = raised[max(v, w)] + MINIMUM(residual, 0 if v < w else 1)
                continue
            of_v, of_w = MINIMUM(residual, 1), MINIMUM(residual, 0)
            least = MINIMUM(of_v)
            raised[v] = raised[v] + (of_v - least)
            raised[w] = raised[w] + (of_w - least)
        return raised

    def restrict(self, survivors: Sequence[IntArray]) -> MessagePassing:
        """The same with only the `survivors` among the states of each variable."""
        costs = [cost[states] for cost, states in zip(self.unary, survivors, strict=True)]
        edges = [(v, w, matrix[np.ix_(survivors[v], survivors[w])]) for v, w, matrix in self.edges]
        pairs = zip(self.edges, self.messages, strict=True)
        return MessagePassing(
            costs, edges, [(to_v[survivors[v]], to_w[survivors[w]]) for (v, w, _), (to_v, to_w) in pairs]
        )


class _Momentum:
    """Numbers updated once a round, with their values one round ago.

    parts: views of them.
    """

    def __init__(self, parts: Sequence[FloatArray]) -> None:
        self._now = np.concatenate([np.zeros(0), *parts])
        self.parts: list[FloatArray] = np.split(self._now, np.cumsum([len(part) for part in parts]))[:-1]
        self._last = self._now.copy()
        self._rounds = 0  # since the momentum started

    def carry_on(self) -> bool:
        """Extrapolate along the last round, further after each successful round. Returns whether the numbers moved."""
        now = self._now.copy()
        with np.errstate(invalid="ignore"):  # inf - inf
            step = now - self._last
        is_beyond = self._rounds > 1 and bool(np.isfinite(step).all())  # infinite costs have no direction
        if is_beyond:
            self._now += (self._rounds - 1) / (self._rounds + 2) * step  # Nesterov's weights
        self._last = now
        self._rounds += 1
        return is_beyond

    def start_anew(self) -> None:
        """Return to the end of the last round."""
        self._now[:] = self._last
        self._rounds = 1


def _visit(cost: FloatArray, sources: Sequence[_End], targets: Sequence[_End]) -> None:
    """Collect a variable's costs from the edges `sources` and distribute them over the edges `targets`, in place."""
    for matrix, messages, of_other, axis, residual in sources:
        np.subtract(matrix, of_other, out=residual)
        least = MINIMUM(residual, axis)
        cost += least - messages
        messages[:] = least
    if not targets:
        return
    # SRMP's weights: towards the side with fewer edges, a variable keeps a part for the way back.
    share = cost / max(len(sources), len(targets))
    for end in targets:
        np.subtract(end.messages, share, out=end.messages)
    cost[:] = cost - len(targets) * share if len(targets) < len(sources) else 0.0
