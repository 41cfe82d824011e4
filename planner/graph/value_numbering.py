"""Value numbering: nodes computing the same value, by equal instructions on equal values, through barriers."""

from __future__ import annotations

from collections.abc import Hashable

from shardwright.planner.graph.dataflow import BARRIERS, Dataflow, Leaf, Node

#: Attributes that say nothing of what is computed; regions are compared by their opcode's other attributes.
_SILENT = frozenset({"metadata", "sharding", "frontend_attributes", "to_apply", "body", "condition"})


def operation_key(node: Node) -> tuple[Hashable, ...]:
    """A node's operation, without its operands."""
    text = tuple((a.name, a.text) for a in node.instruction.attributes.values() if a.name not in _SILENT)
    return (node.instruction.opcode, node.shapes, node.instruction.payload, text)


def number_values(flow: Dataflow) -> list[tuple[Leaf, ...]]:
    """Per node its result leaves, each replaced by the leaf of the first equal node."""
    meaning: list[tuple[Leaf, ...]] = []
    first_nodes: dict[Hashable, int] = {}
    arguments = set(flow.parameters)
    for node in flow.nodes:
        i = node.index
        if i in arguments:
            meaning.append(tuple((i, leaf) for leaf in range(len(node.shapes))))
            continue
        if node.is_value and node.instruction.opcode in BARRIERS and len(node.uses) == 1:
            source, leaf = node.uses[0].source
            meaning.append((meaning[source][leaf],))
            continue
        inputs = tuple(meaning[use.source[0]][use.source[1]] if use.source[0] < i else use.source for use in node.uses)
        first = i if node.is_value else first_nodes.setdefault((operation_key(node), inputs), i)
        meaning.append(tuple((first, leaf) for leaf in range(len(node.shapes))))
    return meaning
