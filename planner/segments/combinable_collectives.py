"""Values whose moves a compiler may combine: collectives of which none waits for another.

XLA's combiners take collectives of one kind over the same devices where no path leads from one to another. Between two
products of a chain there is one, which the next product waits for. Before the first product all weights are gathered,
and behind the last one that reads them gradients are reduced and updated weights gathered: many at once. So a value
may be combined with others if no product comes before it (a *head*), or behind it (a *tail*), in its computation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from shardwright.planner.graph.dataflow import Dataflow, Leaf
from shardwright.planner.segments.forward_pass import CHOICE_OPCODES
from shardwright.planner.segments.overlap import optimizer_nodes


def combinable_bytes(flow: Dataflow) -> Mapping[Leaf, int]:
    """Per value whose moves may be combined, the bytes of all those that they may be combined with.

    Of a head these are what its computation is given, of a tail what products hand to it: the gradients.
    """
    early, late = _early_nodes(flow), optimizer_nodes(flow)
    arguments = frozenset(flow.parameters)
    waiting = [node for node in flow.nodes if not late[node.index] and node.index not in arguments]
    waited_for = {use.source for node in waiting for use in node.uses}
    heads: dict[Leaf, str] = {}
    tails: dict[Leaf, str] = {}
    given: defaultdict[str, int] = defaultdict(int)
    handed: defaultdict[str, int] = defaultdict(int)
    for node in flow.nodes:
        for number, shape in enumerate(node.shapes):
            leaf, where = (node.index, number), node.computation
            if early[node.index]:
                heads[leaf] = where
                given[where] += shape.size_bytes if node.is_value else 0
            elif leaf not in waited_for:
                tails[leaf] = where
                handed[where] += 0 if late[node.index] else shape.size_bytes
    return {leaf: given[where] for leaf, where in heads.items()} | {
        leaf: handed[where] for leaf, where in tails.items()
    }


def _early_nodes(flow: Dataflow) -> list[bool]:
    """Per node, whether nothing that is worth a layout of its own (a product, a lookup) comes before it."""
    early = [node.is_value or node.instruction.opcode not in CHOICE_OPCODES for node in flow.nodes]
    arguments = frozenset(flow.parameters)
    changed = True
    while changed:  # a loop hands values back to its start
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
    """The nodes whose prices depend on it: the bytes that may be combined with each result, and with each operand."""
    for node in flow.nodes:
        made = tuple([sizes.get((node.index, leaf), 0) for leaf in range(len(node.shapes))])
        read = tuple([sizes.get(use.source, 0) for use in node.uses])
        if any(made) or any(read):
            yield node.index, (made, read)
