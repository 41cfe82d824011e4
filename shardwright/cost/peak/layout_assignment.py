"""Arguments that are copied into the layout of what they are updated by.

The gradient of a weight is a product whose result is transposed. XLA:TPU lays the product out so that nothing has to be
transposed, and all that is elementwise with it lies the same way: moments and weights are read from copies, which are
made as the step begins (layout_assignment.cc; arguments and results lie row by row).
"""

from __future__ import annotations

from shardwright.cost.opcodes import ELEMENTWISE, IDENTITIES, PRODUCTS
from shardwright.cost.peak.device_program import DeviceProgram

#: Mark of such a copy.
TRANSPOSED = ("turned",)

#: What leaves every element where it is.
_LAYOUT_PRESERVING = ELEMENTWISE | {"all-reduce"}


def copy_transposed_arguments(program: DeviceProgram) -> DeviceProgram:
    """The same program with copies of the arguments that are elementwise with a transposed product."""
    turned = _find_transposed(program)
    if not turned:
        return program
    made, place = DeviceProgram(), list[int]()
    copies: dict[int, int] = {}
    for node, operands in enumerate(program.operands):
        reads_copies = program.opcodes[node] in _LAYOUT_PRESERVING
        read = [copies.get(each, place[each]) if reads_copies else place[each] for each in operands]
        place.append(made.add_like(program, node, read))
        if node in program.marks:
            made.marks[place[node]] = program.marks[node]
        if node in turned:
            copies[node] = made.add_like(program, node, (place[node],), "copy")
            made.marks[copies[node]] = TRANSPOSED
    made.parameters = [place[node] for node in program.parameters]
    made.root = place[program.root]
    return made


def _find_transposed(program: DeviceProgram) -> set[int]:
    """The parameters that lie as a transposed product does, since something elementwise reads both."""
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
