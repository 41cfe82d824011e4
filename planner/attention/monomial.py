"""Values as a number times powers of other values: through products, quotients and views."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwright.hlo import Instruction
from shardwright.planner.attention.axes import CutAxisError, Labels, NoLabelsError, reshape_labels, unpermuted
from shardwright.planner.attention.flow import Flow
from shardwright.planner.attention.operands import scalar
from shardwright.planner.attention.tuning import MAX_DEPTH

#: A value by its number, and the labels of its dimensions.
_Base = tuple[int, Labels]


@dataclass(frozen=True, slots=True)
class Monomial:
    """factor · Π base ^ exponent."""

    factor: float = 1.0
    exponents: Mapping[_Base, int] = field(default_factory=dict)

    def __mul__(self, other: Monomial) -> Monomial:
        return self._combined(other, 1)

    def __truediv__(self, other: Monomial) -> Monomial:
        return self._combined(other, -1)

    def _combined(self, other: Monomial, sign: int) -> Monomial:
        exponents = dict(self.exponents)
        for base, exponent in other.exponents.items():
            exponents[base] = exponents.get(base, 0) + sign * exponent
        whole = {base: exponent for base, exponent in exponents.items() if exponent}
        return Monomial(self.factor * other.factor**sign, whole)


def monomial(value: Instruction, labels: Labels, sizes: Mapping[str, int], flow: Flow, depth: int = 0) -> Monomial:
    """A value, whose dimensions have labels, as a monomial."""
    value = flow.source(value)
    try:
        inner = _inner(value, labels, sizes, flow) if depth < MAX_DEPTH else None
    except (CutAxisError, NoLabelsError):
        inner = None
    if inner is None:
        number = scalar(value, flow)
        base = flow.number(value), tuple(label for label in labels if label)
        return Monomial(number) if number else Monomial(1.0, {base: 1})
    parts = [monomial(operand, each, sizes, flow, depth + 1) for operand, each in inner]
    if value.opcode == "negate":
        return Monomial(-1.0) * parts[0]
    if value.opcode == "multiply":
        return parts[0] * parts[1]
    return parts[0] / parts[1] if value.opcode == "divide" else parts[0]


def _inner(
    value: Instruction, labels: Labels, sizes: Mapping[str, int], flow: Flow
) -> list[tuple[Instruction, Labels]] | None:
    """The operands of which it is a product, with their labels; None for other operations."""
    if value.opcode in ("multiply", "divide", "negate", "convert", "copy"):
        return [(operand, labels) for operand in value.operands]
    if value.opcode == "transpose":
        return [(value.operands[0], unpermuted(labels, value.get("dimensions")))]
    if value.opcode == "reshape":
        source = flow.source(value.operands[0]).shape.leaves[0].dimensions
        return [(value.operands[0], reshape_labels(labels, value.shape.leaves[0].dimensions, source, sizes))]
    if value.opcode == "broadcast" and flow.source(value.operands[0]).opcode != "constant":
        return [(value.operands[0], tuple(labels[dim] for dim in value.get("dimensions", ())))]
    return None
