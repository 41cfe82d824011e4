"""Where an operand of a product comes from: through views, widening conversions, scalar factors and repeated heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shardwright.hlo import Instruction
from shardwright.planner.attention.axes import (
    CutAxisError,
    Label,
    Labels,
    NoLabelsError,
    flat,
    reshape_labels,
    unpermuted,
)
from shardwright.planner.attention.flow import Flow
from shardwright.planner.attention.tuning import MAX_ORIGIN_STEPS
from shardwright.planner.attention.whole import UnknownValueError, literal

_HALF = ("bf16", "f16")


@dataclass(frozen=True, slots=True)
class Operand:
    """factor · value, with the labels of its dimensions. repeated: axes along which the operand repeats it."""

    value: Instruction
    labels: Labels
    factor: float = 1.0
    repeated: Label = ()

    @property
    def element_type(self) -> str:
        return self.value.shape.leaves[0].element_type

    @property
    def axes(self) -> Label:
        return flat(self.labels)


def trace_operand(
    value: Instruction, labels: Labels, sizes: Mapping[str, int], flow: Flow, heads: frozenset[str]
) -> Operand:
    """The operand in the narrowest type that it comes in, and as near as possible to what makes it.

    heads: axes along which it may be repeated. Raises CutAxisError where it is along a part of one.
    """
    operand = Operand(flow.source(value), labels)
    best = operand
    for _ in range(MAX_ORIGIN_STEPS):
        try:
            step = _step(operand, sizes, flow, heads)
        except CutAxisError as cut:
            if cut.axis in heads and flow.source(operand.value.operands[0]).opcode == "broadcast":
                raise
            break
        except NoLabelsError:
            break
        if step is None:
            break
        operand = step
        if operand.factor == 1.0 or operand.element_type in _HALF:
            best = operand
    return best


def _step(operand: Operand, sizes: Mapping[str, int], flow: Flow, heads: frozenset[str]) -> Operand | None:
    value, labels = operand.value, operand.labels
    opcode = value.opcode
    sources = [flow.source(each) for each in value.operands]
    if opcode == "transpose":
        return replace(operand, value=sources[0], labels=unpermuted(labels, value.get("dimensions")))
    if opcode == "reshape":
        inner = _without_reshapes(sources[0], flow)
        dims = [each.shape.leaves[0].dimensions for each in (value, inner)]
        return replace(operand, value=inner, labels=reshape_labels(labels, dims[0], dims[1], sizes))
    if opcode == "copy":
        return replace(operand, value=sources[0])
    if opcode == "broadcast":
        return _unrepeat(operand, sources[0], heads)
    if opcode == "convert":
        source, target = (each.shape.leaves[0].element_type for each in (sources[0], value))
        half = source in _HALF and target in ("f32", "f64")
        widens = half or source == target or (source, target) == ("f32", "f64")
        return replace(operand, value=sources[0]) if widens else None
    if opcode in ("multiply", "divide") and operand.element_type not in _HALF:
        return _scaled(operand, sources, flow)
    return None


def _without_reshapes(value: Instruction, flow: Flow) -> Instruction:
    """What a value is the elements of: axes that one reshape cuts and the next joins are whole."""
    while value.opcode == "reshape":
        value = flow.source(value.operands[0])
    return value


def _unrepeat(operand: Operand, source: Instruction, heads: frozenset[str]) -> Operand | None:
    along = list(operand.value.get("dimensions", ()))
    added = [label for dim, label in enumerate(operand.labels) if dim not in along]
    repeated = flat(added)
    if not source.shape.leaves[0].rank or not heads.issuperset(repeated):
        return None
    labels = tuple(operand.labels[dim] for dim in along)
    return replace(operand, value=source, labels=labels, repeated=(*operand.repeated, *repeated))


def _scaled(operand: Operand, sources: list[Instruction], flow: Flow) -> Operand | None:
    first, second = sources
    number = scalar(second, flow)
    if number is None and operand.value.opcode == "multiply":
        first, second = second, first
        number = scalar(second, flow)
    if not number:
        return None
    factor = operand.factor / number if operand.value.opcode == "divide" else operand.factor * number
    return replace(operand, value=first, factor=factor)


def scalar(value: Instruction, flow: Flow) -> float | None:
    """The one number of which all elements of a value are copies; None for others."""
    value = flow.origin(value)
    while value.opcode in ("broadcast", "convert", "reshape", "copy") and value.operands:
        value = flow.origin(value.operands[0])
    if value.opcode != "constant" or any(size > 1 for size in value.shape.leaves[0].dimensions):
        return None
    try:
        return float(literal(value).ravel()[0])
    except UnknownValueError:
        return None
