"""Memory as a constraint of the search: what states of variables take where the program's memory peaks.

For a position of the schedule the bytes on one device are a sum over the values that are live there (`cost.liveness`),
each by its own sharding: linear in the choice. So the constraint moves into the costs with a price per byte (Lagrange
relaxation: Everett, 1963): at a price p the search minimizes seconds + p × bytes, and whatever it finds is the
fastest plan of those that take no more bytes than it does. That the price makes dearer what does not fit
also bounds every plan that does: seconds ≥ minimum(seconds + p × bytes) - p × budget.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

import numpy as np

from shardwright.cost.liveness import Liveness
from shardwright.cost.memory import Held
from shardwright.hlo import ArrayShape
from shardwright.hlo.shapes import ELEMENT_BITS
from shardwright.planner.assemble import Decisions
from shardwright.planner.dataflow import Dataflow, Leaf, Node, Use
from shardwright.planner.graph import Graph
from shardwright.planner.prices import FloatArray, IntArray
from shardwright.plans import Mesh, TensorSharding
from shardwright.report.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """What is live at one position: array leaves that are stored and how often, and copies that hubs make of others.

    Where a plan peaks, not how high: equal peaks of two plans are one constraint (`Memory.taken_at` counts the bytes).
    always: those of the leaves that are arguments or results. margin: part of all other bytes that a device must have
    beyond them. read: leaves of which copies are live that single readers make, and what part of each counts.
    """

    values: Mapping[Leaf, int]
    copies: frozenset[Leaf]
    always: frozenset[Leaf]
    margin: float
    read: Mapping[Leaf, float] = field(default_factory=dict)

    def times_value(self, leaf: Leaf) -> float:
        """How often the bytes of a value count."""
        times = self.values.get(leaf, 0)
        return 1.0 + (times - 1) * (1.0 + self.margin) if leaf in self.always else times * (1.0 + self.margin)

    def times_copy(self, leaf: Leaf) -> float:
        """How often the bytes of a copy count that a hub makes."""
        return 1.0 + self.margin if leaf in self.copies else 0.0

    def times_read(self, leaf: Leaf) -> float:
        """How often the bytes of a copy count that a reader makes."""
        return self.read.get(leaf, 0.0) * (1.0 + self.margin)


@dataclass(slots=True, kw_only=True, eq=False)
class Memory:
    """What a program stores and when, whatever the mesh.

    margin: part of its temporaries that a device must have beyond them.
    """

    flow: Dataflow
    liveness: Liveness
    hubs: Sequence[Leaf]
    margin: float = 0.0
    _always: frozenset[Leaf] = frozenset()
    _nodes: dict[str, tuple[Leaf, ...]] = field(default_factory=dict)
    _spans: dict[Leaf, tuple[int, int]] = field(default_factory=dict)
    _uses: dict[Leaf, list[tuple[Node, Use]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._always = frozenset((node, 0) for node in (*self.flow.parameters, *self.flow.outputs))
        self._nodes = {instruction.name: leaves for instruction, leaves in self.flow.leaves.items()}
        position = {name: i for i, name in enumerate(self.liveness.order)}
        wanted = set(self.hubs)
        for node in self.flow.nodes:
            at = position.get(node.instruction.name)
            for use in node.uses:
                self._uses.setdefault(use.source, []).append((node, use))
                if at is not None and use.source in wanted and not node.is_value:
                    first, last = self._spans.get(use.source, (at, at))
                    self._spans[use.source] = min(first, at), max(last, at)

    def peak(self, decisions: Decisions) -> Peak:
        """Where a plan takes the most bytes, and what is live there; arguments and results are always live."""
        mesh = decisions.graph.prices.mesh

        def size(leaf: Leaf) -> int:
            return _bytes(self.flow.nodes[leaf[0]].shapes[leaf[1]], decisions.result(leaf), mesh)

        def worst(found: Liveness) -> tuple[int, int, list[Leaf]]:
            leaves = [self._leaf(name, leaf) for name, leaf in zip(found.names, found.leaves.tolist(), strict=True)]
            live = found.live_bytes(np.array([size(leaf) if leaf else 0 for leaf in leaves], np.int64))
            inside: dict[int, list[Leaf]] = {}
            for position, bodies in found.bodies:
                body = max((worst(body) for body in bodies), default=(0, 0, []))
                live[position] += body[0]
                inside[position] = body[2]
            at = int(np.argmax(live)) if len(live) else 0
            held = [leaf for i in found.live_at(at).tolist() if (leaf := leaves[i]) is not None]
            return int(live[at]) if len(live) else 0, at, held + inside.get(at, [])

        _, at, held = worst(self.liveness)
        copies = frozenset(leaf for leaf, (first, last) in self._spans.items() if first <= at <= last)
        return self._peak(set(held).difference(self._always), copies)

    def peak_of_buffers(self, held: Iterable[Held], decisions: Decisions) -> Peak:
        """Where `cost.memory` says that a plan takes the most bytes: what is stored there because of how the plan lays
        it out, too. Another plan need not store it, so that this says what to change, and bounds nothing.

        held: what is live there besides arguments and results.
        """
        mesh = decisions.graph.prices.mesh
        values, copied = list[Leaf](), Counter[Leaf]()
        for buffer in held:
            leaf = self._leaf(buffer.name, buffer.leaf)
            if leaf is None:
                continue
            made = _bytes(self.flow.nodes[leaf[0]].shapes[leaf[1]], decisions.result(leaf), mesh)
            if buffer.is_added and buffer.size_bytes > made:
                copied[leaf] += buffer.size_bytes
            else:
                values.append(leaf)
        copies = frozenset(copied.keys() & decisions.hubs.keys())
        return self._peak(
            values, copies, {leaf: self._part_read(decisions, leaf, copied[leaf]) for leaf in sorted(copied)}
        )

    def _part_read(self, decisions: Decisions, leaf: Leaf, held: int) -> float:
        """What part of the copies that readers make of a value is live where copies of it take so many bytes.

        Several may share one, or make theirs one after the other. All of each where this plan's readers make none.
        """
        by_readers = self._read(decisions, leaf)
        by_hub = _copied(decisions, leaf, decisions.graph.prices.mesh)
        return max(held - by_hub, 0) / by_readers if by_readers else 1.0

    def _read(self, decisions: Decisions, leaf: Leaf) -> int:
        """Bytes of the copies that readers make of a value."""
        graph, shape = decisions.graph, self.flow.nodes[leaf[0]].shapes[leaf[1]]
        mesh, total = graph.prices.mesh, 0
        for node, use in self._uses.get(leaf, ()):
            if graph.is_free[leaf[0]]:
                continue
            is_hub = graph.layout.source(node, use)[1] >= 0
            found = decisions.hubs[leaf] if is_hub else decisions.result(leaf)
            size = _bytes(shape, decisions.strategies[node.index].operands[use.position], mesh)
            total += size if size > _bytes(shape, found, mesh) else 0
        return total

    def _peak(self, held: Iterable[Leaf], copies: frozenset[Leaf], read: Mapping[Leaf, float] | None = None) -> Peak:
        values = Counter([*self._always, *held])
        return Peak(values=values, copies=copies, always=self._always, margin=self.margin, read=read or {})

    def taken_at(self, peak: Peak, decisions: Decisions) -> float:
        """Bytes that another plan takes of what is live at a peak, with the margin."""
        nodes, mesh = self.flow.nodes, decisions.graph.prices.mesh
        values = sum(
            peak.times_value((node, leaf)) * _bytes(nodes[node].shapes[leaf], decisions.result((node, leaf)), mesh)
            for node, leaf in sorted(peak.values)
        )
        copies = sum(peak.times_copy(leaf) * _copied(decisions, leaf, mesh) for leaf in sorted(peak.copies))
        return values + copies + sum(peak.times_read(leaf) * self._read(decisions, leaf) for leaf in sorted(peak.read))

    def _leaf(self, name: str, leaf: int) -> Leaf | None:
        leaves = self._nodes.get(name, ())
        return leaves[leaf] if leaf < len(leaves) else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryPrice:
    """Seconds per byte at each of some peaks."""

    peaks: tuple[tuple[Peak, float], ...]

    @classmethod
    def shared(cls, peaks: Sequence[Peak], price: float) -> MemoryPrice:
        """A price that each of some peaks has an equal part of."""
        return cls(peaks=tuple((peak, price / len(peaks)) for peak in peaks))

    @property
    def total(self) -> float:
        """Seconds per byte of the budget."""
        return sum(price for _, price in self.peaks)

    def times(self, factor: float) -> MemoryPrice:
        """The same, dearer by a factor."""
        return MemoryPrice(peaks=tuple((peak, factor * price) for peak, price in self.peaks))

    def of_value(self, leaf: Leaf) -> float:
        """Seconds per byte of a value's own storage."""
        return sum(price * peak.times_value(leaf) for peak, price in self.peaks)

    def of_copy(self, leaf: Leaf) -> float:
        """Seconds per byte of a copy that a hub makes."""
        return sum(price * peak.times_copy(leaf) for peak, price in self.peaks)

    def of_read(self, leaf: Leaf) -> float:
        """Seconds per byte of a copy that a reader makes."""
        return sum(price * peak.times_read(leaf) for peak, price in self.peaks)


