"""Values with combinable collectives: none of these waits for another.

XLA's combiners merge collectives of one kind over the same devices, with no path from one to another. Two products of a
chain have such a path: the next product waits. Before the first product all weights are gathered, and after the last
reader gradients are reduced and updated weights gathered: many at once. So a value is combinable when no product comes
before it (a *head*), or after it (a *tail*), in its computation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from shardwright.planner.graph.dataflow import Dataflow, Leaf
from shardwright.planner.segments.forward_pass import CHOICE_OPCODES
from shardwright.planner.segments.overlap import optimizer_nodes


def combinable_bytes(flow: Dataflow) -> Mapping[Leaf, int]:
    """Per value with combinable collectives, the bytes of all values combinable with it.

    Of a head these are its computation's inputs, of a tail the products' outputs: the gradients.
    """
    early, late = _early_nodes(flow), optimizer_nodes(flow)
    arguments = frozenset(flow.parameters)
    waiting = [node for node in flow.nodes if not late[node.index] and node.index not in arguments]
    waited_for = {use.source for node in waiting for use in node.uses}
    heads: dict[Leaf, str] = {}
    tails: dict[Leaf, str] = {}
    given_bytes: defaultdict[str, int] = defaultdict(int)
    handed_bytes: defaultdict[str, int] = defaultdict(int)
    for node in flow.nodes:
        for number, shape in enumerate(node.shapes):
            leaf, where = (node.index, number), node.computation
            if early[node.index]:
                heads[leaf] = where
                given_bytes[where] += shape.size_bytes if node.is_value else 0
            elif leaf not in waited_for:
                tails[leaf] = where
                handed_bytes[where] += 0 if late[node.index] else shape.size_bytes
    return {leaf: given_bytes[where] for leaf, where in heads.items()} | {
        leaf: handed_bytes[where] for leaf, where in tails.items()
    }


def _early_nodes(flow: Dataflow) -> list[bool]:
    """Per node, whether it depends on no instruction with a layout choice of its own (a product, a lookup)."""
    early = [node.is_value or node.instruction.opcode not in CHOICE_OPCODES for node in flow.nodes]
    arguments = frozenset(flow.parameters)
    changed = True
    while changed:  # a loop passes values back to its start
        changed = False
        for node in flow.nodes:
            if not early[node.index] or node.index in arguments:
                continue
            if not all(early[use.source[0]] for use in node.uses):
                early[node.index], changed = False, True
    return early


def combinable_bytes_by_node(
    flow: Dataflow, sizes: Mapping[Leaf, int]
) -> Iterator[tuple[int, tuple[tuple[int, ...], tuple[int, ...]]]]:
    """The nodes priced by it, with the combinable bytes of each result, and of each operand."""
    for node in flow.nodes:
        result_bytes = tuple([sizes.get((node.index, leaf), 0) for leaf in range(len(node.shapes))])
        operand_bytes = tuple([sizes.get(use.source, 0) for use in node.uses])
        if any(result_bytes) or any(operand_bytes):
            yield node.index, (result_bytes, operand_bytes)
