"""What a reduction computes, for which types, and the same on the host: the rules of every `allreduce`.

| operation | types | result |
|---|---|---|
| sum, product | integers, floats, complex | the input's type; arrays of integers wrap around, as numpy's |
| average | floats, complex | the input's type |
| min, max | booleans (all, any), integers, floats | the input's type; NaN where any rank has one |
| Adasum | floats | the input's type; dot products in at least 32 bits |

Anything else is refused, never converted. Python's integers have no width to wrap around in: a sum or product of them
that leaves 64 bits is refused. Short floats (float16, bfloat16) are added up in 32 bits on the host.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from shardwright.errors import CollectiveError, OptionError
from shardwright.ranks.adasum import adasum_rows


class ReduceOp(enum.Enum):
    """How the values of all ranks become one. Functions take the member or its value: `op="sum"`."""

    AVERAGE = "average"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"
    ADASUM = "adasum"


#: Types that are reduced; their place here is their number on the wire.
REDUCIBLE: tuple[np.dtype, ...] = tuple(
    np.dtype(name)
    for name in (
        "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
        "float16", ml_dtypes.bfloat16, "float32", "float64", "complex64", "complex128",
    )
)  # fmt: skip

_SHORT_FLOATS = (np.dtype("float16"), np.dtype(ml_dtypes.bfloat16))


def to_op(op: ReduceOp | str) -> ReduceOp:
    """The member of a name. Raises OptionError."""
    try:
        return op if isinstance(op, ReduceOp) else ReduceOp(op)
    except ValueError:
        names = ", ".join(repr(member.value) for member in ReduceOp)
        raise OptionError(f"{op!r} is no reduction", where="op", remedy=f"one of {names}") from None


def is_float(dtype: np.dtype) -> bool:
    """Whether a type is a real floating-point type, bfloat16 included."""
    return dtype.kind == "f" or dtype == np.dtype(ml_dtypes.bfloat16)


def check_reducible(op: ReduceOp, dtype: np.dtype, where: str) -> None:
    """Raises CollectiveError for a type outside of an operation's types."""
    if dtype not in REDUCIBLE:
        raise CollectiveError(f"values of type {dtype} cannot be reduced", where=where, remedy="cast them first")
    problem = _problem(op, dtype)
    if problem:
        message, remedy = problem
        raise CollectiveError(message.format(dtype), where=where, remedy=remedy)


def _problem(op: ReduceOp, dtype: np.dtype) -> tuple[str, str] | None:
    if dtype == np.dtype(bool):
        if op in (ReduceOp.MIN, ReduceOp.MAX):
            return None
        return f"{op.value} of {{}} is not defined", "op='min' is all of them, op='max' any; or cast to int32"
    if op is ReduceOp.AVERAGE and dtype.kind in "iu":
        return "the average of {} is no integer", "cast to a float type, or take op='sum' and divide"
    if dtype.kind == "c" and op in (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.ADASUM):
        return f"{op.value} of {{}} is not defined", "reduce the real and the imaginary part"
    if op is ReduceOp.ADASUM and not is_float(dtype):
        return "Adasum of {} is not defined", "cast to a float type, or take op='sum'"
    return None


def reduce_rows(stacked: np.ndarray, op: ReduceOp) -> np.ndarray:
    """The reduction over dimension 0, the ranks in their order: the same bits wherever it is computed."""
    dtype = stacked.dtype
    if op is ReduceOp.ADASUM:
        return adasum_rows(stacked)
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        return np.asarray((np.minimum if op is ReduceOp.MIN else np.maximum).reduce(stacked, axis=0))
    wide = np.dtype("float32") if dtype in _SHORT_FLOATS else dtype
    with np.errstate(over="ignore", invalid="ignore"):
        if op is ReduceOp.PRODUCT:
            return np.asarray(np.multiply.reduce(stacked, axis=0, dtype=wide)).astype(dtype, copy=False)
        total = np.asarray(np.add.reduce(stacked, axis=0, dtype=wide))
        if op is ReduceOp.AVERAGE:
            total = divide(total, len(stacked))
        return total.astype(dtype, copy=False)


def divide(array: np.ndarray, divisor: int, out: np.ndarray | None = None) -> np.ndarray:
    """`array / divisor` in the array's own type. Integers are divided by 1 alone, which leaves any array as it is."""
    if divisor == 1:
        if out is None:
            return array
        out[...] = array
        return out
    if array.dtype not in _SHORT_FLOATS:
        return np.asarray(np.divide(array, array.dtype.type(divisor), out=out))
    quotient = (array.astype("float32") / np.float32(divisor)).astype(array.dtype)
    if out is None:
        return np.asarray(quotient)
    out[...] = quotient
    return out


def neutral(op: ReduceOp, dtype: np.dtype) -> np.ndarray:
    """The scalar that a reduction leaves unchanged: what a rank without data gives."""
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        if dtype == np.dtype(bool):
            return np.asarray(op is ReduceOp.MIN)
        if is_float(dtype):
            return np.asarray(np.inf if op is ReduceOp.MIN else -np.inf, dtype)
        limits = np.iinfo(dtype)
        return np.asarray(limits.max if op is ReduceOp.MIN else limits.min, dtype)
    return np.asarray(1 if op is ReduceOp.PRODUCT else 0, dtype)


def check_factor(factor: float, dtype: np.dtype, where: str) -> None:
    """Raises CollectiveError for a factor on integers, which it would round."""
    if factor != 1.0 and dtype.kind != "c" and not is_float(dtype):
        raise CollectiveError(f"a scale factor on {dtype} would round", where=where, remedy="cast to a float type")


def scale(array: Any, factor: float) -> Any:
    """`array * factor` in the array's own type; an array of numpy or JAX, or a traced one."""
    if factor == 1.0:
        return array
    product = array * np.asarray(factor).astype(array.dtype)
    return np.asarray(product) if isinstance(array, np.ndarray) else product


# ---- Python's integers -----------------------------------------------------------
def check_number(values: Sequence[int], op: ReduceOp, where: str) -> None:
    """Raises CollectiveError where the sum or product of every rank's integer leaves 64 bits."""
    if op not in _EXACT:
        return
    exact = _EXACT[op](values)
    if not -(1 << 63) <= exact < 1 << 63:
        raise CollectiveError(
            f"the {op.value} of all ranks, {exact}, has over 64 bits", where=where, remedy=_WIDE_REMEDY
        )


def check_bounds(bounds: Sequence[int], op: ReduceOp, where: str) -> None:
    """The same where only the largest magnitude at each rank is at hand: raises where the result may leave 64 bits."""
    if op in _EXACT and _EXACT[op]([max(1, bound) for bound in bounds]) >= 1 << 63:
        raise CollectiveError(
            f"the {op.value} of all ranks may have over 64 bits: integers up to {max(bounds)}",
            where=where,
            remedy=_WIDE_REMEDY,
        )


_EXACT: dict[ReduceOp, Callable[[Sequence[int]], int]] = {ReduceOp.SUM: sum, ReduceOp.PRODUCT: math.prod}
_WIDE_REMEDY = "gather them with allgather_object, or reduce a numpy array, which wraps around"
