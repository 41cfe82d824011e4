"""Zeros of any element type, and arrays padded with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwright.xla import private


def zero_constant(element_type: Any) -> Any:
    """A scalar zero at the current insertion point."""
    ir = private.ir()
    zero = ir.Operation.parse(
        f"stablehlo.constant dense<{_zero_text(element_type)}> : {ir.RankedTensorType.get([], element_type)}"
    )
    ir.InsertionPoint.current.insert(zero)
    return zero.results[0]


def pad_with_zeros(value: Any, shape: Sequence[int]) -> Any:
    """The value, filled with zeros at the end of its dimensions up to `shape`, at the current insertion point."""
    high = [size - has for size, has in zip(shape, value.type.shape, strict=True)]
    if not any(high):
        return value
    none = [0] * len(high)
    zero = zero_constant(value.type.element_type)
    return private.dialect("stablehlo").PadOp(value, zero, none, high, none).result


def _zero_text(element_type: Any) -> str:
    text = str(element_type)
    if text.startswith("complex"):
        return "(0.0, 0.0)"
    if text == "i1":
        return "false"
    return "0" if text.startswith(("i", "ui", "si")) else "0.0"
