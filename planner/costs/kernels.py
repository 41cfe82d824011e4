"""Kernel boundaries under loop fusion: a device launches one kernel per chain of fused instructions.

Model of XLA's InstructionFusion (xla/service/instruction_fusion.cc); `cost/peak/fusion.py` follows the same pass for
one device's program. Rules:

- A value with only loops for consumers is computed in their kernels; not an expensive one with several kernels.
- Reductions are written. The same holds for operands of products, loop-carried values and results.
- A fused operand of a slice is computed only over the slice: of a mask for the model's longest sequence, the part
  this batch reads.

The program is unpartitioned here: the answer holds for every mesh. A reshard between two instructions of a kernel is
written too and costs one more launch (`Prices.with_launch`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from shardwright.cost import HardwareProfile, compute_time_s, is_free
from shardwright.cost.compute import Traffic
from shardwright.cost.opcodes import ELEMENTWISE, EXPENSIVE, EXPENSIVE_ELEMENTWISE, IDENTITIES, LOOPS, SLICES
from shardwright.hlo.opcodes import COLLECTIVES
from shardwright.planner.costs.traffic import find_traffic
from shardwright.planner.graph.dataflow import Dataflow, Leaf, Node

#: They fuse loops as producers, and write their own results.
_REDUCTIONS = frozenset({"reduce", "reduce-window"})

#: They read one operand element per computed element.
_ONE_FOR_ONE = ELEMENTWISE | IDENTITIES | {"transpose", "reverse"}

#: The number of no kernel: several compute a node, each for itself.
_SEVERAL = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Fusion decisions for a program's nodes, independent of their shardings.

    ends: per node, its instruction ends a kernel and takes a launch.
    is_fused: per node, its value is part of its consumers' kernels and never written.
    parts: per node, the fraction of its elements computed; below 1 with slicing kernels as consumers.
    traffic: per node, its memory traffic; None: every operand and result pays by its bytes.

    A node with neither flag runs no kernel: a value handed on, or a view.
    """

    ends: tuple[bool, ...]
    is_fused: tuple[bool, ...]
    parts: tuple[float, ...]
    traffic: tuple[Traffic | None, ...]


def find_kernels(flow: Dataflow, *, merges: bool = False) -> Kernels:
    """Decide fusion for a whole program.

    merges: kernels that read the same array run as one (`traffic.py`).
    """
    readers: list[list[int]] = [[] for _ in flow.nodes]
    slices: dict[int, list[int]] = {}  # of a node, those among its readers
    for node in flow.nodes:
        for use in node.uses:
            readers[use.source[0]].append(node.index)
            if node.instruction.opcode in SLICES and use.position == 0 and not node.is_value:
                slices.setdefault(use.source[0], []).append(node.index)
    is_view = [_is_view(node) or (merges and _is_folded(node, readers[node.index], flow)) for node in flow.nodes]
    is_loop = [is_view[node.index] or (not node.is_value and node.instruction.opcode in LOOPS) for node in flow.nodes]
    is_fused = [False] * len(flow.nodes)
    takes_in = [False] * len(flow.nodes)
    parts = [1.0] * len(flow.nodes)
    kernel = list(range(len(flow.nodes)))  # the one that computes each node, or _SEVERAL
    for node in reversed(flow.nodes):
        i, opcode = node.index, node.instruction.opcode
        if is_loop[i] and readers[i] and all(takes_in[reader] for reader in readers[i]):
            kernels = {kernel[reader] for reader in readers[i]}
            is_shared = len(kernels) > 1 or _SEVERAL in kernels
            is_fused[i] = not (is_shared and (_reads_much(node, flow) if merges else opcode in EXPENSIVE))
            if is_fused[i]:
                parts[i] = _part(node, readers[i], slices.get(i, ()), flow, parts)
                kernel[i] = _SEVERAL if is_shared else kernels.pop()
        takes_in[i] = is_fused[i] or (not is_view[i] and (is_loop[i] or (not node.is_value and opcode in _REDUCTIONS)))
    if merges:
        traffic, lasts = find_traffic(flow, is_view, is_fused, readers)
        lasts = tuple(last and not _is_collective(node) for last, node in zip(lasts, flow.nodes, strict=True))
        return Kernels(ends=lasts, is_fused=tuple(is_fused), parts=tuple(parts), traffic=traffic)
    ends = (
        not (node.is_value or is_view[node.index] or is_fused[node.index] or _is_collective(node))
        and bool(readers[node.index])
        for node in flow.nodes
    )
    return Kernels(ends=tuple(ends), is_fused=tuple(is_fused), parts=tuple(parts), traffic=(None,) * len(flow.nodes))


