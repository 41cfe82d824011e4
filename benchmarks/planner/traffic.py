"""Memory traffic of a kernel of optimized HLO text.

A kernel reads the part of each input needed by its result (slices and gathers: as many elements as their result) and
writes its results; an update in place writes the update.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from benchmarks.planner.partitioned_text import Instruction

Body = dict[str, Instruction]

#: Opcodes with a part of their first operand for a result; they need no more of it.
_PARTS = frozenset({"slice", "dynamic-slice", "gather"})

#: Opcodes in need of all of their operands for any part of their result.
_WHOLE = frozenset({
    "dot", "convolution", "reduce-window", "select-and-scatter", "sort", "fusion", "custom-call", "scatter",
})  # fmt: skip


#: Kinds of fused kernels, by the first of these opcodes inside.
_KINDS = (
    "dot", "convolution", "scatter", "sort", "dynamic-update-slice", "reduce", "reduce-window", "transpose", "copy",
    "gather", "concatenate", "pad", "dynamic-slice", "slice",
)  # fmt: skip


def kind_of(body: Body) -> str:
    """Kind of a fused computation: the opcode of a move, reduction or product; else "fill" without parameters, or
    "elementwise"."""
    opcodes = {instruction.opcode for instruction in body.values()}
    item = next((kind for kind in _KINDS if kind in opcodes), None)
    return item or ("elementwise" if "parameter" in opcodes else "fill")


def count_fused_bytes(body: Body) -> int:
    """Bytes from and to memory of a fused computation's kernel."""
    root = next(instruction for instruction in body.values() if instruction.is_root)
    inputs = frozenset(name for name, instruction in body.items() if instruction.opcode == "parameter")
    return count_moved_bytes(body, root, inputs)


def count_moved_bytes(body: Body, root: Instruction, inputs: frozenset[str]) -> int:
    """Bytes from and to memory of a kernel from `inputs` to `root`."""
    results = [body[name] for name in root.operands] if root.opcode == "tuple" else [root]
    updated = {}  # result updated in place → the update
    for result in results:
        update = _skip_bitcasts(result, body, inputs)
        if update.name not in inputs and _is_in_place(update, body, inputs):
            updated[result.name] = update
    written = sum(
        _count_update_bytes(updated[result.name], body) if result.name in updated else result.size_bytes
        for result in results
    )
    needed = _find_needed_parts(body, root, inputs, frozenset(update.name for update in updated.values()))
    return written + round(sum(needed[name] * body[name].size_bytes for name in inputs if name in needed))


def _skip_bitcasts(value: Instruction, body: Body, inputs: frozenset[str]) -> Instruction:
    while value.opcode == "bitcast" and value.name not in inputs:
        value = body[value.operands[0]]
    return value


def _is_in_place(update: Instruction, body: Body, inputs: frozenset[str]) -> bool:
    """Whether an update is in place: its array is an input of the kernel."""
    if update.opcode not in ("dynamic-update-slice", "scatter"):
        return False
    return _skip_bitcasts(body[update.operands[0]], body, inputs).name in inputs


def _count_update_bytes(update: Instruction, body: Body) -> int:
    """Bytes written by an update in place; a scatter also reads its target elements."""
    if update.opcode == "dynamic-update-slice":
        return body[update.operands[1]].size_bytes
    return 2 * sum(body[name].size_bytes for name in update.operands[_count_arrays(update) + 1 :])


def _count_arrays(scatter: Instruction) -> int:
    return (len(scatter.operands) - 1) // 2


def _find_needed_parts(
    body: Body, root: Instruction, inputs: frozenset[str], in_place: frozenset[str]
) -> dict[str, float]:
    """name → its part needed by the kernel, at most 1; 1 for the root."""
    needed = {root.name: 1.0}
    for name in reversed(body):  # consumers stand below their operands
        part = needed.get(name, 0.0)
        if not part or name in inputs:
            continue
        for operand, share in _list_operand_parts(body[name], body, min(part, 1.0), name in in_place):
            needed[operand] = min(1.0, needed.get(operand, 0.0) + share)
    return needed


def _list_operand_parts(
    instruction: Instruction, body: Body, part: float, in_place: bool
) -> Iterator[tuple[str, float]]:
    """(operand, its part) needed for a part of an instruction."""
    untouched = ()
    if in_place:
        count = 1 if instruction.opcode == "dynamic-update-slice" else _count_arrays(instruction)
        untouched = instruction.operands[:count]
    for index, operand in enumerate(instruction.operands):
        if index < len(untouched):
            continue
        if instruction.opcode in _WHOLE:
            yield operand, 1.0
        elif instruction.opcode == "tuple" or (instruction.opcode == "dynamic-update-slice" and index):
            yield operand, part
        else:
            growth = _count_elements(instruction) / max(1, _count_elements(body[operand]))
            is_part = instruction.opcode in _PARTS and index == 0
            yield operand, min(1.0, part * (growth if is_part else max(1.0, growth)))


def _count_elements(instruction: Instruction) -> int:
    return prod(instruction.dims)
