"""Memory traffic of operands and results under XLA:GPU's kernel fusion.

A kernel reads its operands once and writes values with other consumers. XLA:GPU fuses loops into their consumers
(`kernels.py`), and merges further into one kernel:

- elementwise consumers of one array or of one another's results (multi-output fusion,
  xla/service/gpu/transforms/multi_output_fusion.cc): AdamW reads a parameter, its gradient and both moments once;
- a row reduction, its producers, and row-wise consumers of its results: a softmax, a normalization
  (xla/service/gpu/transforms/softmax_rewriter_triton.cc).

*Levels* decide the merging. The level of an instruction is the least number of kernels before it. Instructions of one
level with equal loop sizes run together around a shared array; none of them waits for a kernel behind another one.

The program is unpartitioned here: the answer holds for every mesh.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from shardwright.cost.compute import Traffic
from shardwright.cost.opcodes import LOOPS, SLICES
from shardwright.planner.graph.dataflow import Dataflow, Leaf, Node

_REDUCTIONS = frozenset({"reduce", "reduce-window"})

#: Elements of the longest row one kernel can reduce and reread; a row of a 50257-word vocabulary takes three kernels.
_LONGEST_ROW = 1 << 14

_READ, _NOT_READ = 1.0, 0.0


class Group(NamedTuple):
    """Kernels that can run as one: number of kernels before them, and number of elements in their loop."""

    level: int
    elements: int


@dataclass(slots=True, kw_only=True)
class _TrafficAnalysis:
    """Collects the reads of kernels.

    flow: the program.
    is_view: per node, it is a view of its operand.
    is_fused: per node, it is part of its consumers' kernels.
    readers: per node, its consumers.
    groups: per node, its group at the end of a kernel.
    by_rows: per node, its reductions run along rows, or it has none.
    within: per node, the groups that compute it.
    seen: arrays counted already, per group.
    """

    flow: Dataflow
    is_view: Sequence[bool]
    is_fused: Sequence[bool]
    readers: Sequence[Sequence[int]]
    groups: list[Group] = field(default_factory=list)  # of each node, were it a kernel's last
    by_rows: list[bool] = field(default_factory=list)  # per node: no reduction, or one along rows
    within: list[frozenset[Group]] = field(default_factory=list)  # per node, the groups that compute it
    seen: set[tuple[Group, Leaf]] = field(default_factory=set)

    def __post_init__(self) -> None:
        for node in self.flow.nodes:
            self.by_rows.append(node.instruction.opcode not in _REDUCTIONS or _reduces_rows(node))
            self.groups.append(self._group(node))
        self.within = [frozenset((group,)) for group in self.groups]
        for node in reversed(self.flow.nodes):
            if (self.is_fused[node.index] or self.is_view[node.index]) and self.readers[node.index]:
                self.within[node.index] = frozenset().union(
                    *(self.within[reader] for reader in self.readers[node.index])
                )

    def resolve_view(self, leaf: Leaf) -> Leaf:
        """The value behind a chain of views."""
        node = self.flow.nodes[leaf[0]]
        while self.is_view[node.index] and node.uses:
            leaf = node.uses[0].source
            node = self.flow.nodes[leaf[0]]
        return leaf

    def _is_constant(self, leaf: Leaf) -> bool:
        """Whether a value is a constant, iota or a broadcast of one: a view without operands."""
        node = self.flow.nodes[leaf[0]]
        return self.is_view[leaf[0]] and not node.uses

    def elements(self, leaf: Leaf) -> int:
        return prod(self.flow.nodes[leaf[0]].shapes[leaf[1]].dimensions)

    def _group(self, node: Node) -> Group:
        if node.is_value or not node.shapes:
            return Group(0, 0)
        is_loop = not node.is_value and _loops(node)
        elements = self._loop_elements(node)
        level = 0
        for use in node.uses:
            source = self.resolve_view(use.source)
            before = self.groups[source[0]] if source[0] < node.index else Group(0, 0)
            maker = self.flow.nodes[source[0]]
            if maker.is_value or self._is_constant(source):
                continue
            if is_loop and _loops(maker) and self._can_fuse(maker, node, before):
                level = max(level, before.level)
                if _is_row_sized(maker, before, node):
                    elements = max(elements, before.elements)
                    self.by_rows[node.index] = self.by_rows[maker.index]
            else:
                level = max(level, before.level + 1)
        return Group(level, elements)

    def _loop_elements(self, node: Node) -> int:
        leaf = node.uses[0].source if node.instruction.opcode in _REDUCTIONS and node.uses else (node.index, 0)
        return self.elements(leaf)

    def _can_fuse(self, maker: Node, node: Node, before: Group) -> bool:
        """Whether a kernel that ends in `maker` can continue with `node`."""
        if self.is_fused[maker.index] and before.elements == self.elements((maker.index, 0)):
            return True
        elements = self._loop_elements(node)
        if maker.instruction.opcode not in _REDUCTIONS and before.elements == self.elements((maker.index, 0)):
            return elements == before.elements
        size = self.elements((maker.index, 0))
        is_short = before.elements // max(size, 1) <= _LONGEST_ROW
        return self.by_rows[maker.index] and (elements == size or (is_short and elements == before.elements))

    def traffic(self, node: Node) -> Traffic:
        """Reads of a node's operands and writes of its results by its kernels."""
        i = node.index
        if node.is_value or self.is_view[i]:
            return Traffic((_NOT_READ,) * len(node.uses), _NOT_READ)
        reads = tuple([self._read(node, use.source, use.position) for use in node.uses])
        if node.instruction.opcode == "scatter":  # into zeros, which are written first, or in place
            reads = (float(self._is_constant(self.resolve_view(node.uses[0].source))), *reads[1:])
        is_written = not self.is_fused[i] and any(
            self.flow.nodes[reader].is_value or self.within[reader] != self.within[i] for reader in self.readers[i]
        )
        return Traffic(reads, _READ if is_written else _NOT_READ)

    def last_of_kernels(self) -> list[bool]:
        """Whether each node is the last one written of its merged kernel.

        A merged kernel: nodes of one group, connected by operands and results of their size.
        """
        joined: dict[tuple[Group, Leaf], tuple[Group, Leaf]] = {}

        def root(key: tuple[Group, Leaf]) -> tuple[Group, Leaf]:
            while (above := joined.get(key, key)) != key:
                joined[key] = joined.get(above, above)
                key = above
            return key

        for node in self.flow.nodes:
            if node.is_value or self.is_view[node.index] or not _loops(node):
                continue
            sources = {self.resolve_view(use.source) for use in node.uses}
            sizes = self.elements((node.index, 0)), self._loop_elements(node)
            shared = [source for source in sources if self.elements(source) in sizes]
            for group in sorted(self.within[node.index]):
                mine = root((group, (node.index, 0)))
                for source in sorted(shared):
                    joined[root((group, source))] = mine
        last: dict[tuple[Group, Leaf], int] = {}
        is_kernel = [
            not (node.is_value or self.is_view[node.index] or self.is_fused[node.index])
            and bool(self.readers[node.index])
            for node in self.flow.nodes
        ]
        for node in self.flow.nodes:
            if is_kernel[node.index]:
                last[root((self.groups[node.index], (node.index, 0)))] = node.index
        ends = set(last.values())
        return [is_kernel[node.index] and node.index in ends for node in self.flow.nodes]

    def _read(self, node: Node, leaf: Leaf, position: int) -> float:
        """Number of reads of an operand; a fraction for the broadcast of a smaller array."""
        source = self.resolve_view(leaf)
        maker = self.flow.nodes[source[0]]
        if self.is_fused[source[0]] or self._is_constant(source):
            return _NOT_READ
        count = 0
        is_slice = node.instruction.opcode in SLICES and position == 0
        for group in self.within[node.index]:
            if not maker.is_value and self.groups[source[0]] == group and _loops(node):
                continue
            if is_slice or not _loops(node):
                count += 1
            elif (group, source) not in self.seen:
                self.seen.add((group, source))
                count += 1
        return count * min(1.0, self.elements(source) / max(self.elements(leaf), 1))


def find_traffic(
    flow: Dataflow, is_view: Sequence[bool], is_fused: Sequence[bool], readers: Sequence[Sequence[int]]
) -> tuple[tuple[Traffic, ...], tuple[bool, ...]]:
    """Memory traffic per node, and per node: it is the last of a kernel.

    is_view: per node, it is a view of its operand. is_fused: per node, it is part of its consumers' kernels.
    """
    reading = _TrafficAnalysis(flow=flow, is_view=is_view, is_fused=is_fused, readers=readers)
    return tuple([reading.traffic(node) for node in flow.nodes]), tuple(reading.last_of_kernels())


def _reduces_rows(node: Node) -> bool:
    dims: tuple[int, ...] = node.instruction.get("dimensions", ())
    rank = node.instruction.operands[0].shape.leaves[0].rank
    return dims == (rank - 1,)


def _loops(node: Node) -> bool:
    return node.instruction.opcode in LOOPS or node.instruction.opcode in _REDUCTIONS


def _is_row_sized(maker: Node, before: Group, node: Node) -> bool:
    """Whether a reduction's consumer has one element a row, like the reduction's result."""
    size = prod(maker.shapes[0].dimensions)
    return size != before.elements and prod(node.shapes[0].dimensions) == size
