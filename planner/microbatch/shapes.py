"""Attributes that count elements, for an instruction whose operands and result are one micro-batch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from shardwright.hlo import ArrayShape, Attribute, Instruction, format_shape
from shardwright.planner.rewrites import edit


def local_attributes(
    instruction: Instruction, operands: Sequence[Instruction], result: ArrayShape
) -> dict[str, Attribute]:
    """The attributes of `instruction` with these operands and this first result, both of one micro-batch.

    Shapes say most of what changes; these opcodes say sizes in attributes too.
    """
    rewritten = _REWRITTEN.get(instruction.opcode)
    if rewritten is None:
        return dict(instruction.attributes)
    return {**instruction.attributes, **{a.name: a for a in rewritten(instruction, operands, result)}}


_Rewrite = Callable[[Instruction, Sequence[Instruction], ArrayShape], list[Attribute]]


def _dims(instruction: Instruction) -> tuple[int, ...]:
    return instruction.shape.leaves[0].dimensions


def _slice(instruction: Instruction, operands: Sequence[Instruction], result: ArrayShape) -> list[Attribute]:
    """A dimension that is cut is taken in full, or one element in every `stride`."""
    ranges = [
        (start, limit, stride) if now == before else (start, start + (now - 1) * stride + 1, stride)
        for (start, limit, stride), now, before in zip(
            instruction.get("slice"), result.dimensions, _dims(instruction), strict=True
        )
    ]
    return [edit.slice_ranges(ranges)]


def _dynamic_slice(instruction: Instruction, operands: Sequence[Instruction], result: ArrayShape) -> list[Attribute]:
    return [edit.int_list("dynamic_slice_sizes", result.dimensions)]


def _gather(instruction: Instruction, operands: Sequence[Instruction], result: ArrayShape) -> list[Attribute]:
    """A dimension of the operand that is cut is a batching one, of which one element is taken, or taken in full."""
    sizes = [
        min(size, now) if size == before else size
        for size, before, now in zip(
            instruction.get("slice_sizes"), _dims(instruction.operands[0]), _dims(operands[0]), strict=True
        )
    ]
    return [edit.int_list("slice_sizes", sizes)]


def _convolution(instruction: Instruction, operands: Sequence[Instruction], result: ArrayShape) -> list[Attribute]:
    """Where a kernel's image dimension is cut (it is an image, in a kernel's gradient) the window is as large."""
    window = instruction.get("window")
    if window is None:
        return []
    kernel = _dims(operands[1])
    sizes = tuple(kernel[dim] for dim in instruction.get("dim_labels").kernel_spatial)
    return [] if sizes == window.sizes else [edit.window(replace(window, sizes=sizes))]


def _custom_call(instruction: Instruction, operands: Sequence[Instruction], result: ArrayShape) -> list[Attribute]:
    if "operand_layout_constraints" not in instruction.attributes:
        return []
    shapes = ", ".join(format_shape(operand.shape) for operand in operands)
    return [edit.attribute("operand_layout_constraints", f"{{{shapes}}}")]


_REWRITTEN: dict[str, _Rewrite] = {
    "convolution": _convolution,
    "custom-call": _custom_call,
    "dynamic-slice": _dynamic_slice,
    "gather": _gather,
    "slice": _slice,
}
