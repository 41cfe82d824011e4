"""Loop-carried values stored in another dimension order, due to all-gathers of their slices in the body.

XLA:CPU makes an all-gather's dimension the slowest (`copies_gathered`). Its layout assignment
(layout_assignment.cc) propagates this from the operand to the sliced value: the stack of all layers' weights. The stack
is the loop's argument. A stack that is also a program argument has a fixed layout and is copied: all its layers, from
the start to the end of the last loop that reads it in that order. Dimensions of one element matter: rows of `[1, rows,
columns]` are not the slowest, and in a stack they are inside the layers.

Another slice of a parameter gathered after a loop (a variable's new value) also sets the layout of its reshape
(`gather_layouts`); a loop carrying that reshape carries a copy in its own order.

Propagation stops at a slice that loses its dimension of one element before the gather. Left out: stacks made by the
program itself, which XLA may store in that order directly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from shardwright.cost.opcodes import ELEMENTWISE, IDENTITIES, SLICES
from shardwright.cost.peak.device_program import DeviceProgram
from shardwright.cost.peak.gather_layouts import INNER_GATHERED, find_gather_layouts
from shardwright.cost.peak.loop_invariant_code_motion import body_of, loop_operands, loops_of
from shardwright.hlo import Computation
from shardwright.hlo.shapes import TupleShape

#: Dimensions of an array from the slowest to the fastest.
DimOrder = tuple[int, ...]

#: Position of a loop-carried element → its order in the body, if not its own.
Orders = Mapping[int, DimOrder]

_Of = Callable[[Computation], Orders]

#: Opcodes that pass an order on to all operands of equal size; slices do to their operand.
_SAME = ELEMENTWISE | {"bitcast", "copy"}


def gather_mark(dim: int, node: int) -> tuple[object, ...]:
    """Mark of a node that gathers one dimension other than the first; unique to the node."""
    return (INNER_GATHERED, dim, node)


def orders_read(program: DeviceProgram, of_body: _Of) -> dict[int, DimOrder]:
    """Dimension orders in which a loop's body reads elements of its argument, if not their own. of_body: the same
    mapping, of inner loops' bodies.
    """
    orders: dict[int, DimOrder] = {}
    seen: set[int] = set()
    todo = [*_find_gathers(program), *((node, order) for _, _, node, order in _find_reordered(program, of_body))]
    while todo:
        node, order = todo.pop()
        if node in seen or _is_natural(order):
            continue
        seen.add(node)
        instruction, operands = program.instructions[node], program.operands[node]
        if program.opcodes[node] == "get-tuple-element" and operands[0] in program.parameters:
            orders[instruction.index] = order
        elif node in program.parameters[1:]:  # hoisted: after the argument's elements
            orders[_element_count(program) + program.parameters.index(node) - 1] = order
        else:
            todo += _sources(program, node, order)
    return orders


def with_copied_stacks(program: DeviceProgram, of_body: _Of) -> DeviceProgram:
    """The program with copies of parameters that loops read in another dimension order."""
    copied: dict[int, dict[int, tuple[int, DimOrder]]] = {}
    for loop, index, element, order in _find_reordered(program, of_body):
        if (
            program.opcodes[_skip_identities(program, element)] == "parameter"
        ):  # unchanged, or converted before the loop
            copied.setdefault(loop, {})[index] = (element, order)
    for loop, index, element in _find_gathered_views(program):
        copied.setdefault(loop, {}).setdefault(index, (element, ()))
    if not copied:
        return program
    copy, place, copies = DeviceProgram(), list[int](), dict[tuple[int, DimOrder], int]()
    for node in range(len(program.opcodes)):
        operands = [place[operand] for operand in program.operands[node]]
        if node in copied:
            argument, *_ = program.operands[node]
            elements = [place[element_node] for element_node in loop_operands(program, node)]
            for index, (element, order) in copied[node].items():
                if (element, order) not in copies:
                    copies[element, order] = copy.add_like(program, element, (place[element],), "copy")
                elements[index] = copies[element, order]
            count = len(program.operands[argument])
            operands = [copy.add_like(program, argument, elements[:count]), *elements[count:]]
        place.append(copy.add_like(program, node, operands))
    copy.marks = {place[node]: mark for node, mark in program.marks.items()}
    copy.parameters = [place[node] for node in program.parameters]
    copy.root = place[program.root]
    return copy.without_dead()


def _find_gathers(program: DeviceProgram) -> Iterator[tuple[int, DimOrder]]:
    """Values gathered along a dimension other than the first, with the collective's dimension order."""
    for node, mark in program.marks.items():
        if isinstance(mark, tuple) and mark[:1] == (INNER_GATHERED,):
            (operand,) = program.operands[node]
            rank = program.instructions[node].shape.leaves[0].rank
            yield operand, (mark[1], *(dim for dim in range(rank) if dim != mark[1]))


def _find_reordered(program: DeviceProgram, of_body: _Of) -> Iterator[tuple[int, int, int, DimOrder]]:
    """(loop, position, node, order) of loop-carried values read by their bodies in another order."""
    for node in loops_of(program):
        elements = loop_operands(program, node)
        for index, order in of_body(body_of(program.instructions[node])).items():
            yield node, index, elements[index], order


def _find_gathered_views(program: DeviceProgram) -> Iterator[tuple[int, int, int]]:
    """(loop, position, node) of loop-carried reshapes of parameters in the layout of a later all-gather."""
    lying = {node for node in find_gather_layouts(program) if program.opcodes[node] in IDENTITIES}
    for loop in loops_of(program) if lying else ():
        for index, element in enumerate(loop_operands(program, loop)):
            if element in lying and program.opcodes[_skip_identities(program, element)] == "parameter":
                yield loop, index, element


def _sources(program: DeviceProgram, node: int, order: DimOrder) -> Iterator[tuple[int, DimOrder]]:
    """Operands of a node, with the dimension orders propagated from its own."""
    operands = program.operands[node]
    if program.opcodes[node] in SLICES:
        yield operands[0], order
    elif program.opcodes[node] in _SAME:
        yield from ((operand, order) for operand in operands if program.elements[operand] == program.elements[node])


def _element_count(body: DeviceProgram) -> int:
    """Number of elements of a body's argument."""
    shape = body.instructions[body.parameters[0]].shape
    assert isinstance(shape, TupleShape)
    return len(shape.elements)


def _skip_identities(program: DeviceProgram, node: int) -> int:
    while program.opcodes[node] in IDENTITIES | {"convert"}:
        (node,) = program.operands[node]
    return node


def _is_natural(order: DimOrder) -> bool:
    return order == tuple(range(len(order)))
