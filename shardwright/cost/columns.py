"""Values that XLA lays out as the all-gather wants that sends them on.

An all-gather of an inner dimension leaves that one outermost (`Compiler.copies_gathered`), and XLA's layout assignment
(layout_assignment.cc) hands that on from its operand to what it is made of, element by element, spread numbers among
it. It comes to instructions last to first: a value that is read behind the all-gather, in post-order, lies as its
readers there have it, and the all-gather gets a copy; one whose other readers all come first lies as the all-gather
wants it, and they get one. A copy is part of the kernel that reads it, but the value itself is stored, however cheap
it would be to compute again.
"""

from __future__ import annotations

from shardwright.cost.opcodes import ELEMENTWISE
from shardwright.cost.program import Program

#: Mark of the copy of what was gathered so, in the order that its readers take.
GATHERED = ("gathered",)

_HANDS_ON = ELEMENTWISE | {"broadcast", "iota"}


def columns(program: Program) -> frozenset[int]:
    """The nodes that lie so before they are gathered."""
    gathers = {gather for node, mark in program.marks.items() if mark == GATHERED for gather in program.operands[node]}
    if not gathers:
        return frozenset()
    place = {node: i for i, node in enumerate(program.post_order())}
    users = program.users()
    found: dict[int, int] = {}  # and the place of the all-gather
    for node in range(len(program.opcodes) - 1, -1, -1):
        if program.opcodes[node] not in _HANDS_ON:
            continue
        alike = {user: found[user] for user in users[node] if user in found and _is_as_large(program, user, node)}
        claims = [*alike.values(), *(place[user] for user in users[node] if user in gathers)]
        last = max(claims, default=-1)
        if claims and all(place[user] <= last for user in users[node] if user not in alike):
            found[node] = last
    return frozenset(found)


def _is_as_large(program: Program, node: int, other: int) -> bool:
    return program.elements[node] == program.elements[other]
