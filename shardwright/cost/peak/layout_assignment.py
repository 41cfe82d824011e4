"""Arguments copied into the layout of their updates.

The gradient of a weight is a product with a transposed result. XLA:TPU assigns the product a layout without a
transpose, shared by everything elementwise with it: moments and weights are read from copies made at the start of the
step (layout_assignment.cc; arguments and results are row-major).
"""

from __future__ import annotations

from shardwright.cost.opcodes import ELEMENTWISE, IDENTITIES, PRODUCTS
from shardwright.cost.peak.device_program import DeviceProgram

#: Mark of such a copy.
TRANSPOSED = ("turned",)

#: Opcodes that leave every element in place.
_LAYOUT_PRESERVING = ELEMENTWISE | {"all-reduce"}


def copy_transposed_arguments(program: DeviceProgram) -> DeviceProgram:
    """The program with copies of the arguments that are elementwise with a transposed product."""
    turned = _find_transposed(program)
    if not turned:
        return program
    copy, place = DeviceProgram(), list[int]()
    copies: dict[int, int] = {}
    for node, operands in enumerate(program.operands):
        reads_copies = program.opcodes[node] in _LAYOUT_PRESERVING
        new_operands = [copies.get(operand, place[operand]) if reads_copies else place[operand] for operand in operands]
        place.append(copy.add_like(program, node, new_operands))
        if node in program.marks:
            copy.marks[place[node]] = program.marks[node]
        if node in turned:
            copies[node] = copy.add_like(program, node, (place[node],), "copy")
            copy.marks[copies[node]] = TRANSPOSED
    copy.parameters = [place[node] for node in program.parameters]
    copy.root = place[program.root]
    return copy


def _find_transposed(program: DeviceProgram) -> set[int]:
    """Parameters in the layout of a transposed product, due to an elementwise reader of both."""
    group = list(range(len(program.opcodes)))

    def first(node: int) -> int:
        while group[node] != node:
            group[node] = group[group[node]]
            node = group[node]
        return node

    for node, operands in enumerate(program.operands):
        if program.opcodes[node] in _LAYOUT_PRESERVING and program.rank(node) > 1:
            for operand in operands:
                if program.rank(operand) > 1 and program.elements[operand] == program.elements[node]:
                    group[first(operand)] = first(node)
    turned = {first(node) for node in range(len(group)) if _is_transposed_product(program, node)}
    return {node for node in program.parameters if first(node) in turned and first(node) != node}


def _is_transposed_product(program: DeviceProgram, node: int) -> bool:
    if program.opcodes[node] != "transpose" or program.instructions[node].opcode != "transpose":
        return False
    (source,) = program.operands[node]
    while program.opcodes[source] in IDENTITIES or program.opcodes[source] in ("all-reduce", "convert"):
        source = program.operands[source][0]
    return program.opcodes[source] in PRODUCTS
