"""Memory as a constraint of the search: bytes by the states of variables, at the program's memory peak.

At a position of the schedule, the bytes on one device are a sum over the live values (`cost.peak.liveness`), each by
its own sharding: linear in the choice. So the constraint moves into the costs with a multiplier per byte (Lagrangian
relaxation: Everett, 1963): the search minimizes seconds + p × bytes at a multiplier p. Its minimum is the fastest of
all plans with no more bytes, and a lower bound on every feasible plan: seconds ≥ minimum(seconds + p × bytes) - p ×
budget.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from shardwright.cost.peak.copy_readers import CopyReader, operand_copy_bytes
from shardwright.cost.peak.liveness import Liveness
from shardwright.cost.peak.memory import LiveBuffer, shard_bytes
from shardwright.hlo import ArrayShape
from shardwright.planner.graph.dataflow import Dataflow, Leaf, Node, Use
from shardwright.planner.memory.loop_gathers import LoopUse, argument_of_use, find_loop_uses
from shardwright.planner.plans.assemble import Decisions
from shardwright.plans.shardings import Mesh, TensorSharding

#: An operand of an instruction: its node, and the position among its operands.
Operand = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConstraint:
    """The buffers live at one position: stored array leaves with their counts, and copies.

    It says where a plan peaks, not how high: equal peaks of two plans are one constraint (`MemoryModel.bytes_at` counts
    the bytes).
    values: live leaves, with the number of buffers of each.
    layout_copies: leaves with a live copy in their shared layout.
    always_live: the leaves of arguments and results.
    margin: part of all other bytes, required in addition to them.
    reduced_values: leaves counted after the reduction of their partial sums, not before it: a bound charges no plan too
        much.
    reader_copies: leaves with live copies made by single readers, larger than the original; the fraction counted.
    resharded_operands: operands resharded for one instruction alone, to no more bytes.
    transposed_operands: operands of products, copied to the dimension order of their kernels.
    loop_gathers: uses of arguments in running loops, one per argument: gathered for the loop, it is stored twice
        (`planner/memory/loop_gathers.py`).
    """

    values: Mapping[Leaf, int]
    layout_copies: frozenset[Leaf]
    always_live: frozenset[Leaf]
    margin: float
    reduced_values: frozenset[Leaf] = frozenset()
    reader_copies: Mapping[Leaf, float] = field(default_factory=dict)
    resharded_operands: frozenset[Operand] = frozenset()
    transposed_operands: frozenset[Operand] = frozenset()
    loop_gathers: frozenset[LoopUse] = frozenset()

    def value_weight(self, leaf: Leaf) -> float:
        """Weight of a value's bytes."""
        times = self.values.get(leaf, 0)
        # The margin is for temporaries: an argument or a result counts once without it, its further copies with it.
        return 1.0 + (times - 1) * (1.0 + self.margin) if leaf in self.always_live else times * (1.0 + self.margin)

    def layout_copy_weight(self, leaf: Leaf) -> float:
        """Weight of the bytes of a copy in the shared layout."""
        return 1.0 + self.margin if leaf in self.layout_copies else 0.0

    def reader_copy_weight(self, leaf: Leaf) -> float:
        """Weight of the bytes of a reader's copy."""
        return self.reader_copies.get(leaf, 0.0) * (1.0 + self.margin)

    def transpose_weight(self, operand: Operand) -> float:
        """Weight of the bytes of an operand's transposed copy."""
        return 1.0 + self.margin if operand in self.transposed_operands else 0.0

    def reshard_weight(self, operand: Operand) -> float:
        """Weight of the bytes of an operand's resharded copy."""
        return 1.0 + self.margin if operand in self.resharded_operands else 0.0

    def loop_gather_weight(self, reading: LoopUse) -> float:
        """Weight of the bytes of an argument gathered for a loop."""
        return 1.0 + self.margin if reading in self.loop_gathers else 0.0


class _StoredBuffer(NamedTuple):
    """The content of a buffer: its leaf, and the operand it is transposed for, if any."""

    leaf: Leaf | None
    transposed_for: Operand | None