def value_bytes(graph: Graph, leaf: Leaf) -> FloatArray:
    """Bytes that an array leaf takes as it is made, by the states of its node."""
    return _bytes_by_state(graph, leaf, graph.set_of((leaf[0], -1)).result_ids[:, leaf[1]])


def hub_bytes(graph: Graph, hub: Leaf) -> FloatArray:
    """Bytes that an array leaf takes as it lies for its readers, by the states of its hub."""
    return _bytes_by_state(graph, hub, graph.set_of(hub).result_ids[:, 0])


def anew_bytes(graph: Graph, node: int, use: Use) -> FloatArray:
    """Bytes of what is made anew for a node that reads it, by the node's states."""
    return _bytes_by_state(graph, use.source, graph.set_of((node, -1)).operand_ids[:, use.position])


def _bytes_by_state(graph: Graph, leaf: Leaf, lies: IntArray) -> FloatArray:
    """Bytes of an array leaf where it lies as each of some states has it."""
    shape, ids = graph.flow.nodes[leaf[0]].shapes[leaf[1]], lies.tolist()
    by_id = {i: _bytes(shape, graph.prices.shardings[i], graph.prices.mesh) for i in set(ids)}
    return np.array([by_id[i] for i in ids], np.float64)


def decided_bytes(graph: Graph, peak: Peak, node: int) -> FloatArray | None:
    """Bytes at a peak of what a node makes and of what is made anew for it, by its states, each as often as it counts;
    None where none of that is live there."""
    found: FloatArray | None = None
    reader = graph.flow.nodes[node]
    for leaf in range(len(reader.shapes)):
        if times := peak.times_value((node, leaf)):
            made = times * value_bytes(graph, (node, leaf))
            found = made if found is None else found + made
    for use in reader.uses:
        if graph.layout.pays_for(reader, use) and (times := peak.times_value(use.source)):
            anew = times * anew_bytes(graph, node, use)
            found = anew if found is None else found + anew
    return found


