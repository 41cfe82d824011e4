"""When gradients are ready for overlapped collectives, and how much of these a step hides.

A gradient is ready once all its ancestors are computed. A device computes gradient by gradient, in order of the
remaining work. One channel carries their collectives, first come, first served; its work left after the end of all
compute is exposed, all before is hidden. The optimizer (`optimizer_nodes`) waits for gradients, and hides none. A
combined collective is ready with the last of its members.

XLA runs a loop as one instruction, and ends a collective in the iteration that begins it. So each *frame* has its own
order: the entry, and every loop, with its iterations' total time. In the surrounding frame a loop is one item: its
nodes' time, less the time already hidden inside. No second hides two.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.planner.graph.dataflow import CONTROL_FLOW, Dataflow, Leaf, Node
from shardwright.planner.segments.overlap import optimizer_nodes

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

_ENTRY = 0


class CombinedCollective(NamedTuple):
    """Collectives that run combined, `seconds` a step.

    members: the values they move, each with its reader's computation.
    """

    members: tuple[tuple[Leaf, str], ...]
    seconds: float


class _Job(NamedTuple):
    """A collective in its frame: the items that make its members."""

    items: frozenset[int]
    seconds: float


@dataclass(frozen=True, slots=True)
class _Dependencies:
    """The items of a frame computed before each of its gradients, common ones left out.

    items: of the frame, the columns.
    predecessors: item of a gradient → a bit per column, packed.
    """

    items: tuple[int, ...]
    predecessors: dict[int, NDArray[np.uint8]]

    def predecessor_rows(self, jobs: Sequence[_Job]) -> list[BoolArray]:
        """Per job, the columns before it."""
        rows = []
        for job in jobs:
            packed = np.bitwise_or.reduce([self.predecessors[item] for item in sorted(job.items)])
            rows.append(np.unpackbits(packed, count=len(self.items)).astype(bool))
        return rows


class Readiness:
    """The dependencies of each gradient of a program. Items are the nodes, followed by the frames.

    hiding_nodes: nodes whose compute may overlap a gradient's collectives, in any plan.
    """

    def __init__(self, flow: Dataflow, beside: frozenset[Leaf]) -> None:
        self._nodes = flow.nodes
        self._frame_of, self._parents = _frames(flow)
        self._frames = [self._frame_of[node.computation] for node in flow.nodes]
        self._is_late = optimizer_nodes(flow)
        makers: defaultdict[int, set[int]] = defaultdict(set)
        for node in flow.nodes:
            if any((node.index, leaf) in beside for leaf in range(len(node.shapes))) and not node.is_value:
                makers[self._frames[node.index]].add(node.index)
            for use in node.uses:
                if use.source in beside:
                    frame, item = self._frame_and_item(use.source, node.computation)
                    makers[frame].add(item)
        items = self._items()
        self._dependencies = {
            frame: _find_dependencies(items[frame], sources, makers[frame], self._is_computed(items))
            for frame, sources in self._sources(flow).items()
            if makers[frame]
        }
        self.hiding_nodes = frozenset(
            node
            for waits in self._dependencies.values()
            for item in waits.items
            for node in self._nodes_inside(item, items)
        )

    def overlap_s(self, moves: Iterable[CombinedCollective], times: Iterable[tuple[Node, float]]) -> float:
        """Seconds a step of communication overlapped with compute.

        moves: overlappable collectives, in program order.
        times: seconds a step of every node.
        """
        jobs = self._jobs_by_frame(moves)
        compute_s = np.zeros(
            len(self._nodes) + len(self._parents)
        )  # seconds of each item not yet used to hide communication
        for node, seconds in times:
            if not self._is_late[node.index]:
                compute_s[node.index] += seconds
        own = np.bincount(self._frames, compute_s[: len(self._nodes)], len(self._parents))
        hidden_s = 0.0
        for frame in reversed(range(len(self._parents))):  # inner ones first
            frame_hidden_s = (
                _frame_overlap_s(self._dependencies[frame], jobs[frame], compute_s) if frame in jobs else 0.0
            )
            hidden_s += frame_hidden_s
            remaining_s = own[frame] - frame_hidden_s
            compute_s[len(self._nodes) + frame] = remaining_s
            if frame != _ENTRY:
                own[self._parents[frame]] += remaining_s
        return hidden_s

    def _jobs_by_frame(self, moves: Iterable[CombinedCollective]) -> dict[int, list[_Job]]:
        jobs: defaultdict[int, list[_Job]] = defaultdict(list)
        for move in moves:
            if move.seconds > 0:
                places = [self._frame_and_item(leaf, reader) for leaf, reader in move.members]
                frame = min(frame for frame, _ in places)
                jobs[frame].append(_Job(frozenset(item for at, item in places if at == frame), move.seconds))
        return jobs

    # ---- frames and items ----------------------------------------------------
    def _frame_and_item(self, leaf: Leaf, reader: str) -> tuple[int, int]:
        """The frame of a value's collective for a reader in a computation, and the item there that makes the value."""
        return self._common_frame(leaf[0], self._frame_of[reader])[:2]

    def _common_frame(self, node: int, other: int) -> tuple[int, int, int]:
        """The innermost frame around a node and another frame, and their items there."""
        frame, item, count = self._frames[node], node, len(self._nodes)
        there = -1
        while frame != other:  # inner frames have higher numbers
            if frame > other:
                frame, item = self._parents[frame], count + frame
            else:
                other, there = self._parents[other], count + other
        return frame, item, there

    def _items(self) -> list[list[int]]:
        """Per frame its items."""
        items: list[list[int]] = [[] for _ in self._parents]
        for node, frame in enumerate(self._frames):
            items[frame].append(node)
        for frame, parent in enumerate(self._parents):
            if frame != _ENTRY:
                items[parent].append(len(self._nodes) + frame)
        return items

    def _nodes_inside(self, item: int, items: Sequence[Sequence[int]]) -> Iterator[int]:
        """The nodes of an item computed before the optimizer."""
        if item < len(self._nodes):
            yield item
        else:
            for inner in items[item - len(self._nodes)]:
                if inner >= len(self._nodes) or not self._is_late[inner]:
                    yield from self._nodes_inside(inner, items)

    def _is_computed(self, items: Sequence[Sequence[int]]) -> list[bool]:
        """Per item, whether any part of it is computed before the optimizer."""
        is_node_computed = [not late and node.weight > 0 for node, late in zip(self._nodes, self._is_late, strict=True)]
        return is_node_computed + [
            any(True for _ in self._nodes_inside(len(is_node_computed) + f, items)) for f in range(len(self._parents))
        ]

    def _sources(self, flow: Dataflow) -> dict[int, dict[int, list[int]]]:
        """Per frame and item, the items it reads. Loop-carried values are available at the start of an iteration."""
        carried = {leaf[0] for loop, leaves in flow.leaves.items() if loop.opcode == "while" for leaf in leaves}
        arguments = frozenset(flow.parameters)
        sources: dict[int, dict[int, list[int]]] = {frame: {} for frame in range(len(self._parents))}
        for node in flow.nodes:
            if node.index in arguments:
                continue
            own = self._frames[node.index]
            for use in node.uses:
                frame, source, around = self._common_frame(use.source[0], own)
                reader = node.index if around < 0 else around
                if reader != source and not (reader == node.index and reader in carried):
                    sources[frame].setdefault(reader, []).append(source)
        return sources


