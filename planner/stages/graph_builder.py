"""Builds the stage graph of a step: its coarse parts, their costs on every kind of device group, and values between.

A loop over layers is unrolled here. Each row hands the loop-carried values on to the next, reads its row of the stacks,
and keeps its row of the forward loop's outputs, read by the backward loop.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from shardwright.planner.graph.dataflow import Leaf
from shardwright.planner.rewrites.stacked_loops import StackedLoop
from shardwright.planner.stages.clustering import Clustering
from shardwright.planner.stages.node_costs import StepCosts
from shardwright.planner.stages.stage_graph import ByKind, NodeCost, SharedState, StageGraph, StageNode, StageValue
from shardwright.planner.stages.weight_gradients import find_weight_gradients
from shardwright.planner.stages.workspace import workspaces


def build_stage_graph(
    coarse: Clustering,
    kinds: Sequence[StepCosts],
    accumulators: Sequence[Leaf],
    *,
    sums: Collection[Leaf] = (),
    ahead: Collection[Leaf] = (),
    margin: float = 0.0,
) -> StageGraph:
    """The graph of a step.

    kinds: the plan on each kind of device group, all with the same number of micro-batches.
    accumulators: entry values summed over micro-batches, then read.
    sums: values with one term per micro-batch, anywhere; a sum of terms of two parts is sent once a step.
    ahead: values computed once, ahead of the micro-batches, by each stage that reads them: kept, and never sent.
    margin: memory to reserve beyond the temporaries, relative to them.
    """
    builder = _Builder(coarse, tuple(kinds), frozenset(sums), frozenset(ahead), 1 + margin)
    builder.run()
    works = [_node_costs(coarse, measured, accumulators, builder, 1 + margin) for measured in kinds]
    nodes = tuple(
        StageNode(name=part.name, costs=tuple(kind[i] for kind in works)) for i, part in enumerate(coarse.parts)
    )
    return StageGraph(nodes=nodes, values=tuple(sorted(builder.values, key=_ends)), shared=builder.list_shared_state())


def _ends(value: StageValue) -> tuple[object, ...]:
    """A sort key of values independent of their order in the text."""
    return (value.producer, value.readers, value.saved_by, value.direction, value.bytes)


def _node_costs(
    coarse: Clustering,
    measured: StepCosts,
    accumulators: Sequence[Leaf],
    values: _Builder,
    scale: float,
) -> list[NodeCost]:
    count, flow = len(coarse.parts), coarse.flow
    forward, backward, weight, update, arrival, state, saved_bytes, delayed = ([0.0] * count for _ in range(8))
    later, saved = find_weight_gradients(coarse), values.saved
    for node in flow.nodes:
        members = coarse.members(node.index)
        for part in members:
            seconds = measured.step_s[node.index] / len(members)
            if node.index in coarse.once:
                update[part] += seconds
            else:
                ahead = node.index in coarse.forward or node.index in coarse.fed
                (forward if ahead else backward)[part] += seconds / measured.micro_batches
                weight[part] += seconds / measured.micro_batches if node.index in later.nodes else 0.0
    for number, node_index in enumerate(flow.parameters):
        members = coarse.members(node_index)
        for part in members:
            state[part] += measured.arguments_bytes[number] / len(members)
            arrival[part] += measured.arrivals_s[number] / len(members)
    # A loop holds its rows' terms of the sums all at once, in addition to the sums.
    terms = [(i, leaf) for i, stack in coarse.stacks.items() for leaf in stack.writes if (i, leaf) not in saved]
    for leaf in (*accumulators, *terms):
        members = coarse.members(leaf[0])
        for part in members:
            state[part] += measured.shard_bytes(leaf) / len(members)
    for leaf, parts in values.copies.items():
        for part in parts:
            state[part] += measured.shard_bytes(leaf) / len(parts)
    for leaf, parts in saved.items():
        for part in parts:
            saved_bytes[part] += measured.shard_bytes(leaf) / len(parts)
    for leaf in later.read:
        delayed[coarse.part(leaf[0])] += measured.shard_bytes(leaf)
    workspace = workspaces(coarse, measured, {*saved, *accumulators, *terms, *values.copies})
    elsewhere_s = measured.elsewhere_s / (sum(state) or 1.0)
    return [
        NodeCost(
            forward_s=forward[i],
            backward_s=backward[i],
            weight_s=weight[i],
            update_s=update[i] + elsewhere_s * state[i],
            arrival_s=arrival[i],
            state_bytes=state[i],
            saved_bytes=scale * saved_bytes[i],
            delayed_bytes=scale * delayed[i],
            workspace_bytes=scale * workspace[i],
        )
        for i in range(count)
    ]


@dataclass(frozen=True, slots=True)
class _Reading:
    """Parts reading a value; share: fraction of its bytes read by each."""

    parts: tuple[int, ...]
    is_ahead: bool
    share: float = 1.0


class _Sizes(NamedTuple):
    """Bytes of a value, and of its shard on each kind of group."""

    whole: float
    shards: ByKind


@dataclass(slots=True, eq=False)
class _Builder:
    """Values between parts.

    saved: forward values read only by their own parts' backward passes → these parts.
    copies: values computed ahead of the micro-batches → the parts that read them first.
    """

    clustering: Clustering
    kinds: tuple[StepCosts, ...]
    sums: frozenset[Leaf]
    ahead: frozenset[Leaf]
    scale: float
    values: list[StageValue] = field(default_factory=list)
    copies: dict[Leaf, tuple[int, ...]] = field(default_factory=dict)
    saved: dict[Leaf, tuple[int, ...]] = field(default_factory=dict)
    _readings: dict[Leaf, list[_Reading]] = field(default_factory=dict)

    def run(self) -> None:
        coarse, flow = self.clustering, self.clustering.flow
        arguments = set(flow.parameters)
        for node in flow.nodes:
            if coarse.first[node.index] >= 0 and node.index not in coarse.once and node.index not in arguments:
                self._reads(node.index)
        for node in flow.nodes:
            i = node.index
            if coarse.first[i] < 0 or i in coarse.once or i in arguments:
                continue
            stack = coarse.stacks.get(i)
            for leaf in range(len(node.shapes)):
                self._hand_on(i, leaf, stack)
            if stack is not None:
                self._thread(i, stack)

    def _sizes(self, leaf: Leaf) -> _Sizes:
        sizes = [measured.leaves.get(leaf, (0.0, 0.0)) for measured in self.kinds]
        return _Sizes(sizes[0][0], tuple(shard for _, shard in sizes))

    def _is_ahead(self, node: int) -> bool:
        return node in self.clustering.forward or node in self.clustering.fed

    def _reads(self, i: int) -> None:
        """Records the readers of each value, loops over layers row by row."""
        coarse = self.clustering
        node, stack, parts = coarse.flow.nodes[i], coarse.stacks.get(i), tuple(coarse.members(i))
        for use in node.uses:
            if stack is None:
                reading = _Reading((coarse.part(i),), self._is_ahead(i))
            elif use.position in stack.reads:
                reading = _Reading(parts, self._is_ahead(i), 1 / len(parts))
            elif use.position in stack.fixed:
                reading = _Reading(parts, self._is_ahead(i))
            elif use.position in stack.threaded:
                reading = _Reading(parts[-1:] if stack.is_descending else parts[:1], self._is_ahead(i))
            else:
                continue
            for source in self._sources(use.source, parts=reading.parts):
                self._readings.setdefault(source, []).append(reading)

    def _sources(self, leaf: Leaf, parts: tuple[int, ...]) -> Iterator[Leaf]:
        """The values needed by a reader of `leaf`; what every stage computes is replaced by its own sources."""
        todo, seen = [leaf], set()
        while todo:
            source = todo.pop()
            if source in seen:
                continue
            seen.add(source)
            if source in self.ahead:
                self.copies.setdefault(source, parts)
            if self.clustering.first[source[0]] >= 0 and source not in self.ahead:
                yield source
            else:
                todo += [use.source for use in self.clustering.flow.nodes[source[0]].uses]

    def _hand_on(self, i: int, leaf: int, stack: StackedLoop | None) -> None:
        readings = self._readings.get((i, leaf), ())
        sizes = self._sizes((i, leaf))
        parts = tuple(self.clustering.members(i))
        if not readings or not sizes.whole or (i, leaf) in self.sums or (i, leaf) in self.ahead:
            return
        if stack is None or leaf in stack.threaded or leaf == stack.counter:
            last = self.clustering.part(i) if stack is None or stack.is_descending else parts[-1]
            self._send((i, leaf), last, readings, sizes, 1.0, self._is_ahead(i))
            return
        if leaf not in stack.writes:
            return
        if all(reading.parts == parts for reading in readings):  # row by row, by the loop behind
            if self._is_ahead(i):
                self.saved[i, leaf] = parts
            return
        for row, part in enumerate(parts):
            own = [
                _Reading((reading.parts[row],) if reading.parts == parts else reading.parts, reading.is_ahead)
                for reading in readings
            ]
            self._send((i, leaf), part, own, sizes, 1 / len(parts), self._is_ahead(i))

    def _send(
        self,
        leaf: Leaf,
        producer: int,
        readings: Sequence[_Reading],
        sizes: _Sizes,
        share: float,
        is_ahead: bool,
    ) -> None:
        """Adds a value of one part with its readers. A value read row by row goes to each row separately."""
        split = [reading for reading in readings if reading.share < 1]
        for part in sorted({part for reading in split for part in reading.parts}):
            mine = [_Reading((part,), reading.is_ahead) for reading in split if part in reading.parts]
            self._send(leaf, producer, mine, sizes, share * split[0].share, is_ahead)
        whole = [reading for reading in readings if reading.share == 1]
        ahead = {part for reading in whole if reading.is_ahead for part in reading.parts} - {producer}
        behind = {part for reading in whole if not reading.is_ahead for part in reading.parts}
        if is_ahead and not ahead and behind <= {producer}:
            if behind and share == 1:
                self.saved[leaf] = (producer,)
            return
        readers = ahead if is_ahead else behind - {producer}
        if not readers and not (is_ahead and behind):
            return
        self.values.append(
            StageValue(
                bytes=sizes.whole * share,
                producer=producer,
                readers=tuple(sorted(readers)),
                saved_by=tuple(sorted(behind)) if is_ahead else (),
                shard_bytes=tuple(size * share * self.scale for size in sizes.shards),
                sent_bytes=tuple(size * share for size in sizes.shards),
                direction="forward" if is_ahead else "backward",
            )
        )

    def _thread(self, i: int, stack: StackedLoop) -> None:
        """Adds a loop's carried values, from trip to trip."""
        rows = list(self.clustering.members(i))
        trips = rows[::-1] if stack.is_descending else rows
        carried = [self._sizes((i, leaf)) for leaf in stack.threaded]
        whole = sum(sizes.whole for sizes in carried)
        shards = [sum(column) for column in zip(*(sizes.shards for sizes in carried), strict=True)] or [0.0]
        for row, following in pairwise(trips):
            self.values.append(
                StageValue(
                    bytes=whole,
                    producer=row,
                    readers=(following,),
                    shard_bytes=tuple(shard * self.scale for shard in shards),
                    sent_bytes=tuple(shards),
                    direction="backward" if stack.is_descending else "forward",
                )
            )

    def list_shared_state(self) -> tuple[SharedState, ...]:
        """State read by several parts in every micro-batch."""
        coarse, shared = self.clustering, []
        for number, i in enumerate(coarse.flow.parameters):
            if i not in coarse.state:
                continue
            whole = [reading for reading in self._readings.get((i, 0), ()) if reading.share == 1]
            readers = {part for reading in whole for part in reading.parts}
            owner = coarse.first[i]
            if readers - {owner}:
                own = tuple(2 * measured.arguments_bytes[number] for measured in self.kinds)
                size = float(coarse.flow.nodes[i].shapes[0].size_bytes)
                shared.append(
                    SharedState(bytes=size, owner=owner, readers=tuple(sorted(readers | {owner})), shard_bytes=own)
                )
        return tuple(shared)
