"""Sharding propagation: the consequences of pins alone, without a search.

Every node starts with all its strategies. A fact is "axis A splits dimension D of this array"; pins are the first ones.
A fact about an array is a request to its producer and its consumers: disagreeing strategies are dropped, unless none
would be left; whatever all remaining ones share becomes a new fact. Splits propagate forward and backward along the
rules' factors up to a fixed point. The first request wins a conflict; requests go first to forwarding nodes
(elementwise operations, values), like Shardy's propagation (https://openxla.org/shardy/propagation). At the fixed
point, a node that must be split in one of several ways takes the simplest, and propagation continues. Arrays without a
fact are not split.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwright.planner.graph.dataflow import Dataflow, Node
from shardwright.planner.strategies.expansion import Strategy
from shardwright.planner.strategies.strategy_set import StrategySet
from shardwright.plans.shardings import Mesh

#: [strategies, columns]; a column is one axis on one dimension of one operand or result leaf.
_Table = NDArray[np.bool_]

#: (is a result, leaf position, dimension, axis number).
_Place = tuple[bool, int, int, int]


def propagate(flow: Dataflow, mesh: Mesh, sets: Sequence[StrategySet]) -> list[int]:
    """The number of the propagated strategy, per node.

    sets: each node's allowed strategies; a pinned node's satisfy its pins.
    """
    spread = _Propagation(flow, mesh, sets)
    for node in flow.nodes:
        spread.settle(node.index)
    spread.run()
    for node in flow.nodes:
        spread.decide(node.index)
    return [spread.choice(node.index) for node in flow.nodes]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Splits:
    """The splits of each strategy in a set, in a table.

    table: [strategies, columns]: whether a strategy splits a place.
    column: place → column.
    places: place of each column.
    partial: [strategies, axes]: whether sums stay partial over the axis.
    size: splits and sums per strategy.
    hands_on: no strategy sums.
    """

    table: _Table
    column: dict[_Place, int]
    places: tuple[_Place, ...]
    partial: _Table
    size: NDArray[np.int64]
    hands_on: bool

    @classmethod
    def of(cls, strategy_set: StrategySet, mesh: Mesh) -> _Splits:
        axis = {mesh_axis.name: number for number, mesh_axis in enumerate(mesh.axes)}
        rows = [set(_places(strategy, axis)) for strategy in strategy_set.strategies]
        places = tuple(sorted(set().union(*rows)))
        table = np.array([[place in row for place in places] for row in rows], bool).reshape(len(rows), len(places))
        partial = np.array(
            [
                [name in (*strategy.partial, *strategy.gathered) for name in axis]
                for strategy in strategy_set.strategies
            ],
            bool,
        )
        unreduced = np.array([_count_partial(strategy) for strategy in strategy_set.strategies])
        return cls(
            table=table,
            column={place: number for number, place in enumerate(places)},
            places=places,
            partial=partial,
            size=table.sum(axis=1) + partial.sum(axis=1) + unreduced,
            hands_on=not partial.any(),
        )


def _count_partial(strategy: Strategy) -> int:
    """Axes with partial operands or results: partial sums are not kept unless requested."""
    return sum(len(sharding.unreduced) for sharding in (*strategy.operands, *strategy.results))


def _places(strategy: Strategy, axis: dict[str, int]) -> Iterator[_Place]:
    for is_result, shardings in ((False, strategy.operands), (True, strategy.results)):
        for leaf, sharding in enumerate(shardings):
            for dim, axes in enumerate(sharding.dims):
                for name in axes:
                    yield is_result, leaf, dim, axis[name]


class _Propagation:
    def __init__(self, flow: Dataflow, mesh: Mesh, sets: Sequence[StrategySet]) -> None:
        self._nodes = flow.nodes
        splits_of: dict[int, _Splits] = {}
        for strategies in sets:
            if id(strategies) not in splits_of:
                splits_of[id(strategies)] = _Splits.of(strategies, mesh)
        self._splits = [splits_of[id(strategies)] for strategies in sets]
        self._left = [np.ones(len(strategies), bool) for strategies in sets]
        self._settled: list[set[_Place]] = [set() for _ in sets]
        self._readers: list[list[tuple[int, int, int]]] = [[] for _ in sets]  # (leaf, reader, its operand position)
        for node in flow.nodes:
            for use in node.uses:
                self._readers[use.source[0]].append((use.source[1], node.index, use.position))
        self._queue: list[tuple[int, int, int, _Place]] = []
        self._asked = 0

    def run(self) -> None:
        while self._queue:
            _, _, index, place = heapq.heappop(self._queue)
            splits, remaining = self._splits[index], self._left[index]
            column = splits.column.get(place)
            if column is None or place in self._settled[index]:
                continue
            agreeing = remaining & splits.table[:, column]
            whole = agreeing & ~splits.partial[:, place[3]]  # no sum is scattered where a factor can be split
            if agreeing.any():
                self._left[index] = whole if place[0] and whole.any() else agreeing
                self.settle(index)

    def settle(self, index: int) -> None:
        """Send the neighbours the common splits of a node's remaining strategies."""
        splits = self._splits[index]
        for column in np.flatnonzero(splits.table[self._left[index]].all(axis=0)):
            place = splits.places[column]
            if place not in self._settled[index]:
                self._settled[index].add(place)
                self._tell(self._nodes[index], place)

    def _tell(self, node: Node, place: _Place) -> None:
        is_result, leaf, dim, axis = place
        if is_result:
            for source_leaf, reader, position in self._readers[node.index]:
                if source_leaf == leaf:
                    self._ask(reader, (False, position, dim, axis))
            return
        for use in node.uses:
            if use.position == leaf:
                source, source_leaf = use.source
                self._ask(source, (True, source_leaf, dim, axis))

    def _ask(self, index: int, place: _Place) -> None:
        self._asked += 1
        heapq.heappush(self._queue, (0 if self._splits[index].hands_on else 1, self._asked, index, place))

    def decide(self, index: int) -> None:
        """Choose for a node that must be split somewhere, and propagate the consequences."""
        remaining = self._left[index]
        if remaining.sum() > 1 and self._splits[index].table[remaining].any(axis=1).all():
            self._left[index] = np.arange(len(remaining)) == self.choice(index)
            self.settle(index)
            self.run()

    def choice(self, index: int) -> int:
        """The remaining strategy with the fewest splits; the first of equals."""
        remaining = np.flatnonzero(self._left[index])
        return int(remaining[np.argmin(self._splits[index].size[remaining])])
