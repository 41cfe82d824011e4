"""Memory as a constraint of the search: what states of variables take where the program's memory peaks.

For a position of the schedule the bytes on one device are a sum over the values that are live there
(`cost.peak.liveness`), each by its own sharding: linear in the choice. So the constraint moves into the costs with a
price per byte (Lagrange relaxation: Everett, 1963): at a price p the search minimizes seconds + p × bytes, and
whatever it finds is the fastest plan of those that take no more bytes than it does. That the price makes dearer what
does not fit also bounds every plan that does: seconds ≥ minimum(seconds + p × bytes) - p × budget.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from shardwright.cost.peak.liveness import Liveness
from shardwright.cost.peak.memory import Held, shard_bytes
from shardwright.cost.peak.readers import Reader, bytes_turned
from shardwright.hlo import ArrayShape
from shardwright.planner.graph.dataflow import Dataflow, Leaf, Node, Use
from shardwright.planner.memory.carried import Reading, argument_of, readings
from shardwright.planner.plans.assemble import Decisions
from shardwright.shardings import Mesh, TensorSharding

#: What an instruction reads: its node, and the position among its operands.
Operand = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """What is live at one position: array leaves that are stored and how often, and copies that hubs make of others.

    Where a plan peaks, not how high: equal peaks of two plans are one constraint (`Memory.taken_at` counts the bytes).
    always: those of the leaves that are arguments or results. margin: part of all other bytes that a device must have
    beyond them. reduced: those of the leaves that count as they are reduced if they are partial sums, not as they are
    made: what bounds charges no plan more than it takes. read: leaves of which copies are live that single readers
    make, larger than what they are of, and what part of each counts. brought: operands that one instruction alone has
    brought to another layout, no larger. turned: operands of products of which there are copies in the order that their
    kernels take. carried: uses of arguments in loops that run there, one of each: gathered for it, it is stored besides
    (`planner/memory/carried.py`).
    """

    values: Mapping[Leaf, int]
    copies: frozenset[Leaf]
    always: frozenset[Leaf]
    margin: float
    reduced: frozenset[Leaf] = frozenset()
    read: Mapping[Leaf, float] = field(default_factory=dict)
    brought: frozenset[Operand] = frozenset()
    turned: frozenset[Operand] = frozenset()
    carried: frozenset[Reading] = frozenset()

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

    def times_turned(self, operand: Operand) -> float:
        """How often the bytes of an operand's turned copy count."""
        return 1.0 + self.margin if operand in self.turned else 0.0

    def times_brought(self, operand: Operand) -> float:
        """How often the bytes count of an operand that is brought to a layout of its own."""
        return 1.0 + self.margin if operand in self.brought else 0.0

    def times_carried(self, reading: Reading) -> float:
        """How often the bytes count of an argument that is gathered for a loop."""
        return 1.0 + self.margin if reading in self.carried else 0.0


class _Stored(NamedTuple):
    """What a buffer holds: the leaf that it is of, and the operand that it is turned for, if it is."""

    leaf: Leaf | None
    turned_for: Operand | None


