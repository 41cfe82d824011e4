"""How often a loop runs, where its condition compares a counter with a constant."""

from __future__ import annotations

from shardwright.hlo import Instruction

_SWAPPED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE"}


def trip_count(loop: Instruction) -> int | None:
    """Executions of `loop`'s body: first value, constant step and constant limit of its counter; else None.

    Reads what `lax.scan` and `fori_loop` lower to: `compare(element i of the parameter, constant)` as the
    condition's root and `add(element i, constant)` as element i of the body's root.
    """
    (body,), (condition,) = loop.called["body"], loop.called["condition"]
    test = _through(condition.root)
    if test.opcode != "compare":
        return None
    left, right = (_through(operand) for operand in test.operands)
    direction = test.get("direction", "")
    if left.opcode == "constant":
        left, right, direction = right, left, _SWAPPED.get(direction, "")
    limit = _integer(right)
    if left.opcode != "get-tuple-element" or limit is None:
        return None
    first, step = _integer(_element(loop.operands[0], left.index)), _step(body.root, left.index)
    if first is None or step is None or step == 0:
        return None
    return _count(first, limit, step, direction)


def _count(first: int, limit: int, step: int, direction: str) -> int | None:
    distance = limit - first
    if direction == "NE":
        return distance // step if distance % step == 0 and distance // step >= 0 else None
    if direction in ("LE", "GE"):
        distance += 1 if direction == "LE" else -1
    if (direction in ("LT", "LE")) != (step > 0) or direction not in ("LT", "LE", "GT", "GE"):
        return None
    return max(0, -(-distance // step))


def _through(instruction: Instruction) -> Instruction:
    """What makes the value: copies are looked through."""
    while instruction.opcode in ("copy", "bitcast") and instruction.operands:
        instruction = instruction.operands[0]
    return instruction


def _element(value: Instruction, index: int) -> Instruction | None:
    value = _through(value)
    return _through(value.operands[index]) if value.opcode == "tuple" else None


def _integer(instruction: Instruction | None) -> int | None:
    if instruction is None or instruction.opcode != "constant":
        return None
    try:
        return int(instruction.payload.strip())
    except ValueError:
        return None


def _step(root: Instruction, index: int) -> int | None:
    """The constant that the body adds to element `index` of what it carries."""
    update = _element(root, index)
    if update is None or update.opcode not in ("add", "subtract"):
        return None
    left, right = (_through(operand) for operand in update.operands)
    if update.opcode == "add" and left.opcode == "constant":
        left, right = right, left
    step = _integer(right)
    if left.opcode != "get-tuple-element" or left.index != index or step is None:
        return None
    return step if update.opcode == "add" else -step
