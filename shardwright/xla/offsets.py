"""Slice positions of each device: the offsets of a dynamic-slice in numbers, one per device.

The partitioner computes offsets from `partition-id` with tables and integer arithmetic; both are evaluated here for all
devices at once.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

from shardwright.hlo import Instruction
from shardwright.xla.reduce_scatter import Users, sources
from shardwright.xla.tuning import OFFSET_DEPTH

#: One value per device, or None where the expression is not understood.
PerDevice = list[int] | None

_SAME = frozenset({"bitcast", "reshape", "copy", "convert", "broadcast", "get-tuple-element", "parameter"})
_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "divide": operator.floordiv,
    "remainder": operator.mod,
    "minimum": min,
    "maximum": max,
}
_INTEGER = re.compile(r"-?\d+")


def slice_offsets(dynamic_slice: Instruction, device_count: int, users: Users) -> list[tuple[int, ...]] | None:
    """Per device, the offsets of a dynamic-slice in elements; None if they depend on more than the device."""
    columns = []
    for index in dynamic_slice.operands[1:]:
        column = _evaluate(index, device_count, users, OFFSET_DEPTH)
        if column is None:
            return None
        columns.append(column)
    return list(zip(*columns, strict=True)) if columns else None


def _evaluate(value: Instruction, device_count: int, users: Users, depth: int) -> PerDevice:
    if depth == 0:
        return None
    if value.opcode == "partition-id":
        return list(range(device_count))
    if value.opcode == "constant":
        numbers = _numbers(value)
        return numbers * device_count if len(numbers) == 1 else None
    operands = sources(value, users)
    if value.opcode in _SAME and len(operands) == 1:
        return _evaluate(operands[0], device_count, users, depth - 1)
    if value.opcode == "dynamic-slice" and value.operands[0].opcode == "constant":
        return _look_up(value, device_count, users, depth)
    if value.opcode in _ARITHMETIC and len(operands) == 2:
        first, second = (_evaluate(operand, device_count, users, depth - 1) for operand in operands)
        if first is None or second is None or (value.opcode in ("divide", "remainder") and 0 in second):
            return None
        return [_ARITHMETIC[value.opcode](a, b) for a, b in zip(first, second, strict=True)]
    return None


def _look_up(value: Instruction, device_count: int, users: Users, depth: int) -> PerDevice:
    """One element of a constant table."""
    table = _numbers(value.operands[0])
    index = _evaluate(value.operands[1], device_count, users, depth - 1) if len(value.operands) == 2 else None
    if index is None or value.shape.size_bytes != value.operands[0].shape.size_bytes // max(1, len(table)):
        return None
    return [table[min(max(i, 0), len(table) - 1)] for i in index]


def _numbers(constant: Instruction) -> list[int]:
    return [int(number) for number in _INTEGER.findall(str(constant.payload))]