@dataclass(slots=True, kw_only=True, eq=False)
class Memory:
    """What a program stores and when, whatever the mesh.

    margin: part of its temporaries that a device must have beyond them. hoists: what its compiler makes ahead of loops
    (`Compiler.hoists_loop_invariants`).
    """

    flow: Dataflow
    liveness: Liveness
    hubs: Sequence[Leaf]
    margin: float = 0.0
    hoists: str = "none"
    _always: frozenset[Leaf] = frozenset()
    _nodes: dict[str, tuple[Leaf, ...]] = field(default_factory=dict)
    _spans: dict[Leaf, tuple[int, int]] = field(default_factory=dict)
    _uses: dict[Leaf, list[tuple[Node, Use]]] = field(default_factory=dict)
    _carried: Mapping[str, Mapping[int, Sequence[Reading]]] = field(default_factory=dict)

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
        self._carried = readings(self.flow, self.hoists)

    def peak(self, decisions: Decisions) -> Peak:
        """Where a plan takes the most bytes, and what is live there; arguments and results are always live."""

        def size(stored: _Stored) -> int:
            if stored.turned_for is not None:
                return _turned(decisions, stored.turned_for)
            return self._made(stored.leaf, decisions) if stored.leaf is not None else 0

        def worst(found: Liveness) -> tuple[int, int, set[str], list[_Stored]]:
            values = zip(found.names, found.leaves.tolist(), found.readers, strict=True)
            stored = [_Stored(self._leaf(name, leaf), self._operand(reader)) for name, leaf, reader in values]
            live = found.live_bytes(np.array([size(each) for each in stored], np.int64))
            inside: dict[int, tuple[set[str], list[_Stored]]] = {}
            for position, bodies in found.bodies:
                body = max((worst(body) for body in bodies), key=lambda each: each[0], default=(0, 0, set[str](), []))
                live[position] += body[0]
                inside[position] = body[2:]
            if not len(live):
                return 0, 0, set(), []
            at = int(np.argmax(live))
            held = [stored[i] for i in found.live_at(at).tolist()]
            running, more = inside.get(at, (set(), []))
            return int(live[at]), at, {found.order[at], *running}, held + more

        _, at, running, held = worst(self.liveness)
        copies = frozenset(leaf for leaf, (first, last) in self._spans.items() if first <= at <= last)
        turned = frozenset(each.turned_for for each in held if each.turned_for is not None)
        values = {each.leaf for each in held if each.turned_for is None and each.leaf is not None}
        return Peak(
            values=Counter([*self._always, *values.difference(self._always)]),
            copies=copies,
            always=self._always,
            margin=self.margin,
            reduced=frozenset(leaf for leaf in values if self.flow.nodes[leaf[0]].instruction.name not in running),
            turned=turned,
            carried=frozenset(self._carried_by(running, decisions, copies)),
        )

    def _carried_by(self, running: Container[str], decisions: Decisions, copies: Container[Leaf]) -> Iterator[Reading]:
        """Of each argument that loops carry a use of its own segment: copies that hubs make may be the same ones."""
        graph = decisions.graph
        of = graph.layout.segments.of
        for loop, by_argument in self._carried.items():
            for argument, found in by_argument.items() if loop in running else ():
                mine = [each for each in found if of[each[0]] == of[argument] and not graph.is_free[each[0]]]
                if mine and (argument, 0) not in copies:
                    yield mine[0]

    def only_stored(self, peak: Peak, stored: Iterable[tuple[str, int]]) -> Peak:
        """A peak with those of its values only that a plan stores at some time, arguments and results.

        stored: the instruction and array leaf of each (`cost.peak.memory`).
        """
        kept = {leaf for name, number in stored if (leaf := self._leaf(name, number)) is not None} | self._always
        values = {leaf: times for leaf, times in peak.values.items() if leaf in kept}
        return replace(peak, values=values, reduced=peak.reduced & kept)

    def peak_of_buffers(self, held: Iterable[Held], decisions: Decisions) -> Peak:
        """Where `cost.peak.memory` says that a plan takes the most bytes: what is stored there because of how it lays
        that out, too. Another plan need not store it, so that this says what to change, and bounds nothing.

        held: what is live there besides arguments and results.
        """
        values, as_made, copied = list[Leaf](), set[Leaf](), Counter[Leaf]()
        turned, brought = set[Operand](), set[Operand]()
        for buffer in held:
            leaf, operand = self._leaf(buffer.name, buffer.leaf), self._operand(buffer.reader)
            if buffer.reader is not None and operand is not None:
                if buffer.reader.is_turned:
                    turned.add(operand)
                    continue
                if _brought(decisions, operand) == buffer.size_bytes:
                    brought.add(operand)
                    continue
            if leaf is None:
                continue
            if buffer.is_added and buffer.size_bytes > self._made(leaf, decisions):
                copied[leaf] += buffer.size_bytes
            else:
                values.append(leaf)
                if buffer.size_bytes > self._made(leaf, decisions):
                    as_made.add(leaf)
        return Peak(
            values=Counter([*self._always, *values]),
            copies=frozenset(copied.keys() & decisions.hubs.keys()),
            always=self._always,
            margin=self.margin,
            reduced=frozenset(values) - as_made,
            read={leaf: self._part_read(decisions, leaf, copied[leaf]) for leaf in sorted(copied)},
            brought=frozenset(brought),
            turned=frozenset(turned),
        )

    def _part_read(self, decisions: Decisions, leaf: Leaf, held: int) -> float:
        """What part of the copies that readers make of a value is live where copies of it take so many bytes.

        Several may share one, or make theirs one after the other. All of each where this plan's readers make none.
        """
        by_readers = self._read(decisions, leaf)
        by_hub = _copied(decisions, leaf)
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

    def taken_at(self, peak: Peak, decisions: Decisions) -> float:
        """Bytes that another plan takes of what is live at a peak, with the margin."""
        return (
            sum(peak.times_value(leaf) * self._taken(peak, leaf, decisions) for leaf in sorted(peak.values))
            + sum(peak.times_copy(leaf) * _copied(decisions, leaf) for leaf in sorted(peak.copies))
            + sum(peak.times_turned(operand) * _turned(decisions, operand) for operand in sorted(peak.turned))
            + sum(peak.times_read(leaf) * self._read(decisions, leaf) for leaf in sorted(peak.read))
            + sum(peak.times_brought(operand) * _brought(decisions, operand) for operand in sorted(peak.brought))
            + sum(peak.times_carried(reading) * _carried(decisions, reading) for reading in sorted(peak.carried))
        )

    def _taken(self, peak: Peak, leaf: Leaf, decisions: Decisions) -> int:
        """Bytes of a value at a peak."""
        if leaf in peak.reduced or decisions.graph.is_free[leaf[0]]:
            return self._made(leaf, decisions)
        shape, made = self.flow.nodes[leaf[0]].shapes[leaf[1]], decisions.strategies[leaf[0]].results[leaf[1]]
        return _bytes(shape, made, decisions.graph.prices.mesh)

    def _made(self, leaf: Leaf, decisions: Decisions) -> int:
        """Bytes of a value as a plan has it lie for its readers; of what is made anew, for the one that pays for it
        (`Layout.pays_for`): each has its own, and what all of them could share may be many times as large."""
        shape, lies = self.flow.nodes[leaf[0]].shapes[leaf[1]], decisions.result(leaf)
        payer = decisions.graph.layout.last_read.get(leaf)
        if payer is not None:
            lies = decisions.strategies[payer[0]].operands[payer[1]]
        return _bytes(shape, lies, decisions.graph.prices.mesh)

    def _operand(self, reader: Reader | None) -> Operand | None:
        """What a copy is made for, if it is for an instruction of arrays that chooses its strategy."""
        leaf = self._leaf(reader.name, 0) if reader is not None else None
        if reader is None or leaf is None:
            return None
        node = self.flow.nodes[leaf[0]]
        instruction = node.instruction
        if node.is_value or instruction.name != reader.name:  # it only hands on what another one makes
            return None
        is_of_arrays = all(len(operand.shape.leaves) == 1 for operand in instruction.operands)
        return (node.index, reader.operand) if is_of_arrays else None

    def _leaf(self, name: str, leaf: int) -> Leaf | None:
        leaves = self._nodes.get(name, ())
        return leaves[leaf] if leaf < len(leaves) else None


