"""Communication that runs beside compute, and the part of its time that a step waits for.

What only the optimizer reads may be reduced while the backward pass goes on: the gradients. A hardware profile (or the
cluster file) says which part of that time a device hides (`overlap`); the rest is *exposed*, and priced. All else is on
the way from batch to loss and back, where the next product waits for it.

A step hides no more than it computes after its gradients are there (`readiness.py`; how the search keeps to that:
`overlap_cap.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.planner.graph.dataflow import Dataflow, Leaf
from shardwright.planner.segments.forward_pass import CHOICE_OPCODES

#: What adds up a gradient, and what hands one on.
_SUM_OPCODES = frozenset(
    {"dot", "convolution", "ragged-dot", "reduce", "scatter", "reduce-window", "select-and-scatter"}
)
_FORWARDING_OPCODES = frozenset({
    "add", "convert", "copy", "reshape", "transpose", "concatenate", "slice", "pad", "bitcast", "dynamic-update-slice",
})  # fmt: skip


def gradients(flow: Dataflow) -> frozenset[Leaf]:
    """Sums that no later product waits for, with every reader of theirs: what may be moved beside compute."""
    late, is_sum = optimizer_nodes(flow), _sums(flow)
    arguments = frozenset(flow.parameters)
    waiting: set[Leaf] = set()
    read: set[Leaf] = set()
    for node in flow.nodes:
        for use in node.uses:
            read.add(use.source)
            if not late[node.index] and node.index not in arguments:
                waiting.add(use.source)
    return frozenset(
        (index, leaf) for index, leaf in read - waiting if is_sum[index] and flow.nodes[index].shapes[leaf].rank
    )


def nodes_at(flow: Dataflow, leaves: frozenset[Leaf]) -> Iterator[int]:
    """The nodes that make one of `leaves` or read one: whose prices depend on it."""
    for node in flow.nodes:
        if any((node.index, leaf) in leaves for leaf in range(len(node.shapes))) or any(
            use.source in leaves for use in node.uses
        ):
            yield node.index


def optimizer_nodes(flow: Dataflow) -> list[bool]:
    """Per node, whether nothing that is worth a layout of its own (a product, a lookup) comes of it: the optimizer."""
    late = [node.is_value or node.instruction.opcode not in CHOICE_OPCODES for node in flow.nodes]
    arguments = frozenset(flow.parameters)  # what updates one is read in the next step only
    changed = True
    while changed:  # a loop hands values back to its start
        changed = False
        for node in reversed(flow.nodes):
            if late[node.index] or node.index in arguments:
                continue
            for use in node.uses:
                changed = changed or late[use.source[0]]
                late[use.source[0]] = False
    return late


def _sums(flow: Dataflow) -> list[bool]:
    """Per node, whether it is a sum over the batch, as far as opcodes tell, or hands one on."""
    arguments = frozenset(flow.parameters)
    found = [not node.is_value and node.instruction.opcode in _SUM_OPCODES for node in flow.nodes]
    changed = True
    while changed:
        changed = False
        for node in flow.nodes:
            if found[node.index] or node.index in arguments:
                continue
            if node.is_value or node.instruction.opcode in _FORWARDING_OPCODES:
                found[node.index] = any(found[use.source[0]] for use in node.uses)
                changed = changed or found[node.index]
    return found
