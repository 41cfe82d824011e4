"""What a loop carries that XLA stores in another order of dimensions, because its body gathers slices of it.

XLA:CPU makes an all-gather's dimension the one that varies slowest (`Compiler.copies_gathered`), and its layout
assignment (layout_assignment.cc) hands that on from the operand to what it is a slice of: the stack of all layers'
weights. That is the loop's argument, and where it is the program's, too, whose layout is given, it is copied: all
layers of it, from the beginning to the end of the last loop that reads it so. Dimensions of one element count:
rows of `[1, rows, columns]` are not the slowest, and of a stack they lie inside the layers.

What else of a parameter is cut and gathered behind a loop (a variable's new value) has a reshape of it lie so, too
(`columns`), and the loop that carries that reshape carries a copy in its own order.

That ends where a slice loses its dimension of one element before it is gathered. Left out: stacks that the program
makes itself, which XLA may store in that order at once.
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

#: Orders of a loop's carried elements by their positions; of those that a body reads in another than their own.
Orders = Mapping[int, DimOrder]

_Of = Callable[[Computation], Orders]

#: What hands an order on to all operands that are as large; slices do to what they are cut out of.
_SAME = ELEMENTWISE | {"bitcast", "copy"}


def gather_mark(dim: int, node: int) -> tuple[object, ...]:
    """The mark of a node that gathers one dimension, other than the first: no other node is equal to it."""
    return (INNER_GATHERED, dim, node)


def orders_read(program: DeviceProgram, of_body: _Of) -> dict[int, DimOrder]:
    """In which order a loop's body reads elements of its argument, where that is not their own. of_body: the same of
    loops inside."""
    found: dict[int, DimOrder] = {}
    seen: set[int] = set()
    todo = [*_find_gathers(program), *((node, order) for _, _, node, order in _find_reordered(program, of_body))]
    while todo:
        node, order = todo.pop()
        if node in seen or _is_natural(order):
            continue
        seen.add(node)
        instruction, operands = program.instructions[node], program.operands[node]
        if program.opcodes[node] == "get-tuple-element" and operands[0] in program.parameters:
            found[instruction.index] = order
        elif node in program.parameters[1:]:  # hoisted: behind the elements of the argument
            found[_element_count(program) + program.parameters.index(node) - 1] = order
        else:
            todo += _sources(program, node, order)
    return found


def with_copied_stacks(program: DeviceProgram, of_body: _Of) -> DeviceProgram:
    """The same program with copies of those of its parameters that loops read in another order than they lie in."""
    copied: dict[int, dict[int, tuple[int, DimOrder]]] = {}
    for loop, index, element, order in _find_reordered(program, of_body):
        if (
            program.opcodes[_skip_identities(program, element)] == "parameter"
        ):  # as it is, or converted ahead of the loop
            copied.setdefault(loop, {})[index] = (element, order)
    for loop, index, element in _find_gathered_views(program):
        copied.setdefault(loop, {}).setdefault(index, (element, ()))
    if not copied:
        return program
    made, place, copies = DeviceProgram(), list[int](), dict[tuple[int, DimOrder], int]()
    for node in range(len(program.opcodes)):
        operands = [place[operand] for operand in program.operands[node]]
        if node in copied:
            argument, *_ = program.operands[node]
            elements = [place[each] for each in loop_operands(program, node)]
            for index, (element, order) in copied[node].items():
                if (element, order) not in copies:
                    copies[element, order] = made.add_like(program, element, (place[element],), "copy")
                elements[index] = copies[element, order]
            count = len(program.operands[argument])
            operands = [made.add_like(program, argument, elements[:count]), *elements[count:]]
        place.append(made.add_like(program, node, operands))
    made.marks = {place[node]: mark for node, mark in program.marks.items()}
    made.parameters = [place[node] for node in program.parameters]
    made.root = place[program.root]
    return made.without_dead()


def _find_gathers(program: DeviceProgram) -> Iterator[tuple[int, DimOrder]]:
    """What is gathered along another dimension than its first, in the order that the collective wants."""
    for node, mark in program.marks.items():
        if isinstance(mark, tuple) and mark[:1] == (INNER_GATHERED,):
            (operand,) = program.operands[node]
            rank = program.instructions[node].shape.leaves[0].rank
            yield operand, (mark[1], *(dim for dim in range(rank) if dim != mark[1]))


def _find_reordered(program: DeviceProgram, of_body: _Of) -> Iterator[tuple[int, int, int, DimOrder]]:
    """(loop, position, node) of what loops carry that their bodies read in another order, and that order."""
    for node in loops_of(program):
        elements = loop_operands(program, node)
        for index, order in of_body(body_of(program.instructions[node])).items():
            yield node, index, elements[index], order


def _find_gathered_views(program: DeviceProgram) -> Iterator[tuple[int, int, int]]:
    """(loop, position, node) of what loops carry of reshaped parameters that lie as a later all-gather wants them."""
    lying = {node for node in find_gather_layouts(program) if program.opcodes[node] in IDENTITIES}
    for loop in loops_of(program) if lying else ():
        for index, element in enumerate(loop_operands(program, loop)):
            if element in lying and program.opcodes[_skip_identities(program, element)] == "parameter":
                yield loop, index, element


def _sources(program: DeviceProgram, node: int, order: DimOrder) -> Iterator[tuple[int, DimOrder]]:
    """What a node is made of, in the orders that this one's makes it have."""
    operands = program.operands[node]
    if program.opcodes[node] in SLICES:
        yield operands[0], order
    elif program.opcodes[node] in _SAME:
        yield from ((each, order) for each in operands if program.elements[each] == program.elements[node])


def _element_count(body: DeviceProgram) -> int:
    """How many elements a body's argument has."""
    shape = body.instructions[body.parameters[0]].shape
    assert isinstance(shape, TupleShape)
    return len(shape.elements)


def _skip_identities(program: DeviceProgram, node: int) -> int:
    while program.opcodes[node] in IDENTITIES | {"convert"}:
        (node,) = program.operands[node]
    return node


def _is_natural(order: DimOrder) -> bool:
    return order == tuple(range(len(order)))
