"""How often a loop runs: `for i in range(start, limit)` as JAX writes it, or XLA's own annotation."""

from __future__ import annotations

import re

from benchmarks.planner.partitioned_text import CountingError, Instruction, Module

_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_VIEWS = frozenset({"copy", "bitcast", "convert", "reshape"})


def trip_count(loop: Instruction, module: Module, home: str) -> int:
    """Runs of a while's body. Raises CountingError where start, step or limit is not in sight.

    home: the computation that holds the loop.
    """
    known = _KNOWN.search(loop.attributes)
    if known:
        return int(known[1])
    condition = module.computations[loop.attribute("condition")]
    root = _through(next(i for i in condition.values() if i.is_root), condition)
    if root.opcode != "compare" or "direction=LT" not in root.attributes:
        raise CountingError(f"loop {loop.name}: its condition is not i < limit")
    counter, limit = (_through(condition[name], condition) for name in root.operands)
    if counter.opcode != "get-tuple-element":
        raise CountingError(f"loop {loop.name}: its condition compares no carried value")
    index = int(counter.attribute("index"))
    outside = module.computations[home]
    start = _element(outside[loop.operands[0]], index, outside)
    stop = limit
    if limit.opcode == "get-tuple-element":
        stop = _element(outside[loop.operands[0]], int(limit.attribute("index")), outside)
    _require_step_of_one(loop, module, index)
    return max(0, _constant(stop, loop) - _constant(start, loop))


def _through(value: Instruction, body: dict[str, Instruction]) -> Instruction:
    while value.opcode in _VIEWS:
        value = body[value.operands[0]]
    return value


def _element(value: Instruction, index: int, body: dict[str, Instruction]) -> Instruction:
    value = _through(value, body)
    return _through(body[value.operands[index]], body) if value.opcode == "tuple" else value


def _constant(value: Instruction, loop: Instruction) -> int:
    if value.opcode != "constant" or not re.fullmatch(r"-?\d+", value.inside):
        raise CountingError(f"loop {loop.name}: {value.name} is no constant, so its trips are not known")
    return int(value.inside)


def _require_step_of_one(loop: Instruction, module: Module, index: int) -> None:
    body = module.computations[loop.attribute("body")]
    step = _element(next(i for i in body.values() if i.is_root), index, body)
    sides = [_through(body[name], body) for name in step.operands] if step.opcode == "add" else []
    if not any(side.opcode == "constant" and side.inside == "1" for side in sides):
        raise CountingError(f"loop {loop.name}: its counter does not grow by one")
