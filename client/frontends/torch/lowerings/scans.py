"""Running sums and the like, and orders along a dimension."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardwright.client.frontends.torch.lowerings.registry import Call, lowers


def _scan(name: str, function: Any) -> None:
    @lowers(name)
    def lower(call: Call, x: Any, dim: int, dtype: Any = None) -> Any:
        del dtype
        x = x.astype(call.dtype)
        return function(x, axis=dim % x.ndim) if x.ndim else x


_scan("cumsum", lax.cumsum)
_scan("cumprod", lax.cumprod)
_scan("logcumsumexp", lax.cumlogsumexp)


@lowers("cummax")
def _cummax(call: Call, x: Any, dim: int) -> Any:
    del call
    return _running_extreme(x, dim, lax.cummax)


@lowers("cummin")
def _cummin(call: Call, x: Any, dim: int) -> Any:
    del call
    return _running_extreme(x, dim, lax.cummin)


def _running_extreme(x: Any, dim: int, function: Any) -> Any:
    """Values, and the last position of each so far."""
    if not x.ndim:
        return x, jnp.zeros((), jnp.int64)
    axis = dim % x.ndim
    values = function(x, axis=axis)
    positions = lax.broadcasted_iota(jnp.int64, x.shape, axis)
    return values, lax.cummax(jnp.where(x == values, positions, 0), axis=axis)


@lowers("sort")
def _sort(call: Call, x: Any, dim: int = -1, descending: bool = False, *, stable: Any = None) -> Any:
    """By position of the overload: `sort.stable` has `stable` first, by name."""
    del call, stable
    if not x.ndim:
        return x, jnp.zeros((), jnp.int64)
    indices = jnp.argsort(x, axis=dim, stable=True, descending=descending)
    return jnp.take_along_axis(x, indices, axis=dim), indices


@lowers("argsort")
def _argsort(call: Call, x: Any, dim: int = -1, descending: bool = False, *, stable: Any = None) -> Any:
    del call, stable
    return jnp.argsort(x, axis=dim, stable=True, descending=descending) if x.ndim else jnp.zeros((), jnp.int64)


@lowers("topk")
def _topk(call: Call, x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    del call, sorted
    if not x.ndim:
        return x, jnp.zeros((), jnp.int64)
    last = jnp.moveaxis(x, dim, -1)
    if largest:
        values, indices = lax.top_k(last, k)
    else:
        indices = jnp.argsort(last, axis=-1, stable=True)[..., :k]
        values = jnp.take_along_axis(last, indices, axis=-1)
    return jnp.moveaxis(values, -1, dim), jnp.moveaxis(indices, -1, dim)


@lowers("searchsorted")
def _searchsorted(
    call: Call,
    edges: Any,
    x: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: Any = None,
    sorter: Any = None,
) -> Any:
    del call, out_int32
    side = side or ("right" if right else "left")
    if sorter is not None:
        edges = jnp.take_along_axis(edges, sorter, axis=-1)
    if edges.ndim == 1:
        return jnp.searchsorted(edges, x, side=side)
    rows, values = edges.reshape(-1, edges.shape[-1]), x.reshape(-1, x.shape[-1])
    return jax.vmap(lambda row, value: jnp.searchsorted(row, value, side=side))(rows, values).reshape(x.shape)


@lowers("bucketize")
def _bucketize(call: Call, x: Any, edges: Any, *, out_int32: bool = False, right: bool = False) -> Any:
    del call, out_int32
    return jnp.searchsorted(edges, x, side="right" if right else "left")


@lowers("median", "median.dim", "nanmedian", "nanmedian.dim")
def _median(call: Call, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    """The lower of two middle values, like PyTorch's."""
    is_nan_left_out = "nanmedian" in str(call.node.target)
    flat = x.reshape(-1) if dim is None else jnp.moveaxis(x, dim, -1) if x.ndim else x.reshape(1)
    indices = jnp.argsort(flat, axis=-1, stable=True)
    nans = jnp.isnan(flat).sum(-1, keepdims=True)
    count = flat.shape[-1] - nans
    middle = jnp.where(nans > 0, count if not is_nan_left_out else (count - 1) // 2, (count - 1) // 2)
    index = jnp.take_along_axis(indices, jnp.clip(middle, 0, flat.shape[-1] - 1), axis=-1)
    value = jnp.take_along_axis(flat, index, axis=-1)
    if dim is None:
        return value.reshape(())
    shape = tuple(call.result[0].shape)
    if keepdim and x.ndim:
        return jnp.moveaxis(value, -1, dim), jnp.moveaxis(index, -1, dim)
    return value.reshape(shape), index.reshape(shape)


@lowers("kthvalue")
def _kthvalue(call: Call, x: Any, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    shape = tuple(call.result[0].shape)
    if not x.ndim:
        return x, jnp.zeros((), jnp.int64)
    indices = lax.slice_in_dim(jnp.argsort(x, axis=dim, stable=True), k - 1, k, axis=dim % x.ndim)
    return jnp.take_along_axis(x, indices, axis=dim).reshape(shape), indices.reshape(shape)


@lowers("histc")
def _histc(call: Call, x: Any, bins: int = 100, min: Any = 0, max: Any = 0) -> Any:
    """Counts in equal bins; between the smallest and the largest element where both ends are equal."""
    x = x.reshape(-1)
    low, high = (jnp.min(x), jnp.max(x)) if min == max else (jnp.asarray(min, x.dtype), jnp.asarray(max, x.dtype))
    low, high = jnp.where(low == high, low - 1, low), jnp.where(low == high, high + 1, high)
    number = jnp.minimum(((x - low) / (high - low) * bins).astype(jnp.int64), bins - 1)
    is_inside = (x >= low) & (x <= high)
    return jnp.zeros(bins, call.dtype).at[jnp.where(is_inside, number, 0)].add(is_inside.astype(call.dtype))