@dataclass(slots=True, kw_only=True, eq=False)
class MemoryModel:
    """The buffers of a program over its schedule, on any mesh.

    margin: part of its temporaries, required in addition to them.
    hoists: the compiler's hoisting out of loops (`Compiler.hoists_loop_invariants`).
    constants_bytes: of the program's constants, whole on every device.
    """

    flow: Dataflow
    liveness: Liveness
    shared_layouts: Sequence[Leaf]
    margin: float = 0.0
    hoists: str = "none"
    constants_bytes: int = 0
    _always_live: frozenset[Leaf] = frozenset()
    _nodes: dict[str, tuple[Leaf, ...]] = field(default_factory=dict)
    _spans: dict[Leaf, tuple[int, int]] = field(default_factory=dict)
    _uses: dict[Leaf, list[tuple[Node, Use]]] = field(default_factory=dict)
    _loop_uses: Mapping[str, Mapping[int, Sequence[LoopUse]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._always_live = frozenset((node, 0) for node in (*self.flow.parameters, *self.flow.outputs))
        self._nodes = {instruction.name: leaves for instruction, leaves in self.flow.leaves.items()}
        position = {name: i for i, name in enumerate(self.liveness.order)}
        wanted = set(self.shared_layouts)
        for node in self.flow.nodes:
            at = position.get(node.instruction.name)
            for use in node.uses:
                self._uses.setdefault(use.source, []).append((node, use))
                if at is not None and use.source in wanted and not node.is_value:
                    first, last = self._spans.get(use.source, (at, at))
                    self._spans[use.source] = min(first, at), max(last, at)
        self._loop_uses = find_loop_uses(self.flow, self.hoists)

    def constraint_at_peak(self, decisions: Decisions) -> MemoryConstraint:
        """A plan's peak, and the buffers live there. Arguments and results are always live."""

        def size(stored: _StoredBuffer) -> int:
            if stored.transposed_for is not None:
                return _transpose_bytes(decisions, stored.transposed_for)
            return self._result_bytes(stored.leaf, decisions) if stored.leaf is not None else 0

        def worst(liveness: Liveness) -> tuple[int, int, set[str], list[_StoredBuffer]]:
            values = zip(liveness.names, liveness.leaves.tolist(), liveness.readers, strict=True)
            stored = [
                _StoredBuffer(self._leaf_of(name, leaf), self._operand_of(reader)) for name, leaf, reader in values
            ]
            live = liveness.live_bytes(np.array([size(buffer) for buffer in stored], np.int64))
            inside: dict[int, tuple[set[str], list[_StoredBuffer]]] = {}
            for position, bodies in liveness.bodies:
                body = max((worst(body) for body in bodies), key=lambda peak: peak[0], default=(0, 0, set[str](), []))
                live[position] += body[0]  # on top of what lives around the loop or the branch
                inside[position] = body[2:]
            if not len(live):
                return 0, 0, set(), []
            at = int(np.argmax(live))
            held = [stored[i] for i in liveness.live_at(at).tolist()]
            running, more = inside.get(at, (set(), []))
            return int(live[at]), at, {liveness.order[at], *running}, held + more

        _, at, running, held = worst(self.liveness)
        copies = frozenset(leaf for leaf, (first, last) in self._spans.items() if first <= at <= last)
        turned = frozenset(buffer.transposed_for for buffer in held if buffer.transposed_for is not None)
        values = {buffer.leaf for buffer in held if buffer.transposed_for is None and buffer.leaf is not None}
        return MemoryConstraint(
            values=Counter([*self._always_live, *values.difference(self._always_live)]),
            layout_copies=copies,
            always_live=self._always_live,
            margin=self.margin,
            reduced_values=frozenset(
                leaf for leaf in values if self.flow.nodes[leaf[0]].instruction.name not in running
            ),
            transposed_operands=turned,
            loop_gathers=frozenset(self._loop_gathers_in(running, decisions, copies)),
        )

    def _loop_gathers_in(
        self, running: Container[str], decisions: Decisions, copies: Container[Leaf]
    ) -> Iterator[LoopUse]:
        """One use in its own segment per loop-carried argument. Copies in the shared layout are skipped: they may be
        the same buffers."""
        graph = decisions.graph
        of = graph.variables.segments.of
        for loop, by_argument in self._loop_uses.items():
            for argument, uses in by_argument.items() if loop in running else ():
                own_uses = [
                    use for use in uses if of[use[0]] == of[argument] and not graph.is_cheap_to_recompute[use[0]]
                ]
                if own_uses and (argument, 0) not in copies:
                    yield own_uses[0]

    def restrict_to_stored(self, peak: MemoryConstraint, stored: Iterable[tuple[str, int]]) -> MemoryConstraint:
        """A peak restricted to values stored by a plan at some time, plus arguments and results.

        stored: instruction and array leaf of each (`cost.peak.memory`).
        """
        held_leaves = {
            leaf for name, number in stored if (leaf := self._leaf_of(name, number)) is not None
        } | self._always_live
        values = {leaf: times for leaf, times in peak.values.items() if leaf in held_leaves}
        return replace(peak, values=values, reduced_values=peak.reduced_values & held_leaves)

    def constraint_of_buffers(self, buffers: Iterable[LiveBuffer], decisions: Decisions) -> MemoryConstraint:
        """A plan's peak by `cost.peak.memory`, with buffers due to its own shardings. Other plans need not store them:
        the constraint shows improvements, and bounds nothing.

        buffers: the live buffers, without arguments and results.
        """
        values, as_made, copied = list[Leaf](), set[Leaf](), Counter[Leaf]()
        turned, brought = set[Operand](), set[Operand]()
        for buffer in buffers:
            leaf, operand = self._leaf_of(buffer.name, buffer.leaf), self._operand_of(buffer.reader)
            if buffer.reader is not None and operand is not None:
                if buffer.reader.is_transposed:
                    turned.add(operand)
                    continue
                if _reshard_bytes(decisions, operand) == buffer.size_bytes:
                    brought.add(operand)
                    continue
            if leaf is None:
                continue
            if buffer.is_added and buffer.size_bytes > self._result_bytes(leaf, decisions):
                copied[leaf] += buffer.size_bytes
            else:
                values.append(leaf)
                if buffer.size_bytes > self._result_bytes(leaf, decisions):
                    as_made.add(leaf)
        return MemoryConstraint(
            values=Counter([*self._always_live, *values]),
            layout_copies=frozenset(copied.keys() & decisions.shared_layouts.keys()),
            always_live=self._always_live,
            margin=self.margin,
            reduced_values=frozenset(values) - as_made,
            reader_copies={leaf: self._reader_copy_share(decisions, leaf, copied[leaf]) for leaf in sorted(copied)},
            resharded_operands=frozenset(brought),
            transposed_operands=frozenset(turned),
        )

    def _reader_copy_share(self, decisions: Decisions, leaf: Leaf, copies_bytes: int) -> float:
        """The live fraction of a value's reader copies, given the live bytes of its copies.

        Readers may share a copy, or make theirs one after another. 1 when this plan's readers make none.
        """
        by_readers = self._reader_copy_bytes(decisions, leaf)
        by_hub = _layout_copy_bytes(decisions, leaf)
        return max(copies_bytes - by_hub, 0) / by_readers if by_readers else 1.0

    def _reader_copy_bytes(self, decisions: Decisions, leaf: Leaf) -> int:
        """Bytes of the copies of a value made by its readers."""
        graph, shape = decisions.graph, self.flow.nodes[leaf[0]].shapes[leaf[1]]
        mesh, total = graph.prices.mesh, 0
        for node, use in self._uses.get(leaf, ()):
            if graph.is_cheap_to_recompute[leaf[0]]:
                continue
            is_hub = graph.variables.source(node, use)[1] >= 0
            sharding = decisions.shared_layouts[leaf] if is_hub else decisions.result(leaf)
            size = _shard_bytes(shape, decisions.strategies[node.index].operands[use.position], mesh)
            total += size if size > _shard_bytes(shape, sharding, mesh) else 0
        return total

    def bytes_at(self, peak: MemoryConstraint, decisions: Decisions) -> float:
        """Bytes of a plan's buffers live at a peak and of constants, margin included."""
        # Sorted: a sum of floats depends on its order, and a plan must not depend on that of a set.
        return (
            self.constants_bytes
            + sum(peak.value_weight(leaf) * self._value_bytes(peak, leaf, decisions) for leaf in sorted(peak.values))
            + sum(
                peak.layout_copy_weight(leaf) * _layout_copy_bytes(decisions, leaf)
                for leaf in sorted(peak.layout_copies)
            )
            + sum(
                peak.transpose_weight(operand) * _transpose_bytes(decisions, operand)
                for operand in sorted(peak.transposed_operands)
            )
            + sum(
                peak.reader_copy_weight(leaf) * self._reader_copy_bytes(decisions, leaf)
                for leaf in sorted(peak.reader_copies)
            )
            + sum(
                peak.reshard_weight(operand) * _reshard_bytes(decisions, operand)
                for operand in sorted(peak.resharded_operands)
            )
            + sum(
                peak.loop_gather_weight(reading) * _loop_gather_bytes(decisions, reading)
                for reading in sorted(peak.loop_gathers)
            )
        )

    def _value_bytes(self, peak: MemoryConstraint, leaf: Leaf, decisions: Decisions) -> int:
        """Bytes of a value at a peak."""
        if leaf in peak.reduced_values or decisions.graph.is_cheap_to_recompute[leaf[0]]:
            return self._result_bytes(leaf, decisions)
        shape, sharding = self.flow.nodes[leaf[0]].shapes[leaf[1]], decisions.strategies[leaf[0]].results[leaf[1]]
        return _shard_bytes(shape, sharding, decisions.graph.prices.mesh)

    def _result_bytes(self, leaf: Leaf, decisions: Decisions) -> int:
        """Bytes of a value in its layout for readers. A cheap value counts by its paying reader's layout
        (`ProgramVariables.pays_for`): each reader has its own copy, and one copy for all may be many times larger."""
        shape, sharding = self.flow.nodes[leaf[0]].shapes[leaf[1]], decisions.result(leaf)
        payer = decisions.graph.variables.last_consumer.get(leaf)
        if payer is not None:
            sharding = decisions.strategies[payer[0]].operands[payer[1]]
        return _shard_bytes(shape, sharding, decisions.graph.prices.mesh)

    def _operand_of(self, reader: CopyReader | None) -> Operand | None:
        """The operand a copy is made for; None unless its reader is an instruction on arrays with strategies of its
        own."""
        leaf = self._leaf_of(reader.name, 0) if reader is not None else None
        if reader is None or leaf is None:
            return None
        node = self.flow.nodes[leaf[0]]
        instruction = node.instruction
        if node.is_value or instruction.name != reader.name:  # it only forwards another one's value
            return None
        is_of_arrays = all(len(operand.shape.leaves) == 1 for operand in instruction.operands)
        return (node.index, reader.operand) if is_of_arrays else None

    def _leaf_of(self, name: str, leaf: int) -> Leaf | None:
        leaves = self._nodes.get(name, ())
        return leaves[leaf] if leaf < len(leaves) else None


class BranchingBound(NamedTuple):
    """Bounds on the bytes of a value on one device: more than `lower_bytes`, at most `upper_bytes`."""

    leaf: Leaf
    lower_bytes: float
    upper_bytes: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Multipliers:
    """Seconds per byte at each of some peaks, applied to every buffer live there.

    constraints: peaks, with their multipliers.
    branching_bounds: bounds kept by plans; all others are excluded (`branching`).
    """

    constraints: tuple[tuple[MemoryConstraint, float], ...]
    branching_bounds: tuple[BranchingBound, ...] = ()

    @classmethod
    def split_equally(
        cls, peaks: Sequence[MemoryConstraint], price: float, within: tuple[BranchingBound, ...] = ()
    ) -> Multipliers:
        """A multiplier divided equally among some peaks."""
        return cls(constraints=tuple((peak, price / len(peaks)) for peak in peaks), branching_bounds=within)

    @property
    def total(self) -> float:
        """Seconds per byte of the budget."""
        return sum(price for _, price in self.constraints)

    def scale(self, factor: float) -> Multipliers:
        """The multipliers times a factor."""
        return replace(self, constraints=tuple((peak, factor * price) for peak, price in self.constraints))

    def value_multiplier(self, leaf: Leaf) -> float:
        """Seconds per byte of a value's own storage."""
        return self.of_results.get(leaf, 0.0) + self.of_reduced_results.get(leaf, 0.0)

    def branching_bounds_of(self, nodes: Iterable[int]) -> tuple[BranchingBound, ...]:
        """The bounds on values of some nodes."""
        made_by = set(nodes) if self.branching_bounds else set()
        return tuple(bound for bound in self.branching_bounds if bound.leaf[0] in made_by)

    @cached_property
    def of_results(self) -> Mapping[Leaf, float]:
        """Seconds per byte of values in their producers' shardings."""
        return self._of_values(lambda peak: peak.values.keys() - peak.reduced_values)

    @cached_property
    def of_reduced_results(self) -> Mapping[Leaf, float]:
        """Seconds per byte of values after the reduction of partial sums."""
        return self._of_values(lambda peak: peak.reduced_values)

    @cached_property
    def of_layout_copies(self) -> Mapping[Leaf, float]:
        """Seconds per byte of copies in shared layouts."""
        return self._sum_by_key(
            (leaf, price * peak.layout_copy_weight(leaf))
            for peak, price in self.constraints
            for leaf in peak.layout_copies
        )

    @cached_property
    def of_reader_copies(self) -> Mapping[Leaf, float]:
        """Seconds per byte of reader copies."""
        return self._sum_by_key(
            (leaf, price * peak.reader_copy_weight(leaf))
            for peak, price in self.constraints
            for leaf in peak.reader_copies
        )

    @cached_property
    def of_transposed(self) -> Mapping[Operand, float]:
        """Seconds per byte of operands' transposed copies."""
        return self._sum_by_key(
            (o, price * peak.transpose_weight(o)) for peak, price in self.constraints for o in peak.transposed_operands
        )

    @cached_property
    def of_resharded(self) -> Mapping[Operand, float]:
        """Seconds per byte of resharded operands."""
        return self._sum_by_key(
            (o, price * peak.reshard_weight(o)) for peak, price in self.constraints for o in peak.resharded_operands
        )

    @cached_property
    def of_loop_gathers(self) -> Mapping[LoopUse, float]:
        """Seconds per byte of arguments gathered for loops."""
        return self._sum_by_key(
            (r, price * peak.loop_gather_weight(r)) for peak, price in self.constraints for r in peak.loop_gathers
        )

    def _of_values(self, those: Callable[[MemoryConstraint], Iterable[Leaf]]) -> Mapping[Leaf, float]:
        return self._sum_by_key(
            (leaf, price * peak.value_weight(leaf)) for peak, price in self.constraints for leaf in those(peak)
        )

    @staticmethod
    def _sum_by_key(terms: Iterable[tuple[tuple[int, int], float]]) -> Mapping[tuple[int, int], float]:
        total: dict[tuple[int, int], float] = {}
        for key, seconds in terms:
            total[key] = total.get(key, 0.0) + seconds
        return total


def _layout_copy_bytes(decisions: Decisions, leaf: Leaf) -> int:
    shape, mesh = decisions.graph.flow.nodes[leaf[0]].shapes[leaf[1]], decisions.graph.prices.mesh
    hub = decisions.shared_layouts.get(leaf)
    size = _shard_bytes(shape, hub, mesh) if hub is not None else 0
    return size if size > _shard_bytes(shape, decisions.result(leaf), mesh) else 0


def _transpose_bytes(decisions: Decisions, operand: Operand) -> int:
    node, position = operand
    graph = decisions.graph
    used = decisions.strategies[node].operands
    return operand_copy_bytes(graph.flow.nodes[node].instruction, position, used, graph.prices.mesh)


def _reshard_bytes(decisions: Decisions, operand: Operand) -> int:
    node, position = operand
    graph = decisions.graph
    reader = graph.flow.nodes[node]
    use = reader.uses[position]
    source, used = graph.variables.source(reader, use), decisions.strategies[node].operands[position]
    if graph.is_cheap_to_recompute[use.source[0]]:
        return 0
    stored = (
        decisions.shared_layouts[source] if source[1] >= 0 else decisions.strategies[source[0]].results[use.source[1]]
    )
    shape, mesh = graph.flow.nodes[use.source[0]].shapes[use.source[1]], graph.prices.mesh
    size = _shard_bytes(shape, used, mesh)
    return size if stored != used and size <= _shard_bytes(shape, stored, mesh) else 0


def _loop_gather_bytes(decisions: Decisions, reading: LoopUse) -> int:
    node, number = reading
    graph = decisions.graph
    use, argument = graph.flow.nodes[node].uses[number], argument_of_use(graph.flow, reading)
    shape, mesh = graph.flow.nodes[argument].shapes[0], graph.prices.mesh
    size = _shard_bytes(shape, decisions.strategies[node].operands[use.position], mesh)
    return size if size > _shard_bytes(shape, decisions.strategies[argument].results[0], mesh) else 0


def _shard_bytes(shape: ArrayShape, sharding: TensorSharding, mesh: Mesh) -> int:
    return 0 if shape.is_on_host else shard_bytes(shape.element_type, shape.dimensions, sharding, mesh)
