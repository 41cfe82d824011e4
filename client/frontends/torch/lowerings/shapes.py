"""Operators that move elements without computing: views, joins, cuts, padding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardwright.client.frontends.torch.aliases import set_slice, take_slice
from shardwright.client.frontends.torch.lowerings.registry import Call, lowers
from shardwright.errors import UnsupportedProgramError


@lowers("clone", "contiguous", "alias", "detach", "lift", "lift_fresh", "lift_fresh_copy", "alias_copy", "detach_copy",
        "resolve_conj", "resolve_neg")  # fmt: skip
def _same(call: Call, x: Any, **_: Any) -> Any:
    del call
    return x


@lowers("view.dtype")
def _view_dtype(call: Call, x: Any, dtype: Any) -> Any:
    del dtype
    if x.dtype == call.dtype:
        return x
    if x.dtype.itemsize == call.dtype.itemsize:
        return lax.bitcast_convert_type(x, call.dtype)
    if x.dtype.itemsize > call.dtype.itemsize:
        return lax.bitcast_convert_type(x, call.dtype).reshape(call.shape)
    ratio = call.dtype.itemsize // x.dtype.itemsize
    return lax.bitcast_convert_type(x.reshape(*call.shape, ratio), call.dtype)


@lowers("view", "_unsafe_view", "reshape", "_reshape_alias", "squeeze", "unsqueeze", "view_copy", "squeeze_copy",
        "unsqueeze_copy", "flatten", "unflatten", "resize")  # fmt: skip
def _reshape(call: Call, x: Any, *_: Any, **__: Any) -> Any:
    return x.reshape(call.shape)


@lowers("expand", "expand_copy")
def _expand(call: Call, x: Any, *_: Any, **__: Any) -> Any:
    return jnp.broadcast_to(x, call.shape)


@lowers("permute", "permute_copy")
def _permute(call: Call, x: Any, dims: Sequence[int]) -> Any:
    del call
    return jnp.transpose(x, [dim % x.ndim for dim in dims])


@lowers("t", "t_copy")
def _t(call: Call, x: Any) -> Any:
    del call
    return jnp.transpose(x)


@lowers("transpose", "transpose_copy")
def _transpose(call: Call, x: Any, first: int, second: int) -> Any:
    del call
    return jnp.swapaxes(x, first, second) if x.ndim else x


@lowers("slice", "slice_copy")
def _slice(call: Call, x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    return take_slice(x, call.shape[dim], dim, start, end, step)


def _select_index(rank: int, dim: int, index: int) -> tuple[Any, ...]:
    where: list[Any] = [slice(None)] * rank
    where[dim] = index
    return tuple(where)


@lowers("select", "select_copy")
def _select(call: Call, x: Any, dim: int, index: Any) -> Any:
    del call
    return x[_select_index(x.ndim, dim, index)] if isinstance(index, int) else jnp.take(x, index, dim, mode="clip")


@lowers("slice_scatter")
def _slice_scatter(call: Call, x: Any, y: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    del call
    return set_slice(x, y.astype(x.dtype), dim, start, end, step)


@lowers("select_scatter")
def _select_scatter(call: Call, x: Any, y: Any, dim: int, index: int) -> Any:
    del call
    return x.at[_select_index(x.ndim, dim, index)].set(y.astype(x.dtype))


@lowers("slice_backward")
def _slice_backward(call: Call, grad: Any, sizes: Any, dim: int, start: Any, end: Any, step: int) -> Any:
    """Zeros around the gradient: a pad, as JAX has it."""
    del sizes
    size = call.shape[dim]
    start, end, step = slice(start, end, step).indices(size)
    low, count = start, grad.shape[dim]
    if not count:
        return jnp.zeros(call.shape, call.dtype)
    high = size - (low + (count - 1) * step + 1)
    config = [(0, 0, 0)] * grad.ndim
    config[dim] = (low, high, step - 1)
    return lax.pad(grad, jnp.zeros((), grad.dtype), config)


@lowers("select_backward")
def _select_backward(call: Call, grad: Any, sizes: Any, dim: int, index: int) -> Any:
    del sizes
    index %= call.shape[dim]
    config = [(0, 0, 0)] * len(call.shape)
    config[dim] = (index, call.shape[dim] - index - 1, 0)
    return lax.pad(jnp.expand_dims(grad, dim), jnp.zeros((), grad.dtype), config)


@lowers("split_with_sizes", "split_with_sizes_copy", "unsafe_split_with_sizes")
def _split_with_sizes(call: Call, x: Any, sizes: Sequence[int], dim: int = 0) -> list[Any]:
    del call
    return _cut(x, sizes, dim)


@lowers("split", "unsafe_split", "split_copy")
def _split(call: Call, x: Any, size: Any, dim: int = 0) -> list[Any]:
    return _cut(x, [part.shape[dim] for part in call.result], dim) if isinstance(size, int) else _cut(x, size, dim)


def _cut(x: Any, sizes: Sequence[int], dim: int) -> list[Any]:
    ends = np.cumsum(sizes).tolist()
    return [lax.slice_in_dim(x, end - size, end, axis=dim % x.ndim) for size, end in zip(sizes, ends, strict=True)]


@lowers("chunk", "unsafe_chunk")
def _chunk(call: Call, x: Any, chunks: int, dim: int = 0) -> list[Any]:
    del chunks
    return _cut(x, [part.shape[dim] for part in call.result], dim)


@lowers("unbind", "unbind_copy")
def _unbind(call: Call, x: Any, dim: int = 0) -> list[Any]:
    del call
    dim %= x.ndim
    return [lax.index_in_dim(x, n, dim, keepdims=False) for n in range(x.shape[dim])]


@lowers("cat")
def _cat(call: Call, parts: Sequence[Any], dim: int = 0) -> Any:
    rank = len(call.shape)
    tensors = [part.astype(call.dtype) for part in parts if part.ndim == rank]  # PyTorch lets tensors of shape [0] join
    return jnp.concatenate(tensors, axis=dim) if tensors else jnp.zeros(call.shape, call.dtype)


@lowers("stack")
def _stack(call: Call, parts: Sequence[Any], dim: int = 0) -> Any:
    return jnp.stack([part.astype(call.dtype) for part in parts], axis=dim)


@lowers("repeat")
def _repeat(call: Call, x: Any, repeats: Sequence[int]) -> Any:
    del call
    return jnp.tile(x, tuple(repeats))


@lowers("flip")
def _flip(call: Call, x: Any, dims: Sequence[int]) -> Any:
    del call
    return jnp.flip(x, tuple(dims)) if dims and x.ndim else x


@lowers("roll")
def _roll(call: Call, x: Any, shifts: Any, dims: Any = ()) -> Any:
    del call
    shifts = [shifts] if isinstance(shifts, int) else list(shifts)
    dims = [dims] if isinstance(dims, int) else list(dims)
    return jnp.roll(x, shifts, tuple(dims)) if dims else jnp.roll(x.reshape(-1), sum(shifts)).reshape(x.shape)


@lowers("diagonal", "diagonal_copy")
def _diagonal(call: Call, x: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    del call
    return jnp.diagonal(x, offset, dim1, dim2)


@lowers("diagonal_scatter")
def _diagonal_scatter(call: Call, x: Any, y: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    del call
    positions = np.diagonal(np.arange(x.size).reshape(x.shape), offset, dim1, dim2)
    return x.reshape(-1).at[positions.reshape(-1)].set(y.reshape(-1).astype(x.dtype)).reshape(x.shape)


@lowers("diagonal_backward")
def _diagonal_backward(call: Call, grad: Any, sizes: Any, offset: int, dim1: int, dim2: int) -> Any:
    """Zeros with the gradient on the diagonal: the transpose of reading it."""
    del sizes
    take_diagonal = lambda x: jnp.diagonal(x, offset, dim1, dim2)  # noqa: E731
    return jax.linear_transpose(take_diagonal, jnp.zeros(call.shape, grad.dtype))(grad)[0]


@lowers("constant_pad_nd")
def _constant_pad(call: Call, x: Any, pad: Sequence[int], value: Any = 0) -> Any:
    del call
    config = [(0, 0, 0)] * x.ndim
    for number in range(len(pad) // 2):
        config[x.ndim - 1 - number] = (pad[2 * number], pad[2 * number + 1], 0)
    return lax.pad(x, jnp.asarray(value).astype(x.dtype), config)


@lowers("unfold", "unfold_copy")
def _unfold(call: Call, x: Any, dim: int, size: int, step: int) -> Any:
    del call
    if not x.ndim:
        return jnp.broadcast_to(x, (size,))
    dim %= x.ndim
    return jnp.moveaxis(jnp.take(x, _windows(x.shape[dim], size, step), axis=dim), dim + 1, -1)


def _windows(length: int, size: int, step: int) -> np.ndarray:
    """Positions of each window: [windows, size]."""
    starts = np.arange((length - size) // step + 1) * step
    return np.asarray(starts[:, None] + np.arange(size))


@lowers("unfold_backward")
def _unfold_backward(call: Call, grad: Any, sizes: Sequence[int], dim: int, size: int, step: int) -> Any:
    if not sizes:
        return jnp.sum(grad)
    dim %= len(sizes)
    windows = jnp.moveaxis(grad, -1, dim + 1)
    index = (slice(None),) * dim + (_windows(sizes[dim], size, step),)
    return jnp.zeros(call.shape, grad.dtype).at[index].add(windows)


@lowers("as_strided", "as_strided_copy")
def _as_strided(call: Call, x: Any, size: Sequence[int], stride: Sequence[int], storage_offset: Any = None) -> Any:
    """Elements of the memory behind `x`, which has to be all of a contiguous tensor."""
    of = call.types[0]
    offset = of.storage_offset() if storage_offset is None else storage_offset
    if tuple(of.shape) == tuple(size) and tuple(of.stride()) == tuple(stride) and offset == of.storage_offset():
        return x
    _require_whole(of)
    positions = _compute_strided_positions(tuple(size), tuple(stride), int(offset))
    return jnp.take(x.reshape(-1), positions.reshape(-1)).reshape(call.shape)


@lowers("as_strided_scatter")
def _as_strided_scatter(
    call: Call, x: Any, y: Any, size: Sequence[int], stride: Sequence[int], storage_offset: Any = None
) -> Any:
    of = call.types[0]
    _require_whole(of)
    positions = _compute_strided_positions(tuple(size), tuple(stride), int(storage_offset or 0))
    return x.reshape(-1).at[positions.reshape(-1)].set(y.reshape(-1).astype(x.dtype)).reshape(x.shape)


def _require_whole(of: Any) -> None:
    """Raises UnsupportedProgramError unless a tensor is all of its memory."""
    if not of.is_contiguous() or of.storage_offset():
        raise UnsupportedProgramError(
            f"as_strided of a view of shape {list(of.shape)} and strides {list(of.stride())}",
            remedy="use view, permute and slices, or x.contiguous() before",
        )


def _compute_strided_positions(size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> np.ndarray:
    positions = np.full(size, offset, np.int64)
    for dim, (length, step) in enumerate(zip(size, stride, strict=True)):
        shape = [1] * len(size)
        shape[dim] = length
        positions += (np.arange(length) * step).reshape(shape)
    return positions


@lowers("view_as_real", "view_as_real_copy")
def _view_as_real(call: Call, x: Any) -> Any:
    del call
    return jnp.stack([x.real, x.imag], axis=-1)


@lowers("view_as_complex", "view_as_complex_copy")
def _view_as_complex(call: Call, x: Any) -> Any:
    del call
    return lax.complex(x[..., 0], x[..., 1])


@lowers("real")
def _real(call: Call, x: Any) -> Any:
    del call
    return x.real


@lowers("imag")
def _imag(call: Call, x: Any) -> Any:
    del call
    return x.imag


@lowers("pixel_shuffle")
def _pixel_shuffle(call: Call, x: Any, factor: int) -> Any:
    *batch, channels, height, width = x.shape
    parts = x.reshape(*batch, channels // factor**2, factor, factor, height, width)
    rank = len(batch)
    order = [*range(rank), rank, rank + 3, rank + 1, rank + 4, rank + 2]
    return jnp.transpose(parts, order).reshape(call.shape)


@lowers("copy", "copy_to")
def _copy(call: Call, x: Any, source: Any, non_blocking: bool = False) -> Any:
    del x, non_blocking
    source = source.real if source.dtype.kind == "c" and call.dtype.kind != "c" else source
    return jnp.broadcast_to(source.astype(call.dtype), call.shape)


@lowers("_fft_r2c")
def _fft_r2c(call: Call, x: Any, dim: Sequence[int], normalization: int, onesided: bool) -> Any:
    del call
    axes = [d % x.ndim for d in dim]
    full = jnp.fft.fftn(x, axes=axes) if not onesided else jnp.fft.rfftn(x, axes=axes)
    return _normalize(full, math.prod(x.shape[a] for a in axes), normalization)


@lowers("_fft_c2c")
def _fft_c2c(call: Call, x: Any, dim: Sequence[int], normalization: int, forward: bool) -> Any:
    del call
    axes = [d % x.ndim for d in dim]
    count = math.prod(x.shape[a] for a in axes)
    result = jnp.fft.fftn(x, axes=axes) if forward else jnp.fft.ifftn(x, axes=axes) * count
    return _normalize(result, count, normalization)


@lowers("_fft_c2r")
def _fft_c2r(call: Call, x: Any, dim: Sequence[int], normalization: int, last_dim_size: int) -> Any:
    del call
    axes = [d % x.ndim for d in dim]
    sizes = [x.shape[a] for a in axes[:-1]] + [last_dim_size]
    count = math.prod(sizes)
    return _normalize(jnp.fft.irfftn(x, s=sizes, axes=axes) * count, count, normalization)


def _normalize(x: Any, count: int, mode: int) -> Any:
    """0: no factor; 1: 1/√n; 2: 1/n."""
    return x if mode == 0 else x / (math.sqrt(count) if mode == 1 else count)