class SizeRange(NamedTuple):
    """A value that is made of so many bytes on one device: more than `over`, and no more than `up_to`."""

    leaf: Leaf
    over: float
    up_to: float


@dataclass(frozen=True, kw_only=True, eq=False)
class MemoryPrice:
    """Seconds per byte at each of some peaks, and so of everything that is live there.

    within: what plans must keep to, besides: all others are barred (`branching`).
    """

    peaks: tuple[tuple[Peak, float], ...]
    within: tuple[SizeRange, ...] = ()

    @classmethod
    def shared(cls, peaks: Sequence[Peak], price: float, within: tuple[SizeRange, ...] = ()) -> MemoryPrice:
        """A price that each of some peaks has an equal part of."""
        return cls(peaks=tuple((peak, price / len(peaks)) for peak in peaks), within=within)

    @property
    def total(self) -> float:
        """Seconds per byte of the budget."""
        return sum(price for _, price in self.peaks)

    def times(self, factor: float) -> MemoryPrice:
        """The same, dearer by a factor."""
        return replace(self, peaks=tuple((peak, factor * price) for peak, price in self.peaks))

    def of_value(self, leaf: Leaf) -> float:
        """Seconds per byte of a value's own storage."""
        return self.as_made.get(leaf, 0.0) + self.as_reduced.get(leaf, 0.0)

    def range_of(self, nodes: Iterable[int]) -> tuple[SizeRange, ...]:
        """What of values that some nodes make plans must keep to."""
        made_by = set(nodes) if self.within else set()
        return tuple(each for each in self.within if each.leaf[0] in made_by)

    @cached_property
    def as_made(self) -> Mapping[Leaf, float]:
        """Seconds per byte of values as they are made."""
        return self._of_values(lambda peak: peak.values.keys() - peak.reduced)

    @cached_property
    def as_reduced(self) -> Mapping[Leaf, float]:
        """Seconds per byte of values as they are reduced."""
        return self._of_values(lambda peak: peak.reduced)

    @cached_property
    def of_copy(self) -> Mapping[Leaf, float]:
        """Seconds per byte of copies that hubs make."""
        return self._added((leaf, price * peak.times_copy(leaf)) for peak, price in self.peaks for leaf in peak.copies)

    @cached_property
    def of_read(self) -> Mapping[Leaf, float]:
        """Seconds per byte of copies that readers make."""
        return self._added((leaf, price * peak.times_read(leaf)) for peak, price in self.peaks for leaf in peak.read)

    @cached_property
    def of_turned(self) -> Mapping[Operand, float]:
        """Seconds per byte of operands' turned copies."""
        return self._added((o, price * peak.times_turned(o)) for peak, price in self.peaks for o in peak.turned)

    @cached_property
    def of_brought(self) -> Mapping[Operand, float]:
        """Seconds per byte of operands that are brought to a layout of their own."""
        return self._added((o, price * peak.times_brought(o)) for peak, price in self.peaks for o in peak.brought)

    @cached_property
    def of_carried(self) -> Mapping[Reading, float]:
        """Seconds per byte of arguments that are gathered for loops."""
        return self._added((r, price * peak.times_carried(r)) for peak, price in self.peaks for r in peak.carried)

    def _of_values(self, those: Callable[[Peak], Iterable[Leaf]]) -> Mapping[Leaf, float]:
        return self._added((leaf, price * peak.times_value(leaf)) for peak, price in self.peaks for leaf in those(peak))

    @staticmethod
    def _added(found: Iterable[tuple[tuple[int, int], float]]) -> Mapping[tuple[int, int], float]:
        total: dict[tuple[int, int], float] = {}
        for key, seconds in found:
            total[key] = total.get(key, 0.0) + seconds
        return total


