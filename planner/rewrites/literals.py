"""Scalar literals of HLO text: conversions to other types."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardwright.dtypes import to_dtype
from shardwright.errors import UnsupportedProgramError
from shardwright.hlo.shapes import ELEMENT_BITS

_BOOLEANS = {"true": True, "false": False}


def convert_literal(literal: str, source: str, target: str) -> str | None:
    """The literal after `convert`; None: no single defined number of a real type."""
    if source == target:
        return literal
    value = _number(literal, source)
    if value is None or target[0] == "c":
        return None
    if target == "pred":
        return "true" if value != 0 else "false"
    if target[0] in "su":
        bits = ELEMENT_BITS[target]
        low, high = (0, 2**bits - 1) if target[0] == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        if not np.isfinite(float(value)) or not low <= int(value) <= high:
            return None
        return str(int(value))
    with np.errstate(over="ignore"):
        return _text(value.astype(to_dtype(target)))


def bitcast_literal(literal: str, source: str, target: str) -> str | None:
    """The literal of the same bits after `bitcast-convert`; None for different sizes or shared bits."""
    value = _number(literal, source)
    whole_bytes = ELEMENT_BITS[source] == ELEMENT_BITS[target] >= 8
    if value is None or not whole_bytes or "pred" in (source, target) or target[0] == "c":
        return None
    bits = value.view(to_dtype(target))
    return None if np.isnan(bits.astype(np.float64)) else _text(bits)


def negate_literal(literal: str, element_type: str) -> str | None:
    """The literal of `-x`."""
    value = None if element_type == "pred" else _number(literal, element_type)
    with np.errstate(over="ignore"):  # the negative of the lowest integer is itself
        return None if value is None else _text(np.negative(value))


def _number(literal: str, element_type: str) -> Any:
    """A literal in numpy form, without dimensions; None: complex, no number, or of no numpy type."""
    literal = literal.strip()
    try:
        if literal in _BOOLEANS:
            return np.array(_BOOLEANS[literal])
        value = int(literal) if literal.lstrip("-").isdigit() and element_type[0] in "sup" else float(literal)
        return np.array(value).astype(to_dtype(element_type)) if value == value else None
    except (ValueError, OverflowError, UnsupportedProgramError):
        return None


def _text(value: Any) -> str:
    dtype = np.asarray(value).dtype
    if dtype.kind in "iu" or dtype.name.startswith(("int", "uint")):
        return str(int(value))
    return repr(float(value))
