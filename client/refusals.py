"""Refusal of values unfit to be a program's arguments, with a remedy, by their kind.

`jax.jit` takes arrays, numbers and PRNG keys. Anything else is classified here only once it has been refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from numbers import Number
from typing import Any

import jax
import numpy as np

from shardwright.errors import ArrayError, ShardwrightError, UnsupportedProgramError

#: Remedy of what no program can take.
OUT_OF_STEP = "keep it out of the step"


def is_too_wide(dtype: Any) -> bool:
    """Whether an array has 64 bits and JAX computes with 32: its type would change in tracing."""
    return dtype.itemsize >= 8 and isinstance(dtype, np.dtype) and jax.dtypes.canonicalize_dtype(dtype) != dtype


def refusal(leaf: Any) -> ShardwrightError:
    """The error of a leaf that is no argument of a program."""
    if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and leaf.is_deleted():
        return ArrayError(
            f"this jax.Array of shape {list(leaf.shape)} is deleted",
            remedy="pass the result that the call returned it was donated to",
        )
    what, remedy = next(described for described in (kind(leaf) for kind in _KINDS) if described is not None)
    return UnsupportedProgramError(f"{what} is no argument of a program", remedy=remedy)


def kind_name(leaf: Any) -> str:
    """What a value is, in words."""
    if isinstance(leaf, np.ndarray):
        return f"a numpy array of {leaf.dtype}"
    if callable(leaf):
        return f"a function ({getattr(leaf, '__qualname__', type(leaf).__name__)})"
    return f"a value of type {type(leaf).__name__}"


# ---- kinds: (what, remedy) of the leaves that they know, in the order in which they are asked ----------------


def _tracer(leaf: Any) -> tuple[str, str] | None:
    if not isinstance(leaf, jax.core.Tracer):
        return None
    remedy = "call the step outside jax.jit, jax.grad, jax.vmap and the like, or parallelize the function that calls it"
    return f"a value that JAX is tracing ({jax.typeof(leaf)})", remedy


def _abstract(leaf: Any) -> tuple[str, str] | None:
    if not isinstance(leaf, jax.ShapeDtypeStruct | jax.core.ShapedArray):
        return None
    remedy = "pass an array; step.lower and step.compile take types"
    return f"the type {leaf.dtype}{list(leaf.shape)} without an array", remedy


def _mutable(leaf: Any) -> tuple[str, str] | None:
    if not isinstance(leaf, jax.Ref):
        return None
    return "a mutable array (jax.Ref)", "pass its value, ref[...], and return the new one"


def _wide(leaf: Any) -> tuple[str, str] | None:
    if not isinstance(leaf, jax.Array) or not is_too_wide(leaf.dtype):
        return None
    remedy = "call the step with jax_enable_x64, as what made the array was called, or give it a narrower type first"
    return f"an array of {leaf.dtype}, while jax_enable_x64 is off,", remedy


def _spread(leaf: Any) -> tuple[str, str] | None:
    if not isinstance(leaf, jax.Array):
        return None
    remedy = "pass the whole value: jax.experimental.multihost_utils.process_allgather(x, tiled=True)"
    return "a jax.Array that lies in several processes", remedy


def _numpy(leaf: Any) -> tuple[str, str] | None:
    if isinstance(leaf, np.ma.MaskedArray):
        return "a masked numpy array", "pass x.filled(0) and, as an argument of its own, ~np.ma.getmaskarray(x)"
    if not isinstance(leaf, np.ndarray | np.generic):
        return None
    dtype = leaf.dtype
    if dtype.names is not None:
        return f"a numpy array of records {dtype}", "pass its fields: {name: x[name] for name in x.dtype.names}"
    what = f"a numpy {'array of ' if isinstance(leaf, np.ndarray) else ''}{dtype}"
    if dtype.kind == "O":
        return "a numpy array of objects", _stacking_remedy(leaf)
    if dtype.kind in "Mm":
        return what, "pass numbers, e.g. (x - x.min()) / np.timedelta64(1, 's')" if dtype.kind == "M" else (
            "pass numbers, e.g. x / np.timedelta64(1, 's')"
        )
    if dtype.kind in "USV":
        return what, f"encode it as integers, or {OUT_OF_STEP}"
    if not dtype.isnative:
        return f"{what}, of the other byte order", "pass x.astype(x.dtype.newbyteorder('='))"
    narrower = "np.complex64" if dtype.kind == "c" else "np.float32"
    return what, f"pass x.astype({narrower})"


def _stacking_remedy(array: Any) -> str:
    shapes = {np.shape(item) for item in array.flat} if all(_is_numeric(item) for item in array.flat) else set()
    if len(shapes) == 1:
        return "pass numbers of one type, e.g. np.asarray(x.tolist(), np.float32)"
    if shapes:
        return "pad its elements to one shape and np.stack them, or pass a list of arrays"
    return f"pass numbers, or {OUT_OF_STEP}"


def _is_numeric(item: Any) -> bool:
    try:
        return np.asarray(item).dtype.kind in "biufc"
    except ValueError:  # ragged
        return False


def _too_large(leaf: Any) -> tuple[str, str] | None:
    if not isinstance(leaf, int):
        return None
    remedy = "set jax_enable_x64, or pass it as a float or as several integers"
    return f"the integer {leaf if leaf.bit_length() < 256 else '…'}, which does not fit the integers of JAX,", remedy


def _foreign_array(leaf: Any) -> tuple[str, str] | None:
    what = f"an array of another library ({type(leaf).__module__.partition('.')[0]}: {type(leaf).__name__})"
    if hasattr(leaf, "__jax_array__"):
        return (
            f"a value of type {type(leaf).__name__}, with __jax_array__,",
            "pass jnp.asarray(x), or register its class as a pytree",
        )
    if isinstance(leaf, type) or not (hasattr(leaf, "__array__") or hasattr(leaf, "__dlpack__")):
        return None
    if type(leaf).__module__.partition(".")[0] == "torch":
        return what, "pass x.detach().cpu().numpy()"
    return what, "pass np.asarray(x)"


def _text(leaf: Any) -> tuple[str, str] | None:
    if not isinstance(leaf, str | bytes | bytearray | memoryview):
        return None
    return f"a {type(leaf).__name__}", OUT_OF_STEP


def _function(leaf: Any) -> tuple[str, str] | None:
    if not callable(leaf):
        return None
    return kind_name(leaf), f"{OUT_OF_STEP}; a pytree's class can hold it as a static field, jax.tree_util.Partial too"


def _collection(leaf: Any) -> tuple[str, str] | None:
    name = type(leaf).__name__
    if isinstance(leaf, Mapping):
        return f"a {name}, which is no pytree,", "pass dict(x)"
    if isinstance(leaf, Iterator):
        return f"a {name}, which yields its values once,", "pass what it yields, e.g. next(x), or list(x)"
    if isinstance(leaf, Iterable):
        return f"a {name}, which is no pytree,", "pass an array, a list or a tuple of arrays"
    return None


def _other(leaf: Any) -> tuple[str, str] | None:
    if isinstance(leaf, Number):
        return kind_name(leaf), "pass float(x) or int(x)"
    return kind_name(leaf), f"{OUT_OF_STEP}, or register its class as a pytree (jax.tree_util.register_dataclass)"


_KINDS: tuple[Callable[[Any], tuple[str, str] | None], ...] = (
    _tracer, _abstract, _mutable, _wide, _spread, _numpy, _too_large, _foreign_array, _text, _function, _collection,
    _other,
)  # fmt: skip
