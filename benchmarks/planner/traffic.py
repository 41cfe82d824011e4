"""Bytes that a kernel of optimized HLO text reads from memory and writes to it.

It reads of each input the part that its result needs: slices and gathers need what they give. It writes its results;
an update in place writes the update.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from benchmarks.planner.partitioned_text import Instruction

Body = dict[str, Instruction]

#: Give a part of their first operand and need no more of it.
_PARTS = frozenset({"slice", "dynamic-slice", "gather"})

#: Need all of their operands for any part of their result.
_WHOLE = frozenset({
    "dot", "convolution", "reduce-window", "select-and-scatter", "sort", "fusion", "custom-call", "scatter",
})  # fmt: skip


#: What a fused kernel is called by, where one of these is in it: the first that is.
_KINDS = (
    "dot", "convolution", "scatter", "sort", "dynamic-update-slice", "reduce", "reduce-window", "transpose", "copy",
    "gather", "concatenate", "pad", "dynamic-slice", "slice",
)  # fmt: skip


def kind_of(body: Body) -> str:
    """What a fused computation does: moves, reductions and products by their opcode; else "fill" where it reads
    nothing, and "elementwise"."""
    opcodes = {instruction.opcode for instruction in body.values()}
    item = next((kind for kind in _KINDS if kind in opcodes), None)
    return item or ("elementwise" if "parameter" in opcodes else "fill")


def count_fused_bytes(body: Body) -> int:
    """Of the kernel that a fused computation is."""
    root = next(instruction for instruction in body.values() if instruction.is_root)
    return count_moved_bytes(body, root, frozenset(name for name, each in body.items() if each.opcode == "parameter"))


def count_moved_bytes(body: Body, root: Instruction, inputs: frozenset[str]) -> int:
    """Bytes from and to memory of the kernel that computes `root` from `inputs`."""
    results = [body[name] for name in root.operands] if root.opcode == "tuple" else [root]
    updated = {}  # in place → what is written
    for result in results:
        update = _through_bitcasts(result, body, inputs)
        if update.name not in inputs and _is_in_place(update, body, inputs):
            updated[result.name] = update
    written = sum(
        _updates_bytes(updated[result.name], body) if result.name in updated else result.size_bytes
        for result in results
    )
    needed = _bytes_needed(body, root, inputs, frozenset(update.name for update in updated.values()))
    return written + round(sum(needed[name] * body[name].size_bytes for name in inputs if name in needed))


def _through_bitcasts(value: Instruction, body: Body, inputs: frozenset[str]) -> Instruction:
    while value.opcode == "bitcast" and value.name not in inputs:
        value = body[value.operands[0]]
    return value


def _is_in_place(update: Instruction, body: Body, inputs: frozenset[str]) -> bool:
    """Whether an update of an array is made where it lies: the kernel gets it from memory, and hands it back."""
    if update.opcode not in ("dynamic-update-slice", "scatter"):
        return False
    return _through_bitcasts(body[update.operands[0]], body, inputs).name in inputs


def _updates_bytes(update: Instruction, body: Body) -> int:
    """Written by an update in place; what a scatter combines with is read there first."""
    if update.opcode == "dynamic-update-slice":
        return body[update.operands[1]].size_bytes
    return 2 * sum(body[name].size_bytes for name in update.operands[_arrays(update) + 1 :])


def _arrays(scatter: Instruction) -> int:
    return (len(scatter.operands) - 1) // 2


def _bytes_needed(body: Body, root: Instruction, inputs: frozenset[str], in_place: frozenset[str]) -> dict[str, float]:
    """name → part of it, at most 1, that the kernel needs; all of its root."""
    needed = {root.name: 1.0}
    for name in reversed(body):  # readers stand below what they read
        part = needed.get(name, 0.0)
        if not part or name in inputs:
            continue
        for operand, share in _shares(body[name], body, min(part, 1.0), name in in_place):
            needed[operand] = min(1.0, needed.get(operand, 0.0) + share)
    return needed


def _shares(instruction: Instruction, body: Body, part: float, in_place: bool) -> Iterator[tuple[str, float]]:
    """Parts of its operands that a part of an instruction needs."""
    left_alone = ()
    if in_place:
        count = 1 if instruction.opcode == "dynamic-update-slice" else _arrays(instruction)
        left_alone = instruction.operands[:count]
    for place, operand in enumerate(instruction.operands):
        if place < len(left_alone):
            continue
        if instruction.opcode in _WHOLE:
            yield operand, 1.0
        elif instruction.opcode == "tuple" or (instruction.opcode == "dynamic-update-slice" and place):
            yield operand, part
        else:
            growth = _elements(instruction) / max(1, _elements(body[operand]))
            is_part = instruction.opcode in _PARTS and place == 0
            yield operand, min(1.0, part * (growth if is_part else max(1.0, growth)))


def _elements(instruction: Instruction) -> int:
    return prod(instruction.dims)