def _reads_much(node: Node, flow: Dataflow) -> bool:
    """Whether recomputing a value in several kernels reads more than writing it once: a lookup, or more than one
    array of its size.
    """
    if node.instruction.opcode in EXPENSIVE - EXPENSIVE_ELEMENTWISE:
        return True
    sources = {use.source for use in node.uses if flow.nodes[use.source[0]].shapes[use.source[1]].rank}
    return sum(_is_whole(source, flow) for source in sources) > 1


def _is_whole(leaf: Leaf, flow: Dataflow) -> bool:
    """Whether a value is no broadcast, iota or constant."""
    node = flow.nodes[leaf[0]]
    return node.is_value or node.instruction.opcode not in ("broadcast", "iota", "constant")


def _part(node: Node, readers: list[int], slices: Sequence[int], flow: Dataflow, parts: Sequence[float]) -> float:
    """The fraction of a fused node's elements its consumers read: a sum over slices, a maximum over the others."""
    if not slices and all(parts[reader] == 1.0 for reader in readers):
        return 1.0
    whole = prod(node.shapes[0].dimensions)
    sliced = sum(parts[index] * prod(flow.nodes[index].shapes[0].dimensions) for index in slices) / max(whole, 1)
    others = [reader for reader in readers if reader not in slices]
    is_one_for_one = all(
        not flow.nodes[other].is_value and flow.nodes[other].instruction.opcode in _ONE_FOR_ONE for other in others
    )
    as_it_is = max((parts[other] for other in others), default=0.0) if is_one_for_one else 1.0
    return min(max(sliced, as_it_is), 1.0)


def _is_view(node: Node) -> bool:
    """Whether a node is a view of its operand, without a kernel; annotated values are views too."""
    if node.is_value:
        return node.instruction.opcode == "custom-call"
    return is_free(node.instruction)


def _is_collective(node: Node) -> bool:
    """Whether a node is a collective of a manual region: no kernel, but no view either."""
    return not node.is_value and node.instruction.opcode in COLLECTIVES


def _is_folded(node: Node, readers: Sequence[int], flow: Dataflow) -> bool:
    """Whether a node is a transposed matrix with only products for consumers, which fold it
    (TransposeFolding).
    """
    if node.is_value or node.instruction.opcode != "transpose" or node.shapes[0].rank != 2:
        return False
    consumers = [flow.nodes[reader] for reader in readers]
    return bool(consumers) and all(
        not consumer.is_value and consumer.instruction.opcode == "dot" for consumer in consumers
    )


def one_device_s(node: Node, kernels: Kernels, profile: HardwareProfile, *, ends_kernel: bool = False) -> float:
    """Seconds a step for one device to compute the part of a node's value that is read.

    ends_kernel: see `cost.compute_time_s`.
    """
    instruction = node.instruction
    operands = [leaf.dimensions for operand in instruction.operands for leaf in operand.shape.leaves]
    results = [leaf.dimensions for leaf in instruction.shape.leaves]
    weight = node.weight * kernels.parts[node.index]
    traffic = kernels.traffic[node.index]
    return weight * compute_time_s(instruction, operands, results, profile, ends_kernel=ends_kernel, traffic=traffic)