def _frames(flow: Dataflow) -> tuple[dict[str, int], list[int]]:
    """The frame of each computation, and per frame the one around it, with a lower number. Called and conditional
    computations run in the frame of their first caller."""
    frame_of, parents = {flow.module.entry.name: _ENTRY}, [_ENTRY]
    for computation in flow.computations:  # callers first
        for instruction in computation.instructions:
            if instruction.opcode not in CONTROL_FLOW:
                continue
            frame = frame_of[computation.name]
            if instruction.opcode == "while":
                parents.append(frame)
                frame = len(parents) - 1
            for name in CONTROL_FLOW[instruction.opcode]:
                for callee in instruction.called.get(name, ()):
                    frame_of.setdefault(callee.name, frame)
    return frame_of, parents


def _find_dependencies(
    items: Sequence[int], sources: dict[int, list[int]], makers: set[int], is_computed: Sequence[bool]
) -> _Dependencies:
    """The items before each of `makers`, in a frame of `items` that read `sources`."""
    columns = [item for item in items if is_computed[item]]
    bit = {item: 1 << place for place, item in enumerate(columns)}  # sets as integers: a union is one operation
    readers = dict.fromkeys(items, 0)
    for inputs in sources.values():
        for source in inputs:
            readers[source] += 1
    before: dict[int, int] = {}
    for item in _topological_order(items, sources):
        bits = bit.get(item, 0)
        for source in sources.get(item, ()):
            bits |= before.get(source, 0)
            readers[source] -= 1
            if not readers[source] and source not in makers:
                before.pop(source, None)  # after its last reader
        before[item] = bits
    shared = (1 << len(columns)) - 1
    for maker in makers:
        shared &= before[maker]
    # What comes before all of the collectives can hide none of them.
    differs = ~_unpack_bits(shared, len(columns))
    return _Dependencies(
        tuple([item for item, is_kept in zip(columns, differs, strict=True) if is_kept]),
        {maker: np.packbits(_unpack_bits(before[maker], len(columns))[differs]) for maker in makers},
    )


def _unpack_bits(bits: int, count: int) -> BoolArray:
    packed = np.frombuffer(bits.to_bytes((count + 7) // 8, "little"), np.uint8)
    return np.unpackbits(packed, count=count, bitorder="little").astype(bool)


def _topological_order(items: Iterable[int], sources: dict[int, list[int]]) -> Iterator[int]:
    """Items, each after its sources."""
    # A stack of its own: chains of items are longer than Python recurses.
    seen: set[int] = set()
    for first in items:
        if first in seen:
            continue
        seen.add(first)
        stack = [(first, iter(sources.get(first, ())))]
        while stack:
            item, rest = stack[-1]
            following = next((source for source in rest if source not in seen), None)
            if following is None:
                stack.pop()
                yield item
            else:
                seen.add(following)
                stack.append((following, iter(sources.get(following, ()))))


def _frame_overlap_s(waits: _Dependencies, jobs: Sequence[_Job], item_s: FloatArray) -> float:
    """Seconds of overlap between the jobs of a frame and its items. item_s: seconds of each item."""
    seconds = item_s[list(waits.items)]
    rows = waits.predecessor_rows(jobs)
    ready = [float(seconds[row].sum()) for row in rows]
    done = np.zeros(len(seconds), bool)
    clock_s = channel_s = 0.0
    # One channel takes the collectives in the order in which they can start.
    for place in sorted(range(len(jobs)), key=ready.__getitem__):
        clock_s += float(seconds[rows[place] & ~done].sum())
        done |= rows[place]
        channel_s = max(clock_s, channel_s) + jobs[place].seconds
    moved_s = sum(job.seconds for job in jobs)
    return min(moved_s, max(0.0, moved_s - (channel_s - float(seconds.sum()))))
