"""When gradients are ready to be moved beside compute, and how much of that a step hides.

A gradient is ready once all is computed that it depends on. What a device computes is put in an order: gradient by
gradient, that first which the least has to be computed for. One channel carries their collectives, first come, first
served; what it still has to do when there is nothing left to compute is waited for, and all before that is hidden. The
optimizer (`optimizer_nodes`) waits for gradients, and hides none. A collective that a compiler combines is ready when
the last of its members is.

XLA runs a loop as one instruction, and ends a collective in the pass that begins it. So there is such an order in each
*frame*: the entry, and every loop, whose passes take as long as all of them together. To the frame around it a loop is
one item, that takes what its nodes do, less what has been hidden behind these inside. No second hides two.
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
    """Collectives that run as one, `seconds` a step.

    members: values that they move, each with the computation of what reads it so.
    """

    members: tuple[tuple[Leaf, str], ...]
    seconds: float


class _Job(NamedTuple):
    """A collective in its frame: the items that make its members."""

    items: frozenset[int]
    seconds: float


@dataclass(frozen=True, slots=True)
class _Dependencies:
    """What has to be computed in a frame before each of its gradients, as far as it is not the same for all.

    columns: items of the frame. before: per item that makes a gradient, a bit for each column, packed.
    """

    items: tuple[int, ...]
    predecessors: dict[int, NDArray[np.uint8]]

    def predecessor_rows(self, jobs: Sequence[_Job]) -> list[BoolArray]:
        """Per job, which columns come before it."""
        found = []
        for job in jobs:
            packed = np.bitwise_or.reduce([self.predecessors[item] for item in sorted(job.items)])
            found.append(np.unpackbits(packed, count=len(self.items)).astype(bool))
        return found


class Readiness:
    """What each gradient of a program depends on.

    behind: nodes that a gradient's moves may run beside, in whatever plan. Items are the nodes, and behind them the
    frames.
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
        """Seconds a step that communication runs beside compute.

        moves: what of it could, in program order. times: seconds a step of every node.
        """
        jobs = self._jobs_by_frame(moves)
        left = np.zeros(len(self._nodes) + len(self._parents))  # seconds of each item that hide nothing yet
        for node, seconds in times:
            if not self._is_late[node.index]:
                left[node.index] += seconds
        own = np.bincount(self._frames, left[: len(self._nodes)], len(self._parents))
        hidden_s = 0.0
        for frame in reversed(range(len(self._parents))):  # inner ones first
            here_s = _frame_overlap_s(self._dependencies[frame], jobs[frame], left) if frame in jobs else 0.0
            hidden_s += here_s
            taken_s = own[frame] - here_s
            left[len(self._nodes) + frame] = taken_s
            if frame != _ENTRY:
                own[self._parents[frame]] += taken_s
        return hidden_s

    def _jobs_by_frame(self, moves: Iterable[CombinedCollective]) -> dict[int, list[_Job]]:
        found: defaultdict[int, list[_Job]] = defaultdict(list)
        for move in moves:
            if move.seconds > 0:
                places = [self._frame_and_item(leaf, reader) for leaf, reader in move.members]
                frame = min(frame for frame, _ in places)
                found[frame].append(_Job(frozenset(item for at, item in places if at == frame), move.seconds))
        return found

    # ---- frames and items ----------------------------------------------------
    def _frame_and_item(self, leaf: Leaf, reader: str) -> tuple[int, int]:
        """The frame in which a value is moved for what reads it in a computation, and the item there that makes it."""
        return self._common_frame(leaf[0], self._frame_of[reader])[:2]

    def _common_frame(self, node: int, other: int) -> tuple[int, int, int]:
        """The innermost frame around a node and another frame, and the items there that they are in."""
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
        found: list[list[int]] = [[] for _ in self._parents]
        for node, frame in enumerate(self._frames):
            found[frame].append(node)
        for frame, parent in enumerate(self._parents):
            if frame != _ENTRY:
                found[parent].append(len(self._nodes) + frame)
        return found

    def _nodes_inside(self, item: int, items: Sequence[Sequence[int]]) -> Iterator[int]:
        """The nodes of an item that are computed before the optimizer."""
        if item < len(self._nodes):
            yield item
        else:
            for each in items[item - len(self._nodes)]:
                if each >= len(self._nodes) or not self._is_late[each]:
                    yield from self._nodes_inside(each, items)

    def _is_computed(self, items: Sequence[Sequence[int]]) -> list[bool]:
        """Per item, whether something of it is computed before the optimizer."""
        found = [not late and node.weight > 0 for node, late in zip(self._nodes, self._is_late, strict=True)]
        return found + [any(True for _ in self._nodes_inside(len(found) + f, items)) for f in range(len(self._parents))]

    def _sources(self, flow: Dataflow) -> dict[int, dict[int, list[int]]]:
        """Per frame and item, the items that it reads. What a pass hands on to the next is there as that begins."""
        carried = {leaf[0] for loop, leaves in flow.leaves.items() if loop.opcode == "while" for leaf in leaves}
        given = frozenset(flow.parameters)
        found: dict[int, dict[int, list[int]]] = {frame: {} for frame in range(len(self._parents))}
        for node in flow.nodes:
            if node.index in given:
                continue
            own = self._frames[node.index]
            for use in node.uses:
                frame, source, around = self._common_frame(use.source[0], own)
                reader = node.index if around < 0 else around
                if reader != source and not (reader == node.index and reader in carried):
                    found[frame].setdefault(reader, []).append(source)
        return found


