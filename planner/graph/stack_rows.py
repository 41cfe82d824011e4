"""Rows of stacks: what a loop takes of, or puts into, an array with one row a trip."""

from __future__ import annotations

from shardwright.hlo import Computation, Instruction, Module
from shardwright.planner.graph.trip_counts import TripCounter

#: Opcodes that take or write one row at a start, and the number of the first start among their operands.
_FIRST_START = {"dynamic-slice": 1, "dynamic-update-slice": 2}


def find_stack_rows(module: Module) -> frozenset[Instruction]:
    """Dynamic slices, and their updates, along a dimension with a row for each trip of their loop, one after the other:
    what `lax.scan` takes of its inputs, and stacks of its outputs.
    """
    sites: dict[Computation, list[Instruction]] = {}
    loops = [instruction for instruction in module.instructions() if instruction.opcode == "while"]
    for loop in loops:
        for computations in loop.called.values():
            for computation in computations:
                sites.setdefault(computation, []).append(loop)
    counter = TripCounter(sites)
    return frozenset(row for loop in loops for row in _rows_of(loop, counter))


def _rows_of(loop: Instruction, counter: TripCounter) -> list[Instruction]:
    takers = [taker for taker in loop.called["body"][0] if taker.opcode in _FIRST_START]
    trips = counter.trips(loop) if takers else None
    if trips is None:
        return []
    counted = _carried(loop.called["condition"][0].root, loop.called["condition"][0])
    return [taker for taker in takers if _is_stacked(taker, loop.called["body"][0], counted, trips.count)]


def _is_stacked(taker: Instruction, body: Computation, counted: set[int], trips: int) -> bool:
    first = _FIRST_START[taker.opcode]
    row = (taker if first == 1 else taker.operands[1]).shape.leaves[0].dimensions
    return any(
        size == 1 < whole == trips and _carried(start, body) & counted
        for start, size, whole in zip(
            taker.operands[first:], row, taker.operands[0].shape.leaves[0].dimensions, strict=False
        )
    )


def _carried(value: Instruction, computation: Computation) -> set[int]:
    """The carried elements that a scalar is computed from."""
    todo, seen, elements = [value], {value}, set()
    while todo:
        instruction = todo.pop()
        if instruction.opcode == "get-tuple-element" and instruction.operands[0] is computation.parameters[0]:
            elements.add(instruction.index)
            continue
        new = [operand for operand in instruction.operands if operand not in seen]
        seen.update(new)
        todo += new
    return elements
