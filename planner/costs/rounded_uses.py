"""Uses of float32 values that XLA:TPU rounds to bfloat16 ahead of the collectives that bring them there.

A use rounds when only products at the default precision read the value by it (`cost.rounding`): at once, or through
instructions that pass elements on, loops and barriers. A gather for such uses alone moves half the bytes; so the
weights of fully sharded training are gathered for products, while gradients and updated weights travel as float32.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.cost import HardwareProfile
from shardwright.cost.rounding import passes_rounded, rounds_operand
from shardwright.hlo import ArrayShape
from shardwright.planner.graph.dataflow import Dataflow, Leaf, Node, Use


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedUses:
    """uses: (node, operand position). leaves: values with no other use. hubs: values with such a use at all."""

    uses: frozenset[tuple[int, int]] = frozenset()
    leaves: frozenset[Leaf] = frozenset()
    hubs: frozenset[Leaf] = frozenset()


NOTHING_ROUNDED = RoundedUses()


def find_rounded_uses(flow: Dataflow) -> RoundedUses:
    """The rounding uses of a program: assumed of all float32 values at first, then dropped until none reads more."""
    readers: dict[Leaf, list[tuple[Node, Use]]] = {}
    for node in flow.nodes:
        for use in node.uses:
            if flow.nodes[use.source[0]].shapes[use.source[1]].element_type == "f32":
                readers.setdefault(use.source, []).append((node, use))
    outputs, leaves = frozenset(flow.outputs), set(readers)

    def is_rounding(node: Node, use: Use) -> bool:
        if node.is_value:
            return node.index not in outputs and (node.index, 0) in leaves
        if rounds_operand(node.instruction, use.position):
            return True
        return passes_rounded(node.instruction, use.position) and (node.index, 0) in leaves

    changed = True
    while changed:
        exact = {leaf for leaf in leaves if not all(is_rounding(*reader) for reader in readers[leaf])}
        leaves -= exact
        changed = bool(exact)
    rounding = [(node, use) for pairs in readers.values() for node, use in pairs if is_rounding(node, use)]
    return RoundedUses(
        uses=frozenset([(node.index, use.position) for node, use in rounding]),
        leaves=frozenset(leaves),
        hubs=frozenset([use.source for _, use in rounding]),
    )


def rounded_uses_of(flow: Dataflow, profile: HardwareProfile | None) -> RoundedUses:
    """The rounding uses of a program under a profile's compiler."""
    rounds = profile is not None and profile.compiler.runs("products_read_bf16")
    return find_rounded_uses(flow) if rounds else NOTHING_ROUNDED


def rounded_shape(shape: ArrayShape) -> ArrayShape:
    """The shape of a float32 array as it is sent."""
    return ArrayShape("bf16", shape.dimensions)
