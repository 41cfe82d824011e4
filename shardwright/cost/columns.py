"""Values that XLA lays out as the all-gather wants that sends them on.

An all-gather of an inner dimension leaves that one outermost (`Compiler.copies_gathered`), and XLA's layout assignment
(layout_assignment.cc) hands that on from its operand to what it is made of, element by element. What else reads such a
value reads it in its own layout: it gets a copy, which its kernel computes, but the value itself is stored, however
cheap it would be to compute again. Numbers that are spread for both are copied into this layout, too, so that XLA finds
that what adds one reads two arrays, and computes that once.
"""

from __future__ import annotations

from shardwright.cost.opcodes import ELEMENTWISE
from shardwright.cost.program import Program

#: Mark of the copy of what was gathered so, in the order that its readers take.
GATHERED = ("gathered",)


def columns(program: Program) -> frozenset[int]:
    """The nodes that lie so before they are gathered, the operands of the all-gathers first."""
    found: set[int] = set()
    todo = [
        operand
        for node, mark in program.marks.items()
        if mark == GATHERED
        for gather in program.operands[node]
        for operand in program.operands[gather]
    ]
    while todo:
        node = todo.pop()
        if node not in found and program.opcodes[node] in ELEMENTWISE:
            found.add(node)
            todo += [each for each in program.operands[node] if program.elements[each] == program.elements[node]]
    return frozenset(found)
