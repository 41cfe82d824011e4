"""Layout assignment: operands of an inner-dimension all-gather take its layout.

An all-gather of an inner dimension makes that one outermost (`copies_gathered`). XLA's layout assignment
(layout_assignment.cc) propagates this from its operand backwards through elementwise instructions, broadcast numbers
included. It visits instructions last to first. A value also read after the all-gather, in post-order, has the layout of
those readers, and the all-gather gets a copy. A value whose other readers all come first has the all-gather's layout,
and those readers get copies. A copy is part of its reader's kernel; the value itself is stored, however cheap to
recompute.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from shardwright.cost.opcodes import ELEMENTWISE, IDENTITIES, SLICES
from shardwright.cost.peak.device_program import DeviceProgram

#: Mark of the copy of such a gathered value, in its readers' order.
GATHERED = ("gathered",)

#: First of the mark of a node that gathers one dimension, other than the first.
INNER_GATHERED = "along"

_HANDS_ON = ELEMENTWISE | IDENTITIES | SLICES | {"broadcast", "iota"}


def find_gather_layouts(program: DeviceProgram) -> frozenset[int]:
    """The nodes in an all-gather's layout before they are gathered."""
    users = program.users()
    gathers = set(_gathering_inner(program, users))
    if not gathers:
        return frozenset()
    place = {node: i for i, node in enumerate(program.post_order())}
    gather_places: dict[int, int] = {}  # node → position of its all-gather
    for node in range(len(program.opcodes) - 1, -1, -1):
        if program.opcodes[node] not in _HANDS_ON:
            continue
        alike = {
            user: gather_places[user]
            for user in users[node]
            if user in gather_places and _hands_on(program, user, node)
        }
        claims = [*alike.values(), *(place[user] for user in users[node] if user in gathers)]
        last = max(claims, default=-1)
        if claims and all(place[user] <= last for user in users[node] if user not in alike):
            gather_places[node] = last
    return frozenset(gather_places)


def _gathering_inner(program: DeviceProgram, users: Sequence[Sequence[int]]) -> Iterator[int]:
    """The all-gathers of inner dimensions: those with copied results, and those followed by others."""
    for node, mark in program.marks.items():
        if mark == GATHERED:
            yield from program.operands[node]
        elif isinstance(mark, tuple) and mark[:1] == (INNER_GATHERED,):
            outer = _dimensions(program, node)[: mark[1]]
            if prod(outer) > 1 and any(program.opcodes[user] == "all-gather" for user in users[node]):
                yield node


def _hands_on(program: DeviceProgram, node: int, operand: int) -> bool:
    """Whether a node passes its layout on to an operand: one of its own size, or the operand of a slice."""
    if program.opcodes[node] in IDENTITIES:  # e.g. a constraint; a view of other dimensions has its own order
        return node not in program.marks and _dimensions(program, node) == _dimensions(program, operand)
    is_sliced = program.opcodes[node] in SLICES and program.operands[node][0] == operand
    return is_sliced or program.elements[node] == program.elements[operand]


def _dimensions(program: DeviceProgram, node: int) -> tuple[int, ...]:
    return program.instructions[node].shape.leaves[0].dimensions