def _copied(decisions: Decisions, leaf: Leaf) -> int:
    shape, mesh = decisions.graph.flow.nodes[leaf[0]].shapes[leaf[1]], decisions.graph.prices.mesh
    hub = decisions.hubs.get(leaf)
    size = _bytes(shape, hub, mesh) if hub is not None else 0
    return size if size > _bytes(shape, decisions.result(leaf), mesh) else 0


def _turned(decisions: Decisions, operand: Operand) -> int:
    node, position = operand
    graph = decisions.graph
    used = decisions.strategies[node].operands
    return bytes_turned(graph.flow.nodes[node].instruction, position, used, graph.prices.mesh)


def _brought(decisions: Decisions, operand: Operand) -> int:
    node, position = operand
    graph = decisions.graph
    reader = graph.flow.nodes[node]
    use = reader.uses[position]
    source, used = graph.layout.source(reader, use), decisions.strategies[node].operands[position]
    if graph.is_free[use.source[0]]:
        return 0
    lies = decisions.hubs[source] if source[1] >= 0 else decisions.strategies[source[0]].results[use.source[1]]
    shape, mesh = graph.flow.nodes[use.source[0]].shapes[use.source[1]], graph.prices.mesh
    size = _bytes(shape, used, mesh)
    return size if lies != used and size <= _bytes(shape, lies, mesh) else 0


def _carried(decisions: Decisions, reading: Reading) -> int:
    node, number = reading
    graph = decisions.graph
    use, argument = graph.flow.nodes[node].uses[number], argument_of(graph.flow, reading)
    shape, mesh = graph.flow.nodes[argument].shapes[0], graph.prices.mesh
    size = _bytes(shape, decisions.strategies[node].operands[use.position], mesh)
    return size if size > _bytes(shape, decisions.strategies[argument].results[0], mesh) else 0


def _bytes(shape: ArrayShape, sharding: TensorSharding, mesh: Mesh) -> int:
    return shard_bytes(shape.element_type, shape.dimensions, sharding, mesh)
