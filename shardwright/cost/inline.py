"""A computation with its calls written out in place, as XLA sees it once it has inlined them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shardwright.hlo import Computation, Instruction

#: Nodes after which calls stay calls: nested ones can double the program at each level.
_MOST_NODES = 500_000


@dataclass(slots=True, eq=False)
class Node:
    """One instruction at one call site; its operands are nodes, never a callee's parameters."""

    instruction: Instruction
    operands: tuple[Node, ...]


@dataclass(slots=True)
class FlatComputation:
    """Nodes in program order, operands before users."""

    nodes: list[Node] = field(default_factory=list)
    parameters: list[Node] = field(default_factory=list)
    root: Node | None = None


def inlined(computation: Computation) -> FlatComputation:
    """`computation` without calls and without what nobody reads; loops and conditionals keep their bodies."""
    flat = FlatComputation()
    flat.root = _expand(computation, None, flat)
    read = {flat.root, *flat.parameters}
    for node in reversed(flat.nodes):
        if node in read:
            read.update(node.operands)
    flat.nodes = [node for node in flat.nodes if node in read]
    return flat


def _expand(computation: Computation, arguments: Sequence[Node] | None, flat: FlatComputation) -> Node:
    made: dict[Instruction, Node] = {}
    for instruction in computation.instructions:
        if instruction.opcode == "parameter" and arguments is not None:
            made[instruction] = arguments[instruction.index]
            continue
        operands = tuple(made[operand] for operand in instruction.operands)
        if instruction.opcode == "get-tuple-element" and operands[0].instruction.opcode == "tuple":
            made[instruction] = operands[0].operands[instruction.index]
            continue
        if instruction.opcode == "call" and len(flat.nodes) < _MOST_NODES:
            (callee,) = instruction.called["to_apply"]
            made[instruction] = _expand(callee, operands, flat)
            continue
        node = made[instruction] = Node(instruction, operands)
        flat.nodes.append(node)
        if instruction.opcode == "parameter":
            flat.parameters.append(node)
    return made[computation.root]
