"""Elementwise operations of HLO on numpy arrays. Floating-point numbers are float64, integers int64: what is asked is
what a program computes, not how it rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "add": lambda a, b: a | b if a.dtype == bool else a + b,
    "subtract": np.subtract,
    "multiply": lambda a, b: a & b if a.dtype == bool else a * b,
    "divide": lambda a, b: a / b if a.dtype.kind == "f" else np.trunc(a / np.where(b == 0, 1, b)).astype(np.int64),
    "remainder": lambda a, b: np.fmod(a, np.where(b == 0, 1, b)) if a.dtype.kind == "i" else np.fmod(a, b),
    "maximum": np.maximum,
    "minimum": np.minimum,
    "power": lambda a, b: np.power(a, b) if a.dtype.kind == "f" else np.power(a.astype(np.float64), b).astype(np.int64),
    "negate": np.negative,
    "abs": np.abs,
    "sign": np.sign,
    "exponential": np.exp,
    "exponential-minus-one": np.expm1,
    "log": np.log,
    "log-plus-one": np.log1p,
    "logistic": lambda a: 1 / (1 + np.exp(-a)),
    "tanh": np.tanh,
    "sqrt": np.sqrt,
    "rsqrt": lambda a: 1 / np.sqrt(a),
    "floor": np.floor,
    "ceil": np.ceil,
    "cosine": np.cos,
    "sine": np.sin,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "is-finite": np.isfinite,
    "select": np.where,
    "clamp": lambda low, a, high: np.minimum(np.maximum(low, a), high),
    "copy": lambda a: a,
    "reduce-precision": lambda a: a,
    "optimization-barrier": lambda a: a,
    "opt-barrier": lambda a: a,
}

_COMPARISONS: Mapping[str, Callable[..., Any]] = {
    "EQ": np.equal, "NE": np.not_equal, "LT": np.less, "LE": np.less_equal, "GT": np.greater, "GE": np.greater_equal,
}  # fmt: skip

#: Of reductions by their region's operation: the sum over given axes.
REDUCTIONS: Mapping[str, Callable[..., Any]] = {
    "add": np.sum, "maximum": np.max, "minimum": np.min, "multiply": np.prod, "and": np.all, "or": np.any,
}  # fmt: skip

ELEMENTWISE = frozenset({*OPERATIONS, "compare", "convert"})


def compare(direction: str, first: Array, second: Array) -> Array:
    result: Array = _COMPARISONS[direction](first, second)
    return result


def convert(value: Array, element_type: str) -> Array:
    """A value as a number of the type's kind."""
    if element_type == "pred":
        return np.not_equal(value, 0)
    if element_type[0] in "su":
        return value if value.dtype == np.int64 else np.trunc(value).astype(np.int64)
    return value if value.dtype.kind == "f" else np.asarray(value, np.float64)
