"""Which instructions end a kernel: what a device launches once for a whole chain of fused instructions.

After XLA's InstructionFusion (xla/service/instruction_fusion.cc), which `cost/peak/fusion.py` follows for one device's
program: a value that loops alone read is computed in the kernels that read it, unless it is expensive and several
kernels would compute it; reductions and what anything else reads (products, what a loop carries, results) are written.
Here the program is as yet unsplit, so that the answer is the same on every mesh. What a plan moves between two
instructions of a kernel is written, too: the move costs a launch more (`Prices.launching`).
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.cost import HardwareProfile, compute_time_s, is_free
from shardwright.cost.opcodes import EXPENSIVE, LOOPS
from shardwright.planner.graph.dataflow import Dataflow, Node

#: Take in what loops compute, and write their own results.
_REDUCTIONS = frozenset({"reduce", "reduce-window"})

#: The number of no kernel: several compute a node, each for itself.
_SEVERAL = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """What fusion makes of the nodes of a program, wherever they are split.

    ends: nodes whose instruction ends a kernel, which takes a launch. is_fused: nodes whose values are part of the
    kernels that read them, and never written. The others run no kernel: values that are handed on, views.
    """

    ends: tuple[bool, ...]
    is_fused: tuple[bool, ...]


def find_kernels(flow: Dataflow) -> Kernels:
    """Decide what is fused, for a whole program."""
    readers: list[list[int]] = [[] for _ in flow.nodes]
    for node in flow.nodes:
        for use in node.uses:
            readers[use.source[0]].append(node.index)
    is_view = [_is_view(node) for node in flow.nodes]
    is_loop = [is_view[node.index] or (not node.is_value and node.instruction.opcode in LOOPS) for node in flow.nodes]
    is_fused = [False] * len(flow.nodes)
    takes_in = [False] * len(flow.nodes)
    kernel = list(range(len(flow.nodes)))  # the one that computes each node, or _SEVERAL
    for node in reversed(flow.nodes):
        i, opcode = node.index, node.instruction.opcode
        if is_loop[i] and readers[i] and all(takes_in[reader] for reader in readers[i]):
            kernels = {kernel[reader] for reader in readers[i]}
            is_shared = len(kernels) > 1 or _SEVERAL in kernels
            is_fused[i] = not (is_shared and opcode in EXPENSIVE)
            if is_fused[i]:
                kernel[i] = _SEVERAL if is_shared else kernels.pop()
        takes_in[i] = is_fused[i] or (not is_view[i] and (is_loop[i] or (not node.is_value and opcode in _REDUCTIONS)))
    ends = (
        not (node.is_value or is_view[node.index] or is_fused[node.index]) and bool(readers[node.index])
        for node in flow.nodes
    )
    return Kernels(ends=tuple(ends), is_fused=tuple(is_fused))


def _is_view(node: Node) -> bool:
    """Whether a node is its operand seen otherwise, and no kernel: a marked value is one, too."""
    if node.is_value:
        return node.instruction.opcode == "custom-call"
    return is_free(node.instruction)


def whole_s(node: Node, profile: HardwareProfile, *, ends_kernel: bool = False) -> float:
    """Seconds a step in which one device computes all of a node's value. ends_kernel: see `cost.compute_time_s`."""
    instruction = node.instruction
    operands = [leaf.dimensions for operand in instruction.operands for leaf in operand.shape.leaves]
    results = [leaf.dimensions for leaf in instruction.shape.leaves]
    return node.weight * compute_time_s(instruction, operands, results, profile, ends_kernel=ends_kernel)
