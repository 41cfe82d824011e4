"""Drops what loops carry unchanged and nobody reads: masks that JAX takes out of scanned layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from shardwright.hlo import Computation, Instruction, Module
from shardwright.hlo.shapes import TupleShape
from shardwright.planner.attention.rebuild import rebuild
from shardwright.planner.rewrites import edit


def drop_unread_carried(module: Module) -> Module:
    """`module`, whose instructions are its own and are changed, without such elements of its loops."""
    while True:
        callers = Counter(
            callee for each in module.instructions() for callees in each.called.values() for callee in callees
        )
        changed = [
            _drop(loop, computation)
            for computation in module.computations
            for loop in list(computation)
            if loop.opcode == "while" and max(callers[callee] for (callee,) in loop.called.values()) == 1
        ]
        if not any(changed):
            return module
        module = rebuild(module, {}, {})


def _drop(loop: Instruction, around: Computation) -> bool:
    """Whether elements of a loop were dropped."""
    (body,), (condition,) = loop.called["body"], loop.called["condition"]
    start, returned = loop.operands[0], body.root
    if not isinstance(loop.shape, TupleShape) or start.opcode != "tuple" or returned.opcode != "tuple":
        return False
    readers = [each for each in around if each is not loop and start in each.operands]
    outer = _elements(loop, around)
    inner = _elements(body.parameters[0], body)
    asked = _elements(condition.parameters[0], condition)
    if outer is None or inner is None or asked is None or readers or loop.is_root:
        return False
    counts = Counter(operand for each in body for operand in each.operands)
    read = {each.index for each in (*outer, *asked)}
    passed = {index for index in range(len(returned.operands)) if _is_passed(returned, index, inner, counts)}
    dropped = passed - read
    if not dropped:
        return False
    remaining = [index for index in range(len(loop.shape.elements)) if index not in dropped]
    shape = TupleShape(tuple(loop.shape.elements[index] for index in remaining))
    for each in (start, returned):
        each.operands = tuple(each.operands[index] for index in remaining)
    for each in (loop, start, returned, body.parameters[0], condition.parameters[0]):
        each.shape = shape
    gone = {element for element in inner if element.index in dropped}
    body.instructions = [each for each in body if each not in gone]
    for element in (*outer, *inner, *asked):
        if element not in gone:
            element.index = remaining.index(element.index)
            element.attributes["index"] = edit.attribute("index", str(element.index))
    return True


def _elements(whole: Instruction, computation: Computation) -> Sequence[Instruction] | None:
    """The elements that are read of a tuple; None where it is read in another way."""
    readers = [each for each in computation if whole in each.operands]
    return readers if all(each.opcode == "get-tuple-element" for each in readers) else None


def _is_passed(
    returned: Instruction, index: int, elements: Sequence[Instruction], counts: Counter[Instruction]
) -> bool:
    """Whether an element is handed on as it came, and not read besides."""
    here = [each for each in elements if each.index == index]
    return len(here) == 1 and returned.operands[index] is here[0] and counts[here[0]] == 1
