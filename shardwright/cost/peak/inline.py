"""A computation with its calls inlined, in the form seen by XLA's later passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shardwright.cost.tuning import MAX_NODES
from shardwright.hlo import Computation, Instruction
from shardwright.hlo.shapes import TupleShape

#: Attributes that name the computations an instruction runs, by opcode.
_BODIES = {
    "while": ("body",),
    "call": ("to_apply",),
    "conditional": ("branch_computations", "true_computation", "false_computation"),
}


@dataclass(slots=True, eq=False)
class FlatComputation:
    """One node per instruction and call site, operands before users; a node is its position in these lists.

    operands: nodes, never a callee's parameters. root: the node of the result.
    """

    instructions: list[Instruction] = field(default_factory=list)
    operands: list[tuple[int, ...]] = field(default_factory=list)
    parameters: list[int] = field(default_factory=list)
    root: int = -1


def inline_calls(computation: Computation) -> FlatComputation:
    """`computation` without calls and dead instructions; loops and conditionals retain their bodies."""
    flat = FlatComputation()
    flat.root = _expand(computation, None, flat)
    return _drop_unread(flat)


def bodies(instruction: Instruction) -> list[Computation]:
    """The computations run by a loop, conditional or call; not those applied by reductions and the like."""
    called = instruction.called
    return [body for name in _BODIES.get(instruction.opcode, ()) for body in called.get(name, ())]


def first_leaf(shape: TupleShape, index: int) -> int:
    """Position among all array leaves of a tuple of the first one of element `index`."""
    return sum(len(element.leaves) for element in shape.elements[:index])


def _drop_unread(flat: FlatComputation) -> FlatComputation:
    is_needed = [False] * len(flat.instructions)
    for node in (flat.root, *flat.parameters):
        is_needed[node] = True
    for node in range(len(is_needed) - 1, -1, -1):
        if is_needed[node]:
            for operand in flat.operands[node]:
                is_needed[operand] = True
    if all(is_needed):
        return flat
    renumbered = [-1] * len(is_needed)
    pruned = FlatComputation()
    for node, is_read in enumerate(is_needed):
        if is_read:
            renumbered[node] = len(pruned.instructions)
            pruned.instructions.append(flat.instructions[node])
            pruned.operands.append(tuple([renumbered[operand] for operand in flat.operands[node]]))
    pruned.parameters = [renumbered[node] for node in flat.parameters]
    pruned.root = renumbered[flat.root]
    return pruned


def _expand(computation: Computation, arguments: Sequence[int] | None, flat: FlatComputation) -> int:
    nodes: dict[Instruction, int] = {}
    for instruction in computation.instructions:
        if instruction.opcode == "parameter" and arguments is not None:
            nodes[instruction] = arguments[instruction.index]
            continue
        operands = tuple([nodes[operand] for operand in instruction.operands])
        if instruction.opcode == "get-tuple-element":
            (source,) = operands
            if flat.instructions[source].opcode == "tuple":
                nodes[instruction] = flat.operands[source][instruction.index]
                continue
        if instruction.opcode == "call" and len(flat.instructions) < MAX_NODES:
            (callee,) = instruction.called["to_apply"]
            nodes[instruction] = _expand(callee, operands, flat)
            continue
        nodes[instruction] = len(flat.instructions)
        flat.instructions.append(instruction)
        flat.operands.append(operands)
        if instruction.opcode == "parameter":
            flat.parameters.append(nodes[instruction])
    return nodes[computation.root]