def read_bytes(graph: Graph, node: Node, use: Use) -> FloatArray:
    """Bytes of the copy that a node makes of what it reads: states of where it takes that from × of the node; 0 where
    it needs no more than is there."""
    is_hub = graph.layout.source(node, use)[1] >= 0
    found = hub_bytes(graph, use.source) if is_hub else value_bytes(graph, use.source)
    used = anew_bytes(graph, node.index, use)
    return np.where(used[None, :] > found[:, None], np.broadcast_to(used[None, :], (len(found), len(used))), 0.0)


def copy_bytes(graph: Graph, leaf: Leaf) -> FloatArray:
    """Bytes of the copy that a hub makes: states of the node × of the hub; 0 where it needs no more than is there."""
    made, lies = value_bytes(graph, leaf), hub_bytes(graph, leaf)
    return np.where(lies[None, :] > made[:, None], np.broadcast_to(lies[None, :], (len(made), len(lies))), 0.0)


def _copied(decisions: Decisions, leaf: Leaf, mesh: Mesh) -> int:
    shape = decisions.graph.flow.nodes[leaf[0]].shapes[leaf[1]]
    hub = decisions.hubs.get(leaf)
    size = _bytes(shape, hub, mesh) if hub is not None else 0
    return size if size > _bytes(shape, decisions.result(leaf), mesh) else 0


def _bytes(shape: ArrayShape, sharding: TensorSharding, mesh: Mesh) -> int:
    elements = 1
    for size in sharding.shard_shape(shape.dimensions, mesh):
        elements *= size
    return (elements * ELEMENT_BITS[shape.element_type] + 7) // 8


#: Source lines that a message names, at most.
_MOST_LINES = 3


def dominating(peak: Peak, decisions: Decisions) -> str:
    """`2.1 GiB of model.py:93, 1.0 GiB of model.py:97`: the source lines whose values take most at a peak."""
    flow, mesh = decisions.graph.flow, decisions.graph.prices.mesh
    taken: dict[str, int] = {}
    for node, leaf in peak.values:
        line = flow.module.source(flow.nodes[node].instruction)
        if line is not None and node not in flow.parameters:
            where = f"{PurePath(line.file).name}:{line.line}"
            size = _bytes(flow.nodes[node].shapes[leaf], decisions.result((node, leaf)), mesh)
            taken[where] = taken.get(where, 0) + size
    largest = sorted(taken.items(), key=lambda item: (-item[1], item[0]))[:_MOST_LINES]
    return ", ".join(f"{format_bytes(size)} of {where}" for where, size in largest if size)


def breakdown(parameters: Mapping[str, int], temporaries: int) -> str:
    """`parameters and state 1.2 GiB, activations and the rest 4.0 GiB`, the larger first."""
    parts = {**parameters, "activations, gradients and buffers": temporaries}
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    return ", ".join(f"{what} {format_bytes(size)}" for what, size in ordered if size)