def _frames(flow: Dataflow) -> tuple[dict[str, int], list[int]]:
    """The frame of each computation, and per frame the one around it, which has a lower number. What is called, or
    chosen, runs in the frame of the first that calls it."""
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
    """What comes before each of `makers` in a frame of `items`, which read `sources`."""
    columns = [item for item in items if is_computed[item]]
    bit = {item: 1 << place for place, item in enumerate(columns)}
    readers = dict.fromkeys(items, 0)
    for found in sources.values():
        for source in found:
            readers[source] += 1
    before: dict[int, int] = {}
    for item in _topological_order(items, sources):
        bits = bit.get(item, 0)
        for source in sources.get(item, ()):
            bits |= before.get(source, 0)
            readers[source] -= 1
            if not readers[source] and source not in makers:
                before.pop(source, None)  # read for the last time
        before[item] = bits
    shared = (1 << len(columns)) - 1
    for maker in makers:
        shared &= before[maker]
    kept = ~_unpack_bits(shared, len(columns))
    return _Dependencies(
        tuple([item for item, is_kept in zip(columns, kept, strict=True) if is_kept]),
        {maker: np.packbits(_unpack_bits(before[maker], len(columns))[kept]) for maker in makers},
    )


def _unpack_bits(bits: int, count: int) -> BoolArray:
    packed = np.frombuffer(bits.to_bytes((count + 7) // 8, "little"), np.uint8)
    return np.unpackbits(packed, count=count, bitorder="little").astype(bool)


def _topological_order(items: Iterable[int], sources: dict[int, list[int]]) -> Iterator[int]:
    """Items, each behind what it reads."""
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


def _frame_overlap_s(waits: _Dependencies, jobs: Sequence[_Job], left: FloatArray) -> float:
    """Seconds that the jobs of a frame run beside its items, of which `left` are the seconds."""
    seconds = left[list(waits.items)]
    rows = waits.predecessor_rows(jobs)
    ready = [float(seconds[row].sum()) for row in rows]
    done = np.zeros(len(seconds), bool)
    clock_s = channel_s = 0.0
    for place in sorted(range(len(jobs)), key=ready.__getitem__):
        clock_s += float(seconds[rows[place] & ~done].sum())
        done |= rows[place]
        channel_s = max(clock_s, channel_s) + jobs[place].seconds
    moved_s = sum(job.seconds for job in jobs)
    return min(moved_s, max(0.0, moved_s - (channel_s - float(seconds.sum()))))
