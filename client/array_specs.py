"""Types of arrays, as clients and as programs see them, and their values on this machine.

To the client an argument or a result has the type of its `jax.Array` (`ArraySpec`), which may be a PRNG key's. A
program knows element types and dimensions (`ArrayType`). 64-bit types are kept, whatever `jax_enable_x64` says; only
values of unknown type follow it.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import dtypes

from shardwright.client.arrays import RemoteArray
from shardwright.client.refusals import is_too_wide, refusal
from shardwright.dtypes import to_dtype, to_element_type
from shardwright.xla import private


@dataclass(frozen=True, slots=True, eq=False)
class ArraySpec:
    """Type of one argument or result in JAX; `dtype` may be a PRNG key's.

    Made by `array_spec` only: equal types are the same object. The thousand types of a call are hashed and compared by
    identity.
    """

    shape: tuple[int, ...]
    dtype: Any
    weak_type: bool

    @property
    def is_key(self) -> bool:
        return not isinstance(self.dtype, np.dtype) and bool(jax.numpy.issubdtype(self.dtype, dtypes.prng_key))

    @property
    def aval(self) -> jax.ShapeDtypeStruct:
        return _aval(self.shape, self.dtype, weak_type=self.weak_type)


@functools.cache
def _intern_spec(shape: tuple[int, ...], dtype: Any, weak_type: bool) -> ArraySpec:
    return ArraySpec(shape, dtype, weak_type)


def array_spec(shape: tuple[int, ...], dtype: Any, weak_type: bool = False) -> ArraySpec:
    """The one ArraySpec of these values."""
    return _intern_spec(shape, dtype, weak_type)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayType:
    """A flat argument or result in the HLO text: name, HLO element type, shape.

    A PRNG key appears by its `uint32` data.
    """

    name: str
    element_type: str
    shape: tuple[int, ...]

    @property
    def type_text(self) -> str:
        """As HLO writes it: `f32[8,16]`."""
        return f"{self.element_type}[{','.join(map(str, self.shape))}]"


def spec_of(leaf: Any) -> ArraySpec:
    """Type of an argument leaf: numpy and JAX arrays, PRNG keys, Python scalars, types.

    Raises `refusal` on a leaf JAX cannot trace either.
    """
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return spec_of_aval(leaf)
    try:
        aval = jax.typeof(leaf)
    except (TypeError, ValueError, OverflowError):
        raise refusal(leaf) from None
    if type(aval) is not jax.core.ShapedArray or isinstance(leaf, jax.core.Tracer) or is_too_wide(aval.dtype):
        raise refusal(leaf)
    return spec_of_aval(aval)


def spec_of_handle(handle: RemoteArray) -> ArraySpec:
    """`spec_of` a handle. Raises `refusal` when JAX computes with narrower types."""
    if is_too_wide(handle.spec.dtype):
        raise refusal(handle)
    return handle.spec


def spec_of_value(leaf: Any) -> ArraySpec:
    """`spec_of` a leaf with contents here. Raises `refusal` on any other."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise refusal(leaf)
    spec = spec_of(leaf)
    if isinstance(leaf, jax.Array) and (leaf.is_deleted() or not leaf.is_fully_addressable):
        raise refusal(leaf)
    return spec


def type_of(leaf: Any) -> ArraySpec:
    """Type of a leaf of a call: a handle's, or `spec_of` of other leaves."""
    return spec_of_handle(leaf) if type(leaf) is RemoteArray else spec_of(leaf)


def type_of_value(leaf: Any) -> ArraySpec:
    """`type_of` a leaf with contents."""
    return spec_of_handle(leaf) if type(leaf) is RemoteArray else spec_of_value(leaf)


def spec_of_aval(aval: Any) -> ArraySpec:
    """Type of an abstract value of JAX."""
    return array_spec(tuple(aval.shape), aval.dtype, bool(getattr(aval, "weak_type", False)))


def host_value(leaf: Any, spec: ArraySpec) -> np.ndarray:
    """The bytes of an argument leaf in the program's form: key data of a key, else its array."""
    if spec.is_key:
        return np.asarray(jax.random.key_data(leaf))
    return np.asarray(leaf, dtype=spec.dtype)


def physical_shape(spec: ArraySpec) -> tuple[int, ...]:
    """Shape in the program: a PRNG key's `uint32` words form its last dimension."""
    return tuple(_key_data(spec).shape) if spec.is_key else spec.shape


def result_value(data: np.ndarray, spec: ArraySpec) -> Any:
    """Fetched contents converted to `jax.jit`'s result; of a key the key."""
    is_wide = not spec.is_key and spec.dtype.itemsize > 4
    with jax.enable_x64(True) if is_wide else contextlib.nullcontext():
        value = jax.numpy.asarray(data)
    if spec.is_key:
        return jax.random.wrap_key_data(value, impl=_key_impl(spec.dtype))
    return private.make_weakly_typed(value) if spec.weak_type else value


@functools.lru_cache(maxsize=256)
def _key_data(spec: ArraySpec) -> Any:
    return jax.eval_shape(jax.random.key_data, _aval(spec.shape, spec.dtype))


def key_impl_name(spec: ArraySpec) -> str:
    """JAX's name of a PRNG key's implementation, e.g. "threefry2x32"."""
    return str(_key_impl(spec.dtype))


def spec_of_stored(element_type: str, shape: tuple[int, ...], *, key_impl: str, is_weak: bool) -> ArraySpec:
    """Type of an array with this form in programs; of a PRNG key when `key_impl` names its implementation."""
    if not key_impl:
        return array_spec(shape, to_dtype(element_type), is_weak)
    dtype = jax.eval_shape(lambda: jax.random.key(0, impl=key_impl)).dtype
    words = len(_key_data(array_spec((), dtype)).shape)
    return array_spec(shape[: len(shape) - words], dtype)


@functools.lru_cache(maxsize=16)
def _key_impl(dtype: Any) -> Any:
    key_impls: list[Any] = []
    jax.eval_shape(lambda key: key_impls.append(jax.random.key_impl(key)), _aval((), dtype))
    return key_impls[0]


def _aval(shape: tuple[int, ...], dtype: Any, *, weak_type: bool = False) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, weak_type=weak_type)  # type: ignore[no-untyped-call]


def array_type(name: str, spec: ArraySpec) -> ArrayType:
    """Program form of an array of this type."""
    dtype = np.dtype("uint32") if spec.is_key else spec.dtype
    return ArrayType(name=name, element_type=to_element_type(dtype), shape=physical_shape(spec))
