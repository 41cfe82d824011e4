"""Communication overlapped with compute, and its exposed fraction.

Values read by the optimizer alone may be reduced during the backward pass: the gradients. A hardware profile (or the
cluster file) gives the hidden fraction of that time (`overlap`); the rest is *exposed*, and priced. All other
communication is on the path from batch to loss and back: the next product waits for it.

A step hides no more than the compute after its gradients are ready (`readiness.py`; enforced in `overlap_cap.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.planner.graph.dataflow import Dataflow, Leaf
from shardwright.planner.segments.forward_pass import CHOICE_OPCODES

#: Instructions that sum up a gradient, and instructions that forward one.
_SUM_OPCODES = frozenset(
    {"dot", "convolution", "ragged-dot", "reduce", "scatter", "reduce-window", "select-and-scatter"}
)
_FORWARDING_OPCODES = frozenset({
    "add", "convert", "copy", "reshape", "transpose", "concatenate", "slice", "pad", "bitcast", "dynamic-update-slice",
})  # fmt: skip


def gradients(flow: Dataflow) -> frozenset[Leaf]:
    """Sums with no later product among their readers: their collectives may overlap compute."""
    late, is_sum = optimizer_nodes(flow), _sums(flow)
    arguments = frozenset(flow.parameters)
    waiting: set[Leaf] = set()
    used: set[Leaf] = set()
    for node in flow.nodes:
        for use in node.uses:
            used.add(use.source)
            if not late[node.index] and node.index not in arguments:
                waiting.add(use.source)
    return frozenset(
        (index, leaf) for index, leaf in used - waiting if is_sum[index] and flow.nodes[index].shapes[leaf].rank
    )


def nodes_at(flow: Dataflow, leaves: frozenset[Leaf]) -> Iterator[int]:
    """The nodes that make or read one of `leaves`; their prices depend on it."""
    for node in flow.nodes:
        if any((node.index, leaf) in leaves for leaf in range(len(node.shapes))) or any(
            use.source in leaves for use in node.uses
        ):
            yield node.index


def optimizer_nodes(flow: Dataflow) -> list[bool]:
    """Per node, whether no instruction with a layout choice of its own (a product, a lookup) depends on it: the
    optimizer."""
    late = [node.is_value or node.instruction.opcode not in CHOICE_OPCODES for node in flow.nodes]
    arguments = frozenset(flow.parameters)  # an update is read in the next step only
    changed = True
    while changed:  # a loop passes values back to its start
        changed = False
        for node in reversed(flow.nodes):
            if late[node.index] or node.index in arguments:
                continue
            for use in node.uses:
                changed = changed or late[use.source[0]]
                late[use.source[0]] = False
    return late


def _sums(flow: Dataflow) -> list[bool]:
    """Per node, whether it is a sum over the batch, judged by opcodes, or forwards one."""
    arguments = frozenset(flow.parameters)
    is_sum = [not node.is_value and node.instruction.opcode in _SUM_OPCODES for node in flow.nodes]
    changed = True
    while changed:
        changed = False
        for node in flow.nodes:
            if is_sum[node.index] or node.index in arguments:
                continue
            if node.is_value or node.instruction.opcode in _FORWARDING_OPCODES:
                is_sum[node.index] = any(is_sum[use.source[0]] for use in node.uses)
                changed = changed or is_sum[node.index]
    return is_sum
