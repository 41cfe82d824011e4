"""Which nodes compute the same: equal instructions of equal values, whatever barriers stand between."""

from __future__ import annotations

from collections.abc import Hashable

from shardwright.planner.graph.dataflow import BARRIERS, Dataflow, Leaf, Node

#: Attributes that say nothing of what is computed; regions are compared by their opcode's other attributes.
_SILENT = frozenset({"metadata", "sharding", "frontend_attributes", "to_apply", "body", "condition"})


def operation_key(node: Node) -> tuple[Hashable, ...]:
    """What a node computes of its operands."""
    text = tuple((a.name, a.text) for a in node.instruction.attributes.values() if a.name not in _SILENT)
    return (node.instruction.opcode, node.shapes, node.instruction.payload, text)


def number_values(flow: Dataflow) -> list[tuple[Leaf, ...]]:
    """Per node its result leaves, each as the leaf of the first node that computes it."""
    meaning: list[tuple[Leaf, ...]] = []
    known: dict[Hashable, int] = {}
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
        read = tuple(meaning[use.source[0]][use.source[1]] if use.source[0] < i else use.source for use in node.uses)
        first = i if node.is_value else known.setdefault((operation_key(node), read), i)
        meaning.append(tuple((first, leaf) for leaf in range(len(node.shapes))))
    return meaning
