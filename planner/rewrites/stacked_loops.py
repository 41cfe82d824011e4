"""Loops over layers: arrays read and written row by row, one row a trip.

`lax.scan` lowers to a `while` with loop-invariant stacked inputs. Trip i reads row `r(i)` of each and writes row
`r(i)` of its stacked results. r is evaluated for every trip: it is i, or, in the backward pass, L-1-i.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shardwright.hlo import ArrayShape, Instruction, TupleShape
from shardwright.planner.tuning import MAX_LAYERS

#: What hands an integer on.
_SAME = frozenset({"copy", "bitcast", "convert", "reshape"})

_INTEGER: Mapping[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "minimum": min,
    "maximum": max,
}
_COMPARED: Mapping[str, Callable[[int, int], bool]] = {
    "LT": lambda a, b: a < b,
    "LE": lambda a, b: a <= b,
    "GT": lambda a, b: a > b,
    "GE": lambda a, b: a >= b,
    "EQ": lambda a, b: a == b,
    "NE": lambda a, b: a != b,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedLoop:
    """A `while` over the rows of stacked arrays.

    loop: the instruction.
    rows: number of rows.
    is_descending: trip i is at row rows-1-i (else i).
    counter: the carried element that counts trips from 0.
    reads: loop-invariant elements read a row a trip.
    writes: elements written a row a trip.
    fixed: other invariant elements.
    threaded: other elements, computed by each trip.
    indices: per element in `reads` and `writes`, the body's instructions on its row.
    """

    loop: Instruction
    rows: int
    is_descending: bool
    counter: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    fixed: tuple[int, ...]
    threaded: tuple[int, ...]
    indices: Mapping[int, tuple[Instruction, ...]]

    def trips(self, first: int, stop: int) -> tuple[int, int]:
        """The trips at rows first … stop-1, as (first, stop)."""
        return (self.rows - stop, self.rows - first) if self.is_descending else (first, stop)


def match_stacked_loop(loop: Instruction) -> StackedLoop | None:
    """The loop over stacked arrays, or None for a loop that cannot be cut between trips."""
    (body,), (condition,) = loop.called["body"], loop.called["condition"]
    if not isinstance(loop.shape, TupleShape) or body.root.opcode != "tuple" or loop.operands[0].opcode != "tuple":
        return None
    if not all(isinstance(element, ArrayShape) for element in loop.shape.elements):
        return None
    bounds = _match_counter(loop, condition.root)
    if bounds is None:
        return None
    counter, rows = bounds
    users = _users(body.instructions)
    elements = {i.index: i for i in body.instructions if _is_element(i, body.parameters[0])}
    if len([i for i in body.instructions if _is_element(i, body.parameters[0])]) != len(elements):
        return None  # one element read under two names
    indices: dict[int, tuple[Instruction, ...]] = {}
    reads: list[int] = []
    writes: list[int] = []
    fixed: list[int] = []
    threaded: list[int] = []
    order: tuple[int, ...] | None = None
    for k, result in enumerate(body.root.operands):
        carried = elements.get(k)
        if k == counter:
            continue
        is_fixed = carried is not None and result is carried
        takers = () if carried is None else tuple(user for user in users.get(carried, ()) if user is not body.root)
        row_order = _row_order(takers, carried, rows, counter, result, is_fixed=is_fixed)
        if row_order is not None and (order is None or row_order == order):
            order = row_order
            indices[k] = takers
            (reads if is_fixed else writes).append(k)
        else:
            (
                fixed if is_fixed or (carried is None and _is_untouched(result, body.parameters[0], k)) else threaded
            ).append(k)
    if order is None:
        return None
    return StackedLoop(
        loop=loop,
        rows=rows,
        is_descending=order[0] != 0,
        counter=counter,
        reads=tuple(reads),
        writes=tuple(writes),
        fixed=tuple(fixed),
        threaded=tuple(threaded),
        indices=indices,
    )


def _is_element(instruction: Instruction, parameter: Instruction) -> bool:
    return instruction.opcode == "get-tuple-element" and instruction.operands[0] is parameter


def _is_untouched(result: Instruction, parameter: Instruction, k: int) -> bool:
    return _is_element(result, parameter) and result.index == k


def _users(instructions: list[Instruction]) -> dict[Instruction, list[Instruction]]:
    users: dict[Instruction, list[Instruction]] = {}
    for instruction in instructions:
        for operand in dict.fromkeys(instruction.operands):
            users.setdefault(operand, []).append(instruction)
    return users


def _match_counter(loop: Instruction, test: Instruction) -> tuple[int, int] | None:
    """(carried element, trips) of a loop whose counter runs from 0 in steps of 1 up to a constant."""
    (body,), (condition,) = loop.called["body"], loop.called["condition"]
    if test.opcode != "compare" or test.get("direction") != "LT":
        return None
    tested, bound = test.operands
    if not _is_element(tested, condition.parameters[0]) or bound.opcode != "constant":
        return None
    counter = tested.index
    start, step = loop.operands[0].operands[counter], body.root.operands[counter]
    limit = _value(bound, {})
    if limit is None or not 1 < limit <= MAX_LAYERS or _value(start, {}) != 0 or step.opcode != "add":
        return None
    element = next((i for i in body.instructions if _is_element(i, body.parameters[0]) and i.index == counter), None)
    if element is None or _value(step, {element: 0}) != 1 or _value(step, {element: 1}) != 2:
        return None
    return counter, limit


def _row_order(
    takers: tuple[Instruction, ...],
    carried: Instruction | None,
    rows: int,
    counter: int,
    result: Instruction,
    *,
    is_fixed: bool,
) -> tuple[int, ...] | None:
    """The row of a carried array each trip reads or writes; None for users of other rows."""
    if carried is None or not takers or not isinstance(carried.shape, ArrayShape):
        return None
    if not carried.shape.rank or carried.shape.dimensions[0] != rows:
        return None
    body_counter = None
    orders = set()
    for taker in takers:
        if not _takes_a_row(taker, carried) or (taker.opcode == "dynamic-update-slice") != (taker is result):
            return None
        starts = taker.operands[1:] if taker.opcode == "dynamic-slice" else taker.operands[2:]
        if any(_value(start, {}) != 0 for start in starts[1:]):
            return None
        body_counter = body_counter or _sibling(carried, counter, starts[0])
        if body_counter is None:
            return None
        orders.add(tuple(_value(starts[0], {body_counter: trip}) for trip in range(rows)))
    if len(orders) != 1 or (not is_fixed and not any(taker is result for taker in takers)):
        return None
    (order,) = orders
    ascending = tuple(range(rows))
    return order if order in (ascending, ascending[::-1]) else None  # type: ignore[return-value]


def _takes_a_row(taker: Instruction, carried: Instruction) -> bool:
    if taker.operands[0] is not carried or carried in taker.operands[1:]:
        return False
    row = {
        "dynamic-slice": taker.shape,
        "dynamic-update-slice": taker.operands[1].shape if taker.operands[1:] else None,
    }
    shape = row.get(taker.opcode)
    return (
        isinstance(shape, ArrayShape)
        and isinstance(carried.shape, ArrayShape)
        and shape.dimensions == (1, *carried.shape.dimensions[1:])
    )


def _sibling(carried: Instruction, counter: int, index: Instruction) -> Instruction | None:
    """The counter's element among an index's inputs."""
    todo, seen = [index], set()
    while todo:
        value = todo.pop()
        if _is_element(value, carried.operands[0]) and value.index == counter:
            return value
        if value not in seen:
            seen.add(value)
            todo += value.operands
    return None


def _value(instruction: Instruction, scalars: Mapping[Instruction, int]) -> int | None:
    """The integer (or truth value) of a scalar, from known other scalars."""
    if instruction in scalars:
        return scalars[instruction]
    if instruction.opcode == "constant":
        text = instruction.payload.strip()
        return {"true": 1, "false": 0}.get(text) if not text.lstrip("-").isdigit() else int(text)
    if instruction.opcode in _SAME:
        return _value(instruction.operands[0], scalars)
    values = [_value(operand, scalars) for operand in instruction.operands]
    if any(value is None for value in values):
        return None
    integers = [value for value in values if value is not None]
    if instruction.opcode in _INTEGER:
        return _INTEGER[instruction.opcode](*integers)
    if instruction.opcode == "compare":
        return int(_COMPARED[instruction.get("direction")](*integers))
    if instruction.opcode == "select":
        return integers[1] if integers[0] else integers[2]
    if instruction.opcode == "negate":
        return -integers[0]
    return None
