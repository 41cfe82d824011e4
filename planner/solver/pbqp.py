"""Exact reductions of a choice problem with pairwise costs (PBQP).

Each variable takes one of its states. State i of v costs `costs[v][i]`; a pair of neighbours adds `edges[(v, w)][i,
j]`. The sum is minimized. An infinite entry forbids the choice. Three reductions are lossless (Scholz and Eckstein,
"Register allocation for irregular architectures", 2002):

- a variable with no neighbour takes its cheapest state (R0);
- one with one neighbour is folded into that neighbour's costs (R1);
- one with two neighbours becomes an edge between them (R2).

A fourth drops dominated states: i goes when some j costs no more under every choice of the neighbours (Goldstein's
dead-end elimination, 1994). `ilp` solves the remaining core; `Reduction.complete` restores the folded variables.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from shardwright.planner.solver.tuning import JOIN_BLOCK

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

#: `min` of an array along an axis; the method of the same name takes a third longer on small ones.
MINIMUM = np.minimum.reduce


@dataclass(slots=True, kw_only=True)
class Problem:
    """Variables 0…n-1 with their states' costs, and edge costs by (smaller, larger) variable."""

    costs: list[FloatArray] = field(default_factory=list)
    edges: dict[tuple[int, int], FloatArray] = field(default_factory=dict)

    def add_edge(self, v: int, w: int, matrix: FloatArray) -> None:
        """Add pair costs: rows are states of `v`, columns of `w`; v == w adds the diagonal to its own costs."""
        if v == w:
            self.costs[v] = self.costs[v] + np.diagonal(matrix)
            return
        if v > w:
            v, w, matrix = w, v, matrix.T
        previous = self.edges.get((v, w))
        self.edges[v, w] = matrix if previous is None else previous + matrix

    def restrict(self, survivors: Sequence[IntArray]) -> Problem:
        """The same problem with only the `survivors` among the states of each variable."""
        return Problem(
            costs=[cost[states] for cost, states in zip(self.costs, survivors, strict=True)],
            edges={(v, w): submatrix(matrix, survivors[v], survivors[w]) for (v, w), matrix in self.edges.items()},
        )

    def value(self, states: IntArray) -> float:
        """Cost of an assignment (one state per variable)."""
        own = sum(float(cost[i]) for cost, i in zip(self.costs, states, strict=True))
        return own + sum(float(matrix[states[v], states[w]]) for (v, w), matrix in self.edges.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fold:
    """A folded variable: its states' costs and the edges to its neighbours, its own states in the rows.

    Rows and columns follow the states remaining at that time: `states` and `neighbour_states` give their original
    numbers.
    """

    variable: int
    states: IntArray
    cost: FloatArray
    neighbours: tuple[int, ...]
    neighbour_states: tuple[IntArray, ...]
    edges: tuple[FloatArray, ...]

    def best(self, assignment: IntArray) -> int:
        """Original number of its best state, given the neighbours' states. Computed once: a table over all their states
        would cost a second folding."""
        if len(self.states) == 1:
            return int(self.states[0])
        total = self.cost
        # Summed in the order of the fold, or rounding could pick another state than the one counted there.
        for w, states, matrix in zip(self.neighbours[::-1], self.neighbour_states[::-1], self.edges[::-1], strict=True):
            total = matrix[:, states.searchsorted(assignment[w])] + total
        return int(self.states[total.argmin()])


@dataclass(slots=True, kw_only=True)
class Reduction:
    """A problem's core and the way back.

    core: the reduced problem.
    variables: original number of each core variable.
    states: original numbers of each core variable's remaining states.
    constant: cost already decided; core value + constant is the original value.
    folds: the folded variables, in order.
    """

    core: Problem
    variables: list[int]
    states: list[IntArray]
    constant: float
    folds: list[_Fold]

    def complete(self, core_states: IntArray) -> IntArray:
        """Optimal states of the original variables, given the core's states `core_states`."""
        chosen = np.zeros(len(self.variables) + len(self.folds), np.int64)
        for variable, states, i in zip(self.variables, self.states, core_states, strict=True):
            chosen[variable] = states[i]
        for fold in reversed(self.folds):  # its neighbours were folded later: they are decided by now
            chosen[fold.variable] = fold.best(chosen)
        return chosen


class EdgeJoinCache:
    """Joined edges by a digest of the pair of edges behind them: equal layers share the result."""

    def __init__(self) -> None:
        self._joined: dict[bytes, FloatArray] = {}

    def of(self, left: FloatArray, cost: FloatArray, right: FloatArray) -> FloatArray:
        """[a, b] ↦ the minimum of `left[i, a] + cost[i] + right[i, b]` over a variable's states i."""
        # A digest: the arrays as keys would stay alive as long as the cache.
        digest = blake2b(repr((left.shape, right.shape)).encode(), digest_size=16)
        for array in (left, cost, right):
            digest.update(np.ascontiguousarray(array).data)
        key = digest.digest()
        joined = self._joined.get(key)
        if joined is None:
            joined = self._joined[key] = _join(left, cost[:, None] + right)
        return joined


def reduce(
    problem: Problem, protected: Iterable[int] = (), *, drops_dear: bool = True, joins: EdgeJoinCache | None = None
) -> Reduction:
    """Fold away all variables without loss. Raises ValueError when no assignment is finite.

    protected: variables with further costs elsewhere: they stay, with every possible state.
    drops_dear: whether dominated states are dropped. With hundreds of states a variable this takes most of the time;
        when only a bound is wanted it saves little later.
    joins: cache shared with similar problems; new joins are added.
    """
    with np.errstate(invalid="ignore"):  # inf - inf
        return _Reducer(problem, frozenset(protected), drops_dear, EdgeJoinCache() if joins is None else joins).run()


class _Reducer:
    """Works on copies: `near[v][w]` is the edge with v's states in the rows, stored in both directions."""

    def __init__(self, problem: Problem, protected: frozenset[int], drops_dear: bool, joins: EdgeJoinCache) -> None:
        self.protected = protected
        self.drops_dear = drops_dear
        self.costs = [cost.copy() for cost in problem.costs]
        self.kept: list[IntArray] = [np.arange(len(cost)) for cost in problem.costs]
        self.near: list[dict[int, FloatArray]] = [{} for _ in problem.costs]
        for (v, w), matrix in problem.edges.items():
            if matrix.any():  # an edge of zeros joins nothing
                self.near[v][w], self.near[w][v] = matrix, matrix.T
        self.folds: list[_Fold] = []
        self.alive = [True] * len(self.costs)
        self.constant = 0.0
        self._differences: dict[tuple[tuple[int, ...], bytes], FloatArray] = {}
        self._joined = joins

    def run(self) -> Reduction:
        everything = list(range(len(self.costs)))
        dirty = set(everything)
        self._fold_all(everything)
        while dirty:
            changed: set[int] = set()
            for v in sorted(dirty):
                if self.alive[v] and self._drop_states(v):
                    changed |= {v, *self.near[v]}
            self._fold_all(sorted(changed))
            dirty = {v for v in changed if self.alive[v]}
        return self._finish()

    # ---- R0, R1, R2 ---------------------------------------------------------
    def _fold_all(self, candidates: list[int]) -> None:
        heap = [(self._rank(v), v) for v in candidates if self.alive[v]]
        heapq.heapify(heap)
        while heap:
            rank, v = heapq.heappop(heap)
            if not self.alive[v] or v in self.protected or rank != self._rank(v):
                continue  # with another rank, v is in the heap a second time
            if len(self.near[v]) > 2 and len(self.costs[v]) > 1:
                continue
            touched = self._fold(v)
            for w in touched:
                heapq.heappush(heap, (self._rank(w), w))

    def _rank(self, v: int) -> tuple[int, int]:
        # A fold costs the product of the states involved: few first. A single state folds at any degree.
        return (0 if len(self.costs[v]) == 1 else len(self.near[v]), len(self.costs[v]))

    def _fold(self, v: int) -> list[int]:
        """Fold one variable with a single state or at most two neighbours; returns its former neighbours."""
        neighbours = sorted(self.near[v])
        cost = self.costs[v]
        self.alive[v] = False
        if len(cost) == 1:
            for w in neighbours:
                self.costs[w] = self.costs[w] + self.near[v][w][0]
            self._record(v, (), float(cost[0]))
        elif not neighbours:
            self._record(v, (), float(cost.min()))
        elif len(neighbours) == 1:
            (w,) = neighbours
            self.costs[w] = self.costs[w] + (cost[:, None] + self.near[v][w]).min(axis=0)
            self._record(v, (w,), 0.0)
        else:
            self._fold_pair(v, *neighbours)
            self._record(v, tuple(neighbours), 0.0)
        for w in neighbours:
            del self.near[w][v]
        self.near[v] = {}
        return neighbours

    def _fold_pair(self, v: int, a: int, b: int) -> None:
        folded = self._joined.of(self.near[v][a], self.costs[v], self.near[v][b])
        previous = self.near[a].get(b)
        matrix = folded if previous is None else previous + folded
        self.near[a][b], self.near[b][a] = matrix, matrix.T

    def _record(self, v: int, neighbours: tuple[int, ...], constant: float) -> None:
        if not isfinite(constant):
            raise ValueError("no assignment is finite")
        self.constant += constant
        self.folds.append(
            _Fold(
                variable=v,
                states=self.kept[v],
                cost=self.costs[v],
                neighbours=neighbours,
                neighbour_states=tuple(self.kept[w] for w in neighbours),
                edges=tuple(self.near[v][w] for w in neighbours),
            )
        )

    # ---- dead ends ----------------------------------------------------------
    def _drop_states(self, v: int) -> bool:
        """Drop impossible and dominated states; returns whether any were dropped."""
        before = len(self.costs[v])
        possible = np.isfinite(self.costs[v])
        for matrix in self.near[v].values():
            possible &= np.isfinite(matrix).any(axis=1)
        if not possible.any():
            raise ValueError("no assignment is finite")
        if not possible.all():
            self._restrict(v, np.flatnonzero(possible))
        if v in self.protected or not self.drops_dear:
            return len(self.costs[v]) < before
        cost = self.costs[v]
        slack = np.subtract.outer(cost, cost)  # [i, j]: least extra cost of i over j
        for matrix in self.near[v].values():
            slack += self._least_difference(matrix)
        dominated = slack >= 0
        if np.count_nonzero(dominated) > len(cost):  # each state dominates itself
            dominated &= ~dominated.T | _earlier(len(cost))  # of two equal states the first stays
            self._restrict(v, np.flatnonzero(~dominated.any(axis=1)))
        return len(self.costs[v]) < before

    def _least_difference(self, matrix: FloatArray) -> FloatArray:
        """Cached `_least_difference`: equal layers have equal matrices."""
        key = (matrix.shape, matrix.tobytes())
        difference = self._differences.get(key)
        if difference is None:
            difference = self._differences[key] = _least_difference(matrix)
        return difference

    def _restrict(self, v: int, keep: IntArray) -> None:
        self.costs[v] = self.costs[v][keep]
        self.kept[v] = self.kept[v][keep]
        for w, matrix in self.near[v].items():
            smaller = matrix[keep]
            self.near[v][w], self.near[w][v] = smaller, smaller.T

    # ---- the core -----------------------------------------------------------
    def _finish(self) -> Reduction:
        variables = [v for v, alive in enumerate(self.alive) if alive]
        position = {v: k for k, v in enumerate(variables)}
        core = Problem(costs=[self.costs[v] for v in variables])
        for v in variables:
            for w, matrix in self.near[v].items():
                if v < w:
                    core.edges[position[v], position[w]] = matrix
        return Reduction(
            core=core,
            variables=variables,
            states=[self.kept[v] for v in variables],
            constant=self.constant,
            folds=self.folds,
        )


@lru_cache(maxsize=256)
def _earlier(size: int) -> BoolArray:
    """[i, j] ↦ whether state j comes before i."""
    return np.tri(size, k=-1, dtype=bool)


def submatrix(matrix: FloatArray, rows: IntArray, columns: IntArray) -> FloatArray:
    """Some rows and columns of a matrix, in order; the matrix itself (shared by many edges) when they are all of it."""
    return matrix if matrix.shape == (len(rows), len(columns)) else matrix[np.ix_(rows, columns)]


def _join(left: FloatArray, right: FloatArray) -> FloatArray:
    """[a, b] ↦ the minimum of `left[i, a] + right[i, b]`, in cache-sized blocks of rows."""
    rows, right = np.ascontiguousarray(left.T), np.ascontiguousarray(right)
    joined = np.empty((len(rows), right.shape[1]))
    room = np.empty((max(1, JOIN_BLOCK // max(right.size, 1)), *right.shape))
    for start in range(0, len(rows), len(room)):
        some = rows[start : start + len(room), :, None]
        sums = np.add(some, right, out=room[: len(some)])
        MINIMUM(sums, 1, out=joined[start : start + len(room)])
    return joined


def _least_difference(matrix: FloatArray) -> FloatArray:
    """[i, j] ↦ the minimum of `matrix[i, k] - matrix[j, k]` over all k possible with i or j."""
    different = {column.tobytes(): column for column in np.ascontiguousarray(matrix.T)}
    columns = np.array(list(different.values())).T
    difference = columns[:, None, :] - columns[None, :, :]
    if not np.isfinite(columns).all():
        difference[np.isnan(difference)] = np.inf  # inf - inf: k goes with neither, and decides nothing
    least: FloatArray = MINIMUM(difference, 2)
    return least
