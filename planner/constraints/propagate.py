"""Rule mode: what follows from the pins alone, with nothing searched.

Every node starts with all its strategies. A fact is "axis A splits dimension D of this array"; pins are the first ones.
A fact about an array is a request to the node that makes it and to those that read it: strategies that disagree are
dropped, unless none would be left, and what the remaining ones all have in common are new facts. So a split goes
forward and backward along the factors of the rules until nothing follows any more. Who comes first wins a conflict;
requests go first to nodes that only hand elements on (elementwise operations, values), as Shardy's propagation does
(https://openxla.org/shardy/propagation). Where nothing follows any more, a node that must be split, but may be in
several ways, is split in the simplest one, and more follows from that. What no fact reaches is not split.
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
from shardwright.shardings import Mesh

#: [strategies, columns]; a column is one axis on one dimension of one operand or result leaf.
_Table = NDArray[np.bool_]

#: (is a result, leaf position, dimension, axis number).
_Place = tuple[bool, int, int, int]


def propagate(flow: Dataflow, mesh: Mesh, sets: Sequence[StrategySet]) -> list[int]:
    """The number of the strategy that follows from the pins, per node.

    sets: what each node may do; that of a pinned node holds what its pins leave.
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
    """Which strategies of a set split what, and the places that the table's columns are.

    partial: [strategies, axes], where sums stay partial over the axis. size: splits and sums per strategy.
    hands_on: no strategy sums.
    """

    table: _Table
    column: dict[_Place, int]
    places: tuple[_Place, ...]
    partial: _Table
    size: NDArray[np.int64]
    hands_on: bool

    @classmethod
    def of(cls, found: StrategySet, mesh: Mesh) -> _Splits:
        axis = {each.name: number for number, each in enumerate(mesh.axes)}
        rows = [set(_places(strategy, axis)) for strategy in found.strategies]
        places = tuple(sorted(set().union(*rows)))
        table = np.array([[place in row for place in places] for row in rows], bool).reshape(len(rows), len(places))
        partial = np.array(
            [[each in (*strategy.partial, *strategy.gathered) for each in axis] for strategy in found.strategies], bool
        )
        unreduced = np.array([_count_partial(strategy) for strategy in found.strategies])
        return cls(
            table=table,
            column={place: number for number, place in enumerate(places)},
            places=places,
            partial=partial,
            size=table.sum(axis=1) + partial.sum(axis=1) + unreduced,
            hands_on=not partial.any(),
        )


def _count_partial(strategy: Strategy) -> int:
    """Axes over which operands or results are partial sums: none is carried on where nothing asks for it."""
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
        known: dict[int, _Splits] = {}
        for found in sets:
            if id(found) not in known:
                known[id(found)] = _Splits.of(found, mesh)
        self._splits = [known[id(found)] for found in sets]
        self._left = [np.ones(len(found), bool) for found in sets]
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
            splits, left = self._splits[index], self._left[index]
            column = splits.column.get(place)
            if column is None or place in self._settled[index]:
                continue
            agreeing = left & splits.table[:, column]
            whole = agreeing & ~splits.partial[:, place[3]]  # no sum is scattered where a factor can be split
            if agreeing.any():
                self._left[index] = whole if place[0] and whole.any() else agreeing
                self.settle(index)

    def settle(self, index: int) -> None:
        """Tell the neighbours what all strategies left to a node have in common."""
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
        """Choose for a node that must be split somewhere, and see what follows from that."""
        left = self._left[index]
        if left.sum() > 1 and self._splits[index].table[left].any(axis=1).all():
            self._left[index] = np.arange(len(left)) == self.choice(index)
            self.settle(index)
            self.run()

    def choice(self, index: int) -> int:
        """Of the strategies left, the one that splits least; the first of equals."""
        left = np.flatnonzero(self._left[index])
        return int(left[np.argmin(self._splits[index].size[left])])
