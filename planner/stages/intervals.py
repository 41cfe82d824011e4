"""Cuts along the nodes' own order by dynamic programming: each chunk is an interval of it.

If every node hands something to the next one, no other order exists, and the result is optimal; elsewhere it is a good
start. The table over (chunks, nodes so far) holds the least bytes crossing, among cuts with chunks within a time limit
and within memory.

Bytes received, kept and stored by a chunk depend on its own interval alone, given one chunk per stage. With several,
memory is checked afterwards, and a value between two chunks of one stage counts in the bytes sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from shardwright.planner.solver.pbqp import FloatArray
from shardwright.planner.stages.stage_graph import CutProblem, NodeCost, StageCut, of_kind, state_transfer_bytes

BoolArray = NDArray[np.bool_]


class Intervals:
    """Costs of every interval [i, j) of the nodes of a problem, in matrices over i and j; infinite at j <= i."""

    def __init__(self, problem: CutProblem) -> None:
        self._problem = problem
        self._size = len(problem.graph.nodes)
        self._crossing = self._crossing_bytes()
        kinds = sorted({place.kind for place in problem.stage_slots})
        self._seconds = {kind: self._sums(kind, lambda w: w.seconds(problem.micro_batches)) for kind in kinds}
        self._feasible = [self._fitting(stage) for stage in range(len(problem.stage_slots))]

    def fastest_s(self) -> float | None:
        """The least possible time of the slowest chunk; None: nothing fits."""
        table = self._table(self._chunk_s, np.maximum)
        value = table[-1][self._size]
        return float(value) if np.isfinite(value) else None

    def min_crossing(self, most_s: float) -> StageCut | None:
        """The cut that sends least among those with chunks of at most `most_s` seconds; None: there is none."""
        limit = most_s * (1 + 1e-9)

        def cost(chunk: int) -> FloatArray:
            return np.where(self._chunk_s(chunk) <= limit, self._crossing, np.inf)

        table = self._table(cost, np.add)
        if not np.isfinite(table[-1][self._size]):
            return None
        chunk_of = [0] * self._size
        end = self._size
        for chunk in range(self._problem.chunk_count - 1, -1, -1):
            before = table[chunk - 1] if chunk else self._start()
            begin = int(np.argmin(before + cost(chunk)[:, end]))
            chunk_of[begin:end] = [chunk] * (end - begin)
            end = begin
        cut = self._problem.to_cut(chunk_of, is_optimal=is_exact(self._problem))
        return cut if self._problem.fits(cut) else None

    def _start(self) -> FloatArray:
        return np.array([0.0] + [np.inf] * self._size)

    def _table(self, cost: Callable[[int], FloatArray], join: np.ufunc) -> list[FloatArray]:
        """Per chunk, the best value over its beginning, by its end."""
        best, rows = self._start(), []
        for chunk in range(self._problem.chunk_count):
            best = join(best[:, None], cost(chunk)).min(axis=0)
            rows.append(best)
        return rows

    def _chunk_s(self, chunk: int) -> FloatArray:
        place = self._problem.stage_slot(chunk)
        return np.where(self._feasible[chunk % len(self._problem.stage_slots)], self._seconds[place.kind], np.inf)

    # ---- matrices ------------------------------------------------------------
    def _sums(self, kind: int, amount: Callable[[NodeCost], float]) -> FloatArray:
        amounts = [amount(node.costs[kind]) for node in self._problem.graph.nodes]
        total = np.concatenate([[0.0], np.cumsum(amounts)])
        return np.where(self._is_interval(), total[None, :] - total[:, None], np.inf)

    def _is_interval(self) -> BoolArray:
        points = np.arange(self._size + 1)
        return np.asarray(points[None, :] > points[:, None])

    def _spanning(self, groups: Sequence[tuple[float, Sequence[int], int | None]]) -> FloatArray:
        """Per interval the sum of amounts with a member inside, without those produced inside."""
        points = np.arange(self._size + 1)
        total = np.zeros((self._size + 1, self._size + 1))
        for amount, members, maker in groups:
            if not amount or not members:
                continue
            ordered = np.array(sorted(members))
            first_at = np.searchsorted(ordered, points)  # the first member from i on
            next_member = np.concatenate([ordered, [self._size + 1]])[first_at]
            has_one = next_member[:, None] < points[None, :]
            if maker is not None:
                has_one &= ~((points[:, None] <= maker) & (maker < points[None, :]))
            total += amount * has_one
        return total

    def _crossing_bytes(self) -> FloatArray:
        graph, micro_batches = self._problem.graph, self._problem.micro_batches
        groups = [(v.bytes, (*v.readers, *v.saved_by), v.producer) for v in graph.values]
        groups += [(state_transfer_bytes(s, micro_batches), s.readers, s.owner) for s in graph.shared]
        return np.where(self._is_interval(), self._spanning(groups), np.inf)

    def _fitting(self, stage: int) -> BoolArray:
        """Whether an interval fits a device of the stage: its only chunk, or the one keeping least."""
        problem, place = self._problem, self._problem.stage_slots[stage]
        graph, kind = problem.graph, place.kind
        if not np.isfinite(place.memory_bytes):
            return self._is_interval()
        copies = self._spanning([(of_kind(s.shard_bytes, kind), s.readers, s.owner) for s in graph.shared])
        saved = self._sums(kind, lambda w: w.saved_bytes)
        saved = saved + self._spanning([(of_kind(v.shard_bytes, kind), v.saved_by, None) for v in graph.values])
        workspace = np.zeros_like(saved)
        for i in range(self._size):
            workspace[i, i + 1 :] = np.maximum.accumulate([n.costs[kind].workspace_bytes for n in graph.nodes[i:]])
        least_kept = max(min(moment) for moment in place.in_flight)
        state = self._sums(kind, lambda w: w.state_bytes + place.delayed * w.delayed_bytes)
        with np.errstate(invalid="ignore"):
            used = state + copies + least_kept * saved + workspace
        return np.asarray(self._is_interval() & (used <= place.memory_bytes))


def has_one_order(problem: CutProblem) -> bool:
    """Whether every node hands a value to the next, or receives a gradient from it: all cuts are intervals."""
    graph = problem.graph
    pairs = {(min(v.producer, r), max(v.producer, r)) for v in graph.values for r in v.readers}
    return all((i, i + 1) in pairs for i in range(len(graph.nodes) - 1))


def is_exact(problem: CutProblem) -> bool:
    """Whether the best intervals are optimal among all cuts.

    There is one order; with several chunks a stage, values only reach neighbouring nodes.
    """
    if not has_one_order(problem):
        return False
    graph = problem.graph
    ends = [(v.producer, r) for v in graph.values for r in (*v.readers, *v.saved_by)]
    return problem.chunks == 1 or (not graph.shared and all(abs(i - j) <= 1 for i, j in ends))
