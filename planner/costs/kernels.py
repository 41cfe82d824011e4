"""Which instructions end a kernel: what a device launches once for a whole chain of fused instructions.

After XLA's InstructionFusion (xla/service/instruction_fusion.cc), which `cost/peak/fusion.py` follows for one device's
program: a value that loops alone read is computed in the kernels that read it, unless it is expensive and several
kernels would compute it; reductions and what anything else reads (products, what a loop carries, results) are written.
What is part of a kernel that takes a slice of it is computed as far as the slice goes: of a mask made for the longest
sequence that a model can take, only what this batch reads.
Here the program is as yet unsplit, so that the answer is the same on every mesh. What a plan moves between two
instructions of a kernel is written, too: the move costs a launch more (`Prices.with_launch`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from shardwright.cost import HardwareProfile, compute_time_s, is_free
from shardwright.cost.compute import Traffic
from shardwright.cost.opcodes import ELEMENTWISE, EXPENSIVE, EXPENSIVE_ELEMENTWISE, IDENTITIES, LOOPS, SLICES
from shardwright.planner.costs.traffic import find_traffic
from shardwright.planner.graph.dataflow import Dataflow, Leaf, Node

#: Take in what loops compute, and write their own results.
_REDUCTIONS = frozenset({"reduce", "reduce-window"})

#: Of whose operands as many elements are read as are computed.
_ONE_FOR_ONE = ELEMENTWISE | IDENTITIES | {"transpose", "reverse"}

#: The number of no kernel: several compute a node, each for itself.
_SEVERAL = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """What fusion makes of the nodes of a program, wherever they are split.

    ends: nodes whose instruction ends a kernel, which takes a launch. is_fused: nodes whose values are part of the
    kernels that read them, and never written. The others run no kernel: values that are handed on, views.
    parts: of each node's elements those that are computed; less than 1 where kernels that take slices compute it.
    traffic: of each node, what passes through memory; None where all pay a part of their bytes.
    """

    ends: tuple[bool, ...]
    is_fused: tuple[bool, ...]
    parts: tuple[float, ...]
    traffic: tuple[Traffic | None, ...]


def find_kernels(flow: Dataflow, *, merges: bool = False) -> Kernels:
    """Decide what is fused, for a whole program.

    merges: whether kernels that read the same run as one (`traffic.py`).
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
        return Kernels(ends=lasts, is_fused=tuple(is_fused), parts=tuple(parts), traffic=traffic)
    ends = (
        not (node.is_value or is_view[node.index] or is_fused[node.index]) and bool(readers[node.index])
        for node in flow.nodes
    )
    return Kernels(ends=tuple(ends), is_fused=tuple(is_fused), parts=tuple(parts), traffic=(None,) * len(flow.nodes))


def _reads_much(node: Node, flow: Dataflow) -> bool:
    """Whether several kernels that compute a value read more than if it was written: more than one array of its size,
    or what is looked up."""
    if node.instruction.opcode in EXPENSIVE - EXPENSIVE_ELEMENTWISE:
        return True
    sources = {use.source for use in node.uses if flow.nodes[use.source[0]].shapes[use.source[1]].rank}
    return sum(_is_whole(source, flow) for source in sources) > 1


def _is_whole(leaf: Leaf, flow: Dataflow) -> bool:
    """Whether a value is no smaller one, spread."""
    node = flow.nodes[leaf[0]]
    return node.is_value or node.instruction.opcode not in ("broadcast", "iota", "constant")


def _part(node: Node, readers: list[int], slices: Sequence[int], flow: Dataflow, parts: Sequence[float]) -> float:
    """Of a fused node's elements, those that its readers read: slices read different ones, others the same."""
    if not slices and all(parts[reader] == 1.0 for reader in readers):
        return 1.0
    whole = prod(node.shapes[0].dimensions)
    sliced = sum(parts[each] * prod(flow.nodes[each].shapes[0].dimensions) for each in slices) / max(whole, 1)
    others = [reader for reader in readers if reader not in slices]
    is_one_for_one = all(
        not flow.nodes[other].is_value and flow.nodes[other].instruction.opcode in _ONE_FOR_ONE for other in others
    )
    as_it_is = max((parts[other] for other in others), default=0.0) if is_one_for_one else 1.0
    return min(max(sliced, as_it_is), 1.0)


def _is_view(node: Node) -> bool:
    """Whether a node is its operand seen otherwise, and no kernel: a marked value is one, too."""
    if node.is_value:
        return node.instruction.opcode == "custom-call"
    return is_free(node.instruction)


def _is_folded(node: Node, readers: Sequence[int], flow: Dataflow) -> bool:
    """Whether a node is a transposed matrix that only products read: they take it as it lies (TransposeFolding)."""
    if node.is_value or node.instruction.opcode != "transpose" or node.shapes[0].rank != 2:
        return False
    read_by = [flow.nodes[reader] for reader in readers]
    return bool(read_by) and all(not each.is_value and each.instruction.opcode == "dot" for each in read_by)


def one_device_s(node: Node, kernels: Kernels, profile: HardwareProfile, *, ends_kernel: bool = False) -> float:
    """Seconds a step in which one device computes all that is read of a node's value. ends_kernel: see
    `cost.compute_time_s`."""
    instruction = node.instruction
    operands = [leaf.dimensions for operand in instruction.operands for leaf in operand.shape.leaves]
    results = [leaf.dimensions for leaf in instruction.shape.leaves]
    weight = node.weight * kernels.parts[node.index]
    traffic = kernels.traffic[node.index]
    return weight * compute_time_s(instruction, operands, results, profile, ends_kernel=ends_kernel, traffic=traffic)
