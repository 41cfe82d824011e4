"""Arrays made of nothing: filled, counted, or of the shape of another."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from shardwright.client.frontends.torch.lowerings.registry import Call, lowers


@lowers(
    "zeros", "zeros_like", "new_zeros", "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty",
    "new_empty_strided", "_efficientzerotensor",
)  # fmt: skip
def _zeros(call: Call, *_: Any, **__: Any) -> Any:
    """Of memory without contents as well: zeros."""
    return jnp.zeros(call.shape, call.dtype)


@lowers("ones", "ones_like", "new_ones")
def _ones(call: Call, *_: Any, **__: Any) -> Any:
    return jnp.ones(call.shape, call.dtype)


@lowers("full", "full_like", "new_full")
def _full(call: Call, like: Any, *args: Any, fill_value: Any = None, **_: Any) -> Any:
    del like
    fill_value = args[-1] if args else fill_value
    return jnp.full(call.shape, jnp.asarray(fill_value).astype(call.dtype), call.dtype)


@lowers("scalar_tensor")
def _scalar_tensor(call: Call, value: Any, **_: Any) -> Any:
    return jnp.asarray(value).astype(call.dtype)


@lowers("fill")
def _fill(call: Call, x: Any, value: Any) -> Any:
    del x
    return jnp.broadcast_to(jnp.asarray(value).astype(call.dtype), call.shape)


@lowers("zero")
def _zero(call: Call, x: Any) -> Any:
    del x
    return jnp.zeros(call.shape, call.dtype)


@lowers("arange")
def _arange(call: Call, *args: Any, **_: Any) -> Any:
    start, _, step = (0, args[0], 1) if len(args) == 1 else (*args, 1)[:3]
    count = lax.iota(call.dtype if call.dtype.kind in "iuf" else jnp.float32, call.shape[0])
    scaled = count if step == 1 else count * jnp.asarray(step, count.dtype)
    return scaled if start == 0 else scaled + jnp.asarray(start, count.dtype)


@lowers("linspace")
def _linspace(call: Call, start: Any, end: Any, steps: int, **_: Any) -> Any:
    dtype = call.dtype if call.dtype.kind in "fV" else jnp.dtype("float64")
    return jnp.linspace(start, end, steps, dtype=dtype)


@lowers("eye")
def _eye(call: Call, *_: Any, **__: Any) -> Any:
    rows, columns = call.shape
    return jnp.eye(rows, columns, dtype=call.dtype)


@lowers("tril")
def _tril(call: Call, x: Any, diagonal: int = 0) -> Any:
    del call
    return jnp.tril(x, diagonal)


@lowers("triu")
def _triu(call: Call, x: Any, diagonal: int = 0) -> Any:
    del call
    return jnp.triu(x, diagonal)
