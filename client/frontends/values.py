"""Values of arguments in a program's own types, 64-bit ones included, whatever JAX's settings."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from shardwright.client.array_specs import ArraySpec, ArrayType, array_type
from shardwright.client.arrays import RemoteArray
from shardwright.client.refusals import refusal
from shardwright.dtypes import to_dtype, to_element_type
from shardwright.errors import ArgumentError, ShardwrightError, UnsupportedProgramError

_OTHER_SHAPE = "pass this shape, or write the program anew for the other one: it is made for fixed shapes"


def to_argument(leaf: Any, kind: ArrayType, spec: ArraySpec) -> Any:
    """A handle, or the numpy array of any other value, as an argument of this type.

    Numbers are converted where a program of this type would have them: integers that fit to other integers, integers to
    floats, floats to floats of another width. spec: of `kind`.

    Raises ArgumentError on another shape or type, and a refusal of what is no array.
    """
    if isinstance(leaf, RemoteArray):
        if leaf.spec is not spec:
            _check_type(array_type(kind.name, leaf.spec), kind)
        return leaf
    value = _to_array(leaf, kind.name)
    if value.shape != kind.shape:
        raise _mismatch(_describe(value), kind, _OTHER_SHAPE)
    dtype = to_dtype(kind.element_type)
    return value if value.dtype == dtype else _convert(value, dtype, kind)


def check_type(leaf: Any, kind: ArrayType) -> None:
    """Raises ArgumentError unless a type, anything with `shape` and `dtype`, is an argument's."""
    shape, dtype = tuple(leaf.shape), leaf.dtype
    if shape != kind.shape or np.dtype(dtype) != to_dtype(kind.element_type):
        raise _mismatch(f"{dtype}{list(shape)}", kind, "")


def is_type(leaf: Any) -> bool:
    """Whether a leaf is a type without an array."""
    return isinstance(leaf, jax.ShapeDtypeStruct | jax.core.ShapedArray)


def _check_type(actual: ArrayType, kind: ArrayType) -> None:
    if actual.shape != kind.shape:
        raise _mismatch(actual.type_text, kind, _OTHER_SHAPE)
    if actual.element_type != kind.element_type:
        raise _mismatch(actual.type_text, kind, "pass an array of this type; convert it in the program that makes it")


def _to_array(leaf: Any, name: str) -> np.ndarray:
    if isinstance(leaf, np.ndarray):
        value = leaf
    else:
        try:
            if isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                leaf = jax.random.key_data(leaf)
            value = np.asarray(leaf)
        except Exception:  # whatever another library raises where it has no array to give
            raise _name(refusal(leaf), name) from None
    if value.dtype.kind not in "biufcV" or value.dtype.fields is not None:
        raise _name(refusal(leaf), name)
    try:
        to_element_type(value.dtype)
    except UnsupportedProgramError:
        raise _name(refusal(leaf), name) from None
    return value


def _convert(value: np.ndarray, dtype: np.dtype, kind: ArrayType) -> np.ndarray:
    here, there = _class_of(value.dtype), _class_of(dtype)
    if here > there:
        raise _mismatch(_describe(value), kind, f"pass x.astype({str(dtype)!r}) if that is meant")
    if there == here == _INTEGER and value.size:
        limits = jax.numpy.iinfo(dtype)  # type: ignore[no-untyped-call]
        low, high = int(value.min()), int(value.max())
        if low < limits.min or high > limits.max:
            values = f"its values go from {low} to {high}, those of the type from {limits.min} to {limits.max}"
            raise _mismatch(_describe(value), kind, values)
    return value.astype(dtype)


_BOOLEAN, _INTEGER, _FLOAT, _COMPLEX = range(4)


def _class_of(dtype: np.dtype) -> int:
    for number, parent in ((_BOOLEAN, np.bool_), (_INTEGER, np.integer), (_FLOAT, np.floating)):
        if jax.numpy.issubdtype(dtype, parent):
            return number
    return _COMPLEX


def _describe(value: np.ndarray) -> str:
    return ArrayType(name="", element_type=to_element_type(value.dtype), shape=value.shape).type_text


def _mismatch(actual_text: str, kind: ArrayType, remedy: str) -> ArgumentError:
    return ArgumentError(f"{actual_text} was passed for {kind.type_text}", where=kind.name, remedy=remedy)


def _name(error: ShardwrightError, name: str) -> ShardwrightError:
    return type(error)(error.message, where=name, remedy=error.remedy)
