"""Attributes that count elements, for an instruction on one micro-batch."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from shardwright.attention import read_call
from shardwright.cost.kernels import count_parts
from shardwright.hlo import ArrayShape, Attribute, Instruction
from shardwright.kernels import PRICE_ATTRIBUTE, RULE_ATTRIBUTE, read_price
from shardwright.planner.rewrites import edit


def local_attributes(
    instruction: Instruction, operands: Sequence[Instruction], result: ArrayShape
) -> dict[str, Attribute]:
    """The attributes of `instruction` for these operands and this first result, both of one micro-batch.

    Shapes carry most changes; these opcodes have sizes in attributes too.
    """
    rewritten = _REWRITTEN.get(instruction.opcode)
    if rewritten is None:
        return dict(instruction.attributes)
    return {**instruction.attributes, **{a.name: a for a in rewritten(instruction, operands, result)}}


_Rewrite = Callable[[Instruction, Sequence[Instruction], ArrayShape], list[Attribute]]


def _dims(instruction: Instruction) -> tuple[int, ...]:
    return instruction.shape.leaves[0].dimensions


def _slice(instruction: Instruction, operands: Sequence[Instruction], result: ArrayShape) -> list[Attribute]:
    """A cut dimension is sliced in full, or with one element in every `stride`."""
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
    """A cut dimension of the operand is a batching one, with one element per slice, or sliced in full."""
    sizes = [
        min(size, now) if size == before else size
        for size, before, now in zip(
            instruction.get("slice_sizes"), _dims(instruction.operands[0]), _dims(operands[0]), strict=True
        )
    ]
    return [edit.int_list("slice_sizes", sizes)]


def _convolution(instruction: Instruction, operands: Sequence[Instruction], result: ArrayShape) -> list[Attribute]:
    """The window has the kernel's size (a kernel gradient's kernel is an image); groups shrink with their dimension."""
    labels, window = instruction.get("dim_labels"), instruction.get("window")
    before, now = _dims(instruction.operands[0]), _dims(operands[0])
    attributes = []
    for name, dim in (("feature_group_count", labels.input_feature), ("batch_group_count", labels.input_batch)):
        groups = instruction.get(name, 1)
        if groups > 1 and now[dim] < before[dim]:
            attributes.append(edit.attribute(name, str(groups * now[dim] // before[dim])))
    if window is not None:
        sizes = tuple(_dims(operands[1])[dim] for dim in labels.kernel_spatial)
        if sizes != window.sizes:
            attributes.append(edit.window(replace(window, sizes=sizes)))
    return attributes


def _running(instruction: Instruction, operands: Sequence[Instruction], result: ArrayShape) -> list[Attribute]:
    """A full-length window stays full-length; no other window spans a cut dimension."""
    window = instruction.get("window")
    sizes, low, high = list(window.sizes), list(window.padding_low), list(window.padding_high)
    for dim, (before, now) in enumerate(zip(_dims(instruction.operands[0]), _dims(operands[0]), strict=True)):
        if now < before and window.sizes[dim] == before > 1:
            sizes[dim] = now
            low[dim], high[dim] = (now - 1 if padding else 0 for padding in (low[dim], high[dim]))
    changed = replace(window, sizes=tuple(sizes), padding_low=tuple(low), padding_high=tuple(high))
    return [] if changed == window else [edit.window(changed)]


_CONSTRAINED = re.compile(r"\[([0-9,]*)\]")
_RULE_DIMS = re.compile(r"\[([^\]]*)\]")


def _custom_call(instruction: Instruction, operands: Sequence[Instruction], result: ArrayShape) -> list[Attribute]:
    """Operand layouts, Shardy's rule and an attention's configuration name the operands' sizes."""
    attention = read_call(instruction)
    if attention is not None:
        texts = attention.part([_dims(operand) for operand in operands]).attribute_texts()
        return [edit.attribute(name, text) for name, text in texts.items()]
    attributes = []
    if "operand_layout_constraints" in instruction.attributes:
        leaves = iter([leaf for operand in operands for leaf in operand.shape.leaves])
        text = instruction.attributes["operand_layout_constraints"].text
        local = _CONSTRAINED.sub(lambda _: f"[{','.join(map(str, next(leaves).dimensions))}]", text)
        attributes.append(edit.attribute("operand_layout_constraints", local))
    said = instruction.get("frontend_attributes", {})
    if RULE_ATTRIBUTE in said or PRICE_ATTRIBUTE in said:
        attributes.append(_local_frontend(instruction, operands))
    return attributes


def _local_frontend(instruction: Instruction, operands: Sequence[Instruction]) -> Attribute:
    """What a call says of itself, of one micro-batch: its rule with the local sizes of the operands, its part of a
    price."""
    attribute = instruction.attributes["frontend_attributes"]
    said, text = attribute.value, attribute.text
    price = read_price(instruction) if PRICE_ATTRIBUTE in said else None
    if price is not None:
        shapes = [leaf.dimensions for operand in operands for leaf in operand.shape.leaves]
        local = price.divide(max(count_parts(instruction, shapes), 1.0))
        text = text.replace(said[PRICE_ATTRIBUTE], local.to_text())
    if RULE_ATTRIBUTE in said:
        rule = said[RULE_ATTRIBUTE]
        text = text.replace(rule, _local_rule(rule, operands))
    return edit.attribute("frontend_attributes", text)


def _local_rule(rule: str, operands: Sequence[Instruction]) -> str:
    """`#sdy.op_sharding_rule<([i, j])->([i, k]) {i=4, …}>` with the local sizes of the operands."""
    sizes: dict[str, int] = {}
    for operand, names in zip(operands, _RULE_DIMS.findall(rule), strict=False):
        sizes |= zip([name.strip() for name in names.split(",")], _dims(operand), strict=False)
    return re.sub(r"\b([a-z]+(?:_\d+)?)=(\d+)", lambda m: f"{m[1]}={sizes.get(m[1], m[2])}", rule)


_REWRITTEN: dict[str, _Rewrite] = {
    "convolution": _convolution,
    "custom-call": _custom_call,
    "dynamic-slice": _dynamic_slice,
    "gather": _gather,
    "reduce-window": _running,
    "slice": _slice,
}
