"""Values that XLA lays out as the all-gather wants that sends them on.

An all-gather of an inner dimension leaves that one outermost (`Compiler.copies_gathered`), and XLA's layout assignment
(layout_assignment.cc) hands that on from its operand to what it is made of, element by element, spread numbers among
it. It comes to instructions last to first: a value that is read behind the all-gather, in post-order, lies as its
readers there have it, and the all-gather gets a copy; one whose other readers all come first lies as the all-gather
wants it, and they get one. A copy is part of the kernel that reads it, but the value itself is stored, however cheap
it would be to compute again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from shardwright.cost.opcodes import ELEMENTWISE, IDENTITIES, SLICES
from shardwright.cost.peak.device_program import DeviceProgram

#: Mark of the copy of what was gathered so, in the order that its readers take.
GATHERED = ("gathered",)

#: First of the mark of a node that gathers one dimension, other than the first.
INNER_GATHERED = "along"

_HANDS_ON = ELEMENTWISE | IDENTITIES | SLICES | {"broadcast", "iota"}


def find_gather_layouts(program: DeviceProgram) -> frozenset[int]:
    """The nodes that lie so before they are gathered."""
    users = program.users()
    gathers = set(_gathering_inner(program, users))
    if not gathers:
        return frozenset()
    place = {node: i for i, node in enumerate(program.post_order())}
    found: dict[int, int] = {}  # and the place of the all-gather
    for node in range(len(program.opcodes) - 1, -1, -1):
        if program.opcodes[node] not in _HANDS_ON:
            continue
        alike = {user: found[user] for user in users[node] if user in found and _hands_on(program, user, node)}
        claims = [*alike.values(), *(place[user] for user in users[node] if user in gathers)]
        last = max(claims, default=-1)
        if claims and all(place[user] <= last for user in users[node] if user not in alike):
            found[node] = last
    return frozenset(found)


def _gathering_inner(program: DeviceProgram, users: Sequence[Sequence[int]]) -> Iterator[int]:
    """The all-gathers of inner dimensions: those whose results are copied, and those that others follow."""
    for node, mark in program.marks.items():
        if mark == GATHERED:
            yield from program.operands[node]
        elif isinstance(mark, tuple) and mark[:1] == (INNER_GATHERED,):
            outer = _dimensions(program, node)[: mark[1]]
            if prod(outer) > 1 and any(program.opcodes[user] == "all-gather" for user in users[node]):
                yield node


def _hands_on(program: DeviceProgram, node: int, operand: int) -> bool:
    """Whether a node that lies so has an operand lie so: as large as it, or what it is a slice of."""
    if program.opcodes[node] in IDENTITIES:  # a constraint, say: what shows other dimensions has an order of its own
        return node not in program.marks and _dimensions(program, node) == _dimensions(program, operand)
    is_sliced = program.opcodes[node] in SLICES and program.operands[node][0] == operand
    return is_sliced or program.elements[node] == program.elements[operand]


def _dimensions(program: DeviceProgram, node: int) -> tuple[int, ...]:
    return program.instructions[node].shape.leaves[0].dimensions
