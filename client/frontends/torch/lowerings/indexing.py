"""Reading and writing by index."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from shardwright.client.frontends.torch.lowerings.registry import Call, is_array, lowers, widen
from shardwright.errors import UnsupportedProgramError

_IN_BOUNDS = "promise_in_bounds"


@lowers("embedding")
def _embedding(
    call: Call, weight: Any, ids: Any, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Any:
    del call, padding_idx, scale_grad_by_freq
    _refuse_sparse(sparse)
    return weight.at[ids].get(mode=_IN_BOUNDS, wrap_negative_indices=False)


def _refuse_sparse(sparse: bool) -> None:
    if sparse:
        raise UnsupportedProgramError(
            "an embedding is made with sparse=True", remedy="make it with sparse=False: servers keep dense gradients"
        )


@lowers("nonzero_static")
def _nonzero(call: Call, x: Any, *, size: int, fill_value: int = -1) -> Any:
    del call
    return jnp.stack(jnp.nonzero(x, size=size, fill_value=fill_value), axis=-1)


@lowers("repeat_interleave.Tensor")
def _repeat_interleave(call: Call, repeats: Any, *, output_size: int) -> Any:
    del call
    return jnp.repeat(jnp.arange(repeats.shape[0]), repeats, total_repeat_length=output_size)


@lowers("embedding_dense_backward")
def _embedding_backward(
    call: Call, grad: Any, ids: Any, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Any:
    """Rows added up by id, none for the padding."""
    grad = widen(grad)
    if scale_grad_by_freq:
        counts = jnp.zeros(num_weights, grad.dtype).at[ids].add(1, mode=_IN_BOUNDS)
        grad = grad / counts[ids][..., None]
    if padding_idx >= 0:
        grad = jnp.where((ids == padding_idx)[..., None], jnp.zeros((), grad.dtype), grad)
    zeros = jnp.zeros(call.shape, grad.dtype)
    return zeros.at[ids].add(grad, mode=_IN_BOUNDS, wrap_negative_indices=False)


@lowers("index", "_unsafe_index")
def _index(call: Call, x: Any, indices: Sequence[Any]) -> Any:
    del call
    return x[_index_tuple(indices)]


def _index_tuple(indices: Sequence[Any]) -> tuple[Any, ...]:
    """`x[i, :, j]` as ATen passes it: None is a whole dimension."""
    return tuple(slice(None) if index is None else index for index in indices)


@lowers("index_put", "_unsafe_index_put", "_index_put_impl")
def _index_put(call: Call, x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False, *_: Any) -> Any:
    del call
    values = values.astype(x.dtype)
    mask = next((index for index in indices if is_array(index) and index.dtype == jnp.bool_), None)
    if mask is not None:
        return _put_by_mask(x, indices, mask, values, accumulate)
    target = x.at[_index_tuple(indices)]
    return target.add(values) if accumulate else target.set(values)


def _put_by_mask(x: Any, indices: Sequence[Any], mask: Any, values: Any, accumulate: bool) -> Any:
    at = next(n for n, index in enumerate(indices) if index is mask)
    others = [n for n, index in enumerate(indices) if index is not None and n != at]
    if others or values.size not in (1, *x.shape[at + mask.ndim :][-1:]) or (values.size > 1 and values.ndim != 1):
        raise UnsupportedProgramError(
            "elements chosen by a mask are set to values of their own: how many depends on the mask's values",
            remedy="use torch.where(mask, values, x), or masked_fill",
        )
    wide = mask.reshape((1,) * at + mask.shape + (1,) * (x.ndim - at - mask.ndim))
    return jnp.where(wide, x + values if accumulate else values, x)


@lowers("index_select")
def _index_select(call: Call, x: Any, dim: int, index: Any) -> Any:
    if not x.ndim:
        return x
    return jnp.take(x, index.reshape(-1), axis=dim, mode="clip").reshape(call.shape)


@lowers("gather")
def _gather(call: Call, x: Any, dim: int, index: Any, *, sparse_grad: bool = False) -> Any:
    del sparse_grad
    if not call.shape or not x.ndim:
        return x.reshape(-1)[index.reshape(-1)].reshape(call.shape)
    x = _cut_to(x, index.shape, dim)
    return jnp.take_along_axis(x, index, axis=dim, mode=_IN_BOUNDS)


def _cut_to(x: Any, shape: Sequence[int], dim: int) -> Any:
    """`x` without the elements beyond `shape` in the dimensions that are not indexed."""
    dim %= x.ndim
    limits = [size if n == dim else shape[n] for n, size in enumerate(x.shape)]
    return lax.slice(x, [0] * x.ndim, limits)


def _places(index: Any, dim: int) -> tuple[Any, ...]:
    """Indices of `x.at` for each element of a scatter along `dim`."""
    dim %= index.ndim
    return tuple(index if n == dim else lax.broadcasted_iota(index.dtype, index.shape, n) for n in range(index.ndim))


_REDUCTIONS = {"add": "add", "sum": "add", "multiply": "multiply", "prod": "multiply", "amax": "max", "amin": "min"}


@lowers("scatter", "scatter_add", "scatter_reduce")
def _scatter(
    call: Call, x: Any, dim: int, index: Any, source: Any = None, reduce: Any = None, *, include_self: bool = True,
    src: Any = None, value: Any = None,
) -> Any:  # fmt: skip
    source = next(candidate for candidate in (source, src, value) if candidate is not None)
    name = str(call.node.target)
    reduce = "sum" if "scatter_add" in name else reduce
    shape = x.shape
    if not x.ndim:
        x, index = x.reshape(1), index.reshape(1)
    index = index.reshape(index.shape or (1,))
    if is_array(source) and source.ndim:
        source = lax.slice(source, [0] * source.ndim, index.shape)
    else:
        source = jnp.broadcast_to(jnp.asarray(source), index.shape)
    source = source.astype(x.dtype)
    return _combine(x, _places(index, dim), source, reduce, include_self).reshape(shape)


def _combine(x: Any, places: tuple[Any, ...], source: Any, reduce: Any, include_self: bool) -> Any:
    """Elements of `source` put to, or combined with, those of `x`."""
    if reduce is None:
        return x.at[places].set(source, mode=_IN_BOUNDS)
    if reduce == "mean":
        return _scatter_mean(x, places, source, include_self)
    if not include_self:
        x = x.at[places].set(_neutral(reduce, x.dtype), mode=_IN_BOUNDS)
    return getattr(x.at[places], _REDUCTIONS[reduce])(source, mode=_IN_BOUNDS)


def _scatter_mean(x: Any, places: tuple[Any, ...], source: Any, include_self: bool) -> Any:
    count = jnp.zeros(x.shape, x.dtype).at[places].add(1, mode=_IN_BOUNDS)
    if include_self:
        count += 1
    else:
        x = jnp.where(count > 0, jnp.zeros((), x.dtype), x)
    total = x.at[places].add(source, mode=_IN_BOUNDS)
    count = jnp.maximum(count, 1)
    return total / count if x.dtype.kind in "fVc" else jnp.floor_divide(total, count)


def _neutral(reduce: str, dtype: Any) -> Any:
    if reduce in ("amax", "amin"):
        if dtype == jnp.bool_:
            return reduce == "amin"
        infinite = dtype.kind in "fV"
        limits: Any = None if infinite else np.iinfo(dtype)
        if reduce == "amax":
            return -jnp.inf if infinite else limits.min
        return jnp.inf if infinite else limits.max
    return 1 if _REDUCTIONS[reduce] == "multiply" else 0


@lowers("index_add")
def _index_add(call: Call, x: Any, dim: int, index: Any, source: Any, *, alpha: Any = 1) -> Any:
    del call
    source = source if not is_array(alpha) and alpha == 1 else source * alpha
    return _along(x, dim, index, source.astype(x.dtype), "add")


@lowers("index_copy")
def _index_copy(call: Call, x: Any, dim: int, index: Any, source: Any) -> Any:
    del call
    return _along(x, dim, index, source.astype(x.dtype), "set")


@lowers("index_fill")
def _index_fill(call: Call, x: Any, dim: int, index: Any, value: Any) -> Any:
    del call
    return _along(x, dim, index, jnp.asarray(value).astype(x.dtype), "set")


def _along(x: Any, dim: int, index: Any, source: Any, method: str) -> Any:
    if not x.ndim:
        return getattr(x.reshape(1).at[index.reshape(-1)], method)(source.reshape(-1)).reshape(())
    where = (slice(None),) * (dim % x.ndim) + (index.reshape(-1),)
    return getattr(x.at[where], method)(source)


@lowers("index_reduce")
def _index_reduce(
    call: Call, x: Any, dim: int, index: Any, source: Any, reduce: str, *, include_self: bool = True
) -> Any:
    del call
    shape, x = x.shape, x.reshape(x.shape or (1,))
    source = source.reshape(source.shape or (1,)).astype(x.dtype)
    along = [1] * x.ndim
    along[dim] = -1
    places = _places(jnp.broadcast_to(index.reshape(along), source.shape), dim)
    return _combine(x, places, source, reduce, include_self).reshape(shape)


@lowers("put")
def _put(call: Call, x: Any, index: Any, source: Any, accumulate: bool = False) -> Any:
    target = x.reshape(-1).at[index.reshape(-1)]
    source = source.reshape(-1).astype(x.dtype)
    return (target.add(source) if accumulate else target.set(source)).reshape(call.shape)


@lowers("masked_scatter")
def _masked_scatter(call: Call, x: Any, mask: Any, source: Any) -> Any:
    mask = jnp.broadcast_to(mask, call.shape)
    x = jnp.broadcast_to(x, call.shape)
    place = jnp.maximum(jnp.cumsum(mask.reshape(-1), dtype=jnp.int64) - 1, 0)
    chosen = jnp.take(source.reshape(-1), place, mode="clip").reshape(call.shape)
    return jnp.where(mask, chosen.astype(x.dtype), x)


@lowers("masked_scatter_backward")
def _masked_scatter_backward(call: Call, grad: Any, mask: Any, sizes: Any) -> Any:
    """The gradient of the source: of its n-th element that at the n-th place of the mask."""
    del sizes
    flat = jnp.broadcast_to(mask, grad.shape).reshape(-1)
    place = jnp.maximum(jnp.cumsum(flat, dtype=jnp.int64) - 1, 0)
    masked = jnp.where(flat, grad.reshape(-1), jnp.zeros((), grad.dtype))
    zeros = jnp.zeros(max(flat.size, math.prod(call.shape)), grad.dtype)
    return zeros.at[place].add(masked)[: math.prod(call.shape)].reshape(call.shape)


@lowers("take")
def _take(call: Call, x: Any, index: Any) -> Any:
    del call
    return x.reshape(-1)[index]


@lowers("one_hot")
def _one_hot(call: Call, x: Any, num_classes: int = -1) -> Any:
    del num_classes
    return jax.nn.one_hot(x, call.shape[-1], dtype=call.dtype)


_MODES = ("sum", "mean", "max")


@lowers("_embedding_bag", "_embedding_bag_forward_only")
def _embedding_bag(
    call: Call, weight: Any, ids: Any, offsets: Any, scale_grad_by_freq: bool = False, mode: int = 0,
    sparse: bool = False, per_sample_weights: Any = None, include_last_offset: bool = False, padding_idx: int = -1,
) -> Any:  # fmt: skip
    """(bags, bag of each id, count of each bag, ids of the largest rows)."""
    del scale_grad_by_freq
    _refuse_sparse(sparse)
    bags = call.result[0].shape[0]
    rows = widen(weight.at[ids].get(mode=_IN_BOUNDS, wrap_negative_indices=False))
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[:, None]
    is_kept = ids != padding_idx if padding_idx >= 0 else jnp.ones(ids.shape, jnp.bool_)
    width = _bag_width(call, bags)
    if width:
        bag_of = lax.iota(jnp.int64, bags * width) // width
        totals, counts, largest = _equal_bags(rows, is_kept, ids, bags, width, mode)
    else:
        bag_of = _bag_of(offsets[:-1] if include_last_offset else offsets, ids)
        totals, counts, largest = _bags(rows, is_kept, ids, bags, bag_of, mode)
    if _MODES[mode] == "mean":
        totals = totals / jnp.maximum(counts, 1).astype(totals.dtype)[:, None]
    values = totals, bag_of, counts, largest
    shapes = [tuple(result.shape) for result in call.result]
    return tuple(
        value.astype(jnp.int64 if n else value.dtype) if value.shape == shape else _resize(value, shape)
        for n, (value, shape) in enumerate(zip(values, shapes, strict=True))
    )


def _bag_of(starts: Any, ids: Any) -> Any:
    """Number of the bag of each id."""
    return jnp.searchsorted(starts, lax.iota(starts.dtype, ids.shape[0]), side="right") - 1


def _resize(value: Any, shape: tuple[int, ...]) -> Any:
    """PyTorch leaves these results empty, or one longer, where its kernels do not use them."""
    if len(value.shape) != len(shape):
        return jnp.zeros(shape, jnp.int64)
    part = value[tuple(slice(0, size) for size in shape)]
    return jnp.pad(part, [(0, size - here) for size, here in zip(shape, part.shape, strict=True)])


def _bag_width(call: Call, bags: int) -> int:
    """Ids in each bag where all have equally many: the offsets are then an `arange`. Else 0."""
    offsets = call.node.args[2]
    if getattr(offsets, "target", None) is not torch.ops.aten.arange.start_step:
        return 0
    start, _, step = (*offsets.args, 1)[:3]
    count = call.types[1].shape[0]
    return step if start == 0 and bags and count == bags * step else 0


def _equal_bags(rows: Any, is_kept: Any, ids: Any, bags: int, width: int, mode: int) -> tuple[Any, Any, Any]:
    rows, mask = rows.reshape(bags, width, -1), is_kept.reshape(bags, width)
    counts = jnp.sum(mask, axis=1)
    if _MODES[mode] == "max":
        masked = jnp.where(mask[..., None], rows, -jnp.inf)
        largest = jnp.take_along_axis(ids.reshape(bags, width), jnp.argmax(masked, axis=1), axis=1)
        return jnp.where(counts[:, None] > 0, jnp.max(masked, axis=1), 0), counts, largest
    return jnp.sum(jnp.where(mask[..., None], rows, 0), axis=1), counts, jnp.zeros(rows.shape[::2], jnp.int64)


def _bags(rows: Any, is_kept: Any, ids: Any, bags: int, bag_of: Any, mode: int) -> tuple[Any, Any, Any]:
    counts = jnp.zeros(bags, jnp.int64).at[bag_of].add(is_kept)
    if _MODES[mode] == "max":
        masked = jnp.where(is_kept[:, None], rows, -jnp.inf)
        top = jnp.full((bags, rows.shape[1]), -jnp.inf, rows.dtype).at[bag_of].max(masked)
        position = jnp.where(masked == top[bag_of], jnp.arange(rows.shape[0])[:, None], rows.shape[0] - 1)
        first = jnp.full(top.shape, rows.shape[0] - 1).at[bag_of].min(position)
        return jnp.where(counts[:, None] > 0, top, 0), counts, ids[first]
    masked = jnp.where(is_kept[:, None], rows, 0)
    totals = jnp.zeros((bags, rows.shape[1]), rows.dtype).at[bag_of].add(masked)
    return totals, counts, jnp.zeros(totals.shape, jnp.int64)


@lowers("_embedding_bag_backward", "_embedding_bag_dense_backward")
def _embedding_bag_backward(
    call: Call, grad: Any, ids: Any, *rest: Any
) -> Any:  # fmt: skip
    """Each row's share of its bag's gradient, added up by id."""
    offsets = None
    if "dense" not in str(call.node.target):
        offsets, rest = rest[0], rest[1:]
        bag_of, counts, largest, num_weights, by_frequency, mode, sparse, sample_weights, padding = (*rest, -1)[:9]
        _refuse_sparse(sparse)
    else:
        bag_of, counts, largest, num_weights, by_frequency, mode, sample_weights, padding = (*rest, -1)[:8]
    grad = widen(grad)
    zeros = jnp.zeros(call.shape, grad.dtype)
    if _MODES[mode] == "max":
        given = jnp.where((counts > 0)[: grad.shape[0], None], grad, 0)
        return zeros.at[largest, jnp.arange(grad.shape[1])].add(given)
    if _MODES[mode] == "mean":
        grad = grad / jnp.maximum(counts[: grad.shape[0]], 1).astype(grad.dtype)[:, None]
    rows = grad[_bag_of(offsets, ids) if bag_of.shape != ids.shape else bag_of]
    if sample_weights is not None:
        rows = rows * sample_weights[:, None]
    if by_frequency:
        rows = rows / jnp.zeros(num_weights, grad.dtype).at[ids].add(1)[ids][:, None]
    if padding >= 0:
        rows = jnp.where((ids == padding)[:, None], 0, rows)
    return zeros.at[ids].add(rows, mode=_IN_BOUNDS, wrap_negative_indices=False)


@lowers("_embedding_bag_per_sample_weights_backward")
def _sample_weights_backward(
    call: Call, grad: Any, weight: Any, ids: Any, offsets: Any, bag_of: Any, mode: int, padding_idx: int = -1
) -> Any:
    del call, mode
    bag_of = _bag_of(offsets, ids) if bag_of.shape != ids.shape else bag_of
    products = jnp.sum(grad[bag_of] * weight[ids], axis=1)
    return jnp.where(ids == padding_idx, 0, products) if padding_idx >= 0 else products
