"""Value numbering: nodes computing the same value, by equal instructions on equal values, through barriers."""

from __future__ import annotations

from collections.abc import Hashable

from shardwright.hlo.opcodes import COLLECTIVES
from shardwright.planner.graph.dataflow import BARRIERS, Dataflow, Leaf, Node
from shardwright.regions import border_of

#: Attributes that say nothing of what is computed; regions are compared by their opcode's other attributes.
_SILENT = frozenset({"metadata", "sharding", "frontend_attributes", "to_apply", "body", "condition"})

#: The same of collectives, and of the borders of manual regions.
_SILENT_OF_REGIONS = frozenset({"metadata", "sharding"})


def operation_key(node: Node) -> tuple[Hashable, ...]:
    """A node's operation, without its operands."""
    silent = _SILENT
    if node.instruction.opcode in COLLECTIVES or border_of(node.instruction) is not None:
        silent = _SILENT_OF_REGIONS  # what they combine by, which region they are of
    text = tuple((a.name, a.text) for a in node.instruction.attributes.values() if a.name not in silent)
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
