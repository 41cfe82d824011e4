"""Pooling, resizing and their gradients."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardwright.client.frontends.torch.lowerings.registry import Call, lowers, widen


def _list(values: Any, rank: int, default: Sequence[int]) -> list[int]:
    if values is None or (isinstance(values, list | tuple) and not values):
        return list(default)
    values = [values] if isinstance(values, int) else list(values)
    return [int(value) for value in (values * rank if len(values) == 1 else values)]


class _Windows:
    """Windows over the last `rank` dimensions."""

    def __init__(
        self, shape: Sequence[int], rank: int, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool
    ) -> None:
        outer = len(shape) - rank
        sizes = _list(kernel, rank, ())
        strides = _list(stride, rank, sizes)
        pads = _list(padding, rank, [0] * rank)
        dilations = _list(dilation, rank, [1] * rank)
        self.window = (1,) * outer + tuple(sizes)
        self.strides = (1,) * outer + tuple(strides)
        self.dilation = (1,) * outer + tuple(dilations)
        self.padding = [(0, 0)] * outer
        for size, k, s, p, d in zip(shape[outer:], sizes, strides, pads, dilations, strict=True):
            reach = d * (k - 1) + 1
            count = _round_up(size + 2 * p - reach, s) if ceil_mode else (size + 2 * p - reach) // s
            if ceil_mode and count * s >= size + p:
                count -= 1  # a window that would begin in the padding
            self.padding.append((p, max(count * s + reach - size - p, 0)))

    def reduce(self, x: Any, start: Any, function: Any) -> Any:
        return lax.reduce_window(
            x, start, function, self.window, self.strides, self.padding, window_dilation=self.dilation
        )


def _round_up(value: int, step: int) -> int:
    return -(-value // step)


def _lowest(dtype: Any) -> Any:
    return -np.inf if jnp.issubdtype(dtype, jnp.floating) else np.iinfo(dtype).min


def _register_max_pool(name: str, rank: int) -> None:
    @lowers(f"{name}_with_indices")
    def forward(
        call: Call, x: Any, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
    ) -> Any:
        del call
        windows = _Windows(x.shape, rank, kernel, stride, padding, dilation, ceil_mode)
        return _max_pool(x, rank, windows)

    @lowers(f"{name}_with_indices_backward")
    def backward(
        call: Call, grad: Any, x: Any, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool,
        indices: Any,
    ) -> Any:  # fmt: skip
        windows = _Windows(x.shape, rank, kernel, stride, padding, dilation, ceil_mode)
        if all(d == 1 for d in windows.dilation):
            return jax.vjp(lambda x: windows.reduce(x, _lowest(x.dtype), lax.max), x)[1](grad)[0]
        return _put_back(call, grad, indices, rank)


def _put_back(call: Call, grad: Any, indices: Any, rank: int) -> Any:
    """The gradient of each window at the position of its largest element in the flat space."""
    outer, space = call.shape[: len(call.shape) - rank], call.shape[len(call.shape) - rank :]
    flat, at = grad.reshape(*outer, -1), indices.reshape(*outer, -1)
    zeros = jnp.zeros((*outer, math.prod(space)), grad.dtype)
    places = tuple(
        at if n == len(outer) else lax.broadcasted_iota(at.dtype, at.shape, n) for n in range(len(outer) + 1)
    )
    return zeros.at[places].add(flat).reshape(call.shape)


def _max_pool(x: Any, rank: int, windows: _Windows) -> tuple[Any, Any]:
    """(largest of each window, its position in the flat space of the input; of equal ones the first)."""
    values = windows.reduce(x, _lowest(x.dtype), lax.max)
    space = x.shape[x.ndim - rank :]
    positions = lax.broadcasted_iota(jnp.int64, (math.prod(space),), 0).reshape(space)
    positions = jnp.broadcast_to(positions, x.shape)

    def larger(a: tuple[Any, Any], b: tuple[Any, Any]) -> tuple[Any, Any]:
        is_first = (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] < b[1])) | jnp.isnan(a[0])
        return jnp.where(is_first, a[0], b[0]), jnp.where(is_first, a[1], b[1])

    start = jnp.asarray(_lowest(x.dtype), x.dtype), jnp.asarray(np.iinfo(np.int64).max, jnp.int64)
    _, indices = windows.reduce((x, positions), start, larger)
    return values, indices


_register_max_pool("max_pool2d", 2)
_register_max_pool("max_pool3d", 3)


def _average(
    x: Any, rank: int, kernel: Any, stride: Any, padding: Any, ceil_mode: bool, include_pad: bool, divisor: Any
) -> Any:
    windows = _Windows(x.shape, rank, kernel, stride, padding, 1, ceil_mode)
    total = windows.reduce(widen(x), 0.0, lax.add)
    if divisor is not None:
        return total / divisor
    return total / _counts(x.shape[x.ndim - rank :], rank, kernel, stride, padding, ceil_mode, include_pad)


def _counts(
    space: Sequence[int], rank: int, kernel: Any, stride: Any, padding: Any, ceil_mode: bool, include_pad: bool
) -> np.ndarray:
    """Elements that PyTorch divides each window by: with the padding, but not beyond it."""
    sizes = _list(kernel, rank, ())
    strides, pads = _list(stride, rank, sizes), _list(padding, rank, [0] * rank)
    windows = _Windows(space, rank, kernel, stride, padding, 1, ceil_mode)
    total = np.ones((), np.float32)
    for size, k, s, p, (low, high) in zip(space, sizes, strides, pads, windows.padding, strict=True):
        starts = np.arange((size + low + high - k) // s + 1) * s - p
        ends = np.minimum(starts + k, size + p)
        counted = ends - starts if include_pad else np.minimum(ends, size) - np.maximum(starts, 0)
        total = np.multiply.outer(total, counted.astype(np.float32))
    return total


def _register_average_pool(name: str, rank: int) -> None:
    @lowers(name)
    def forward(
        call: Call, x: Any, kernel_size: Any, stride: Any = (), padding: Any = 0, ceil_mode: bool = False,
        count_include_pad: bool = True, divisor_override: Any = None,
    ) -> Any:  # fmt: skip
        del call
        return _average(x, rank, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)

    @lowers(f"{name}_backward")
    def backward(call: Call, grad: Any, x: Any, *options: Any) -> Any:
        del call
        pool = lambda x: _average(x, rank, *options).astype(grad.dtype)  # noqa: E731
        return jax.vjp(pool, x)[1](grad)[0]


_register_average_pool("avg_pool2d", 2)
_register_average_pool("avg_pool3d", 3)


def _adaptive_average(x: Any, sizes: Sequence[int]) -> Any:
    """Means over ⌊i n / m⌋ … ⌈(i + 1) n / m⌉, one dimension after the other."""
    first = x.ndim - len(sizes)
    for axis, size in enumerate(sizes, first):
        count = x.shape[axis]
        if size == count:
            continue
        if count % size == 0:
            parts = x.reshape(*x.shape[:axis], size, count // size, *x.shape[axis + 1 :])
            x = jnp.mean(parts, axis=axis + 1)
            continue
        weights = np.zeros((size, count), np.float32)
        for row in range(size):
            start, end = row * count // size, _round_up((row + 1) * count, size)
            weights[row, start:end] = 1 / (end - start)
        x = jnp.moveaxis(jnp.tensordot(x, jnp.asarray(weights, x.dtype), ((axis,), (1,))), -1, axis)
    return x


def _register_adaptive(name: str) -> None:
    @lowers(name)
    def forward(call: Call, x: Any, output_size: Any) -> Any:
        del output_size
        return _adaptive_average(widen(x), call.shape[-_rank(call) :])

    @lowers(f"{name}_backward")
    def backward(call: Call, grad: Any, x: Any) -> Any:
        pool = lambda x: _adaptive_average(x, grad.shape[-_rank(call) :])  # noqa: E731
        return jax.vjp(pool, widen(x))[1](widen(grad))[0]


def _rank(call: Call) -> int:
    return 3 if "3d" in str(call.node.target) else 2


def _register_adaptive_max(name: str, rank: int) -> None:
    @lowers(name)
    def forward(call: Call, x: Any, output_size: Any) -> Any:
        """(largest of each window ⌊i n / m⌋ … ⌈(i + 1) n / m⌉, its position in the flat space)."""
        del output_size
        outer = x.ndim - rank
        space, sizes = x.shape[outer:], tuple(call.result[0].shape[-rank:])
        positions: Any = np.arange(math.prod(space)).reshape(space)
        is_inside: Any = np.ones(space, np.bool_)
        for axis in range(rank):  # [size, window] in place of each dimension
            windows, is_window = _adaptive_windows(space[axis], sizes[axis])
            x, positions = jnp.take(x, windows, axis=outer + 2 * axis), np.take(positions, windows, axis=2 * axis)
            shape = [1] * positions.ndim
            shape[2 * axis : 2 * axis + 2] = windows.shape
            is_inside = np.take(is_inside, windows, axis=2 * axis) & is_window.reshape(shape)
        order = [*range(0, 2 * rank, 2), *range(1, 2 * rank, 2)]
        x = jnp.transpose(x, [*range(outer), *(outer + axis for axis in order)]).reshape(*x.shape[:outer], *sizes, -1)
        positions, is_inside = (np.transpose(v, order).reshape(*sizes, -1) for v in (positions, is_inside))
        chosen = jnp.argmax(jnp.where(is_inside, x, _lowest(x.dtype)), axis=-1)[..., None]
        positions = jnp.broadcast_to(positions, x.shape)
        return tuple(jnp.take_along_axis(v, chosen, axis=-1)[..., 0] for v in (x, positions))

    @lowers(f"{name}_backward")
    def backward(call: Call, grad: Any, x: Any, indices: Any) -> Any:
        del x
        return _put_back(call, grad, indices, rank)


def _adaptive_windows(count: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions of each window [size, longest], and whether they are of the window."""
    starts = np.arange(size) * count // size
    ends = -(-(np.arange(size) + 1) * count // size)
    steps = np.arange((ends - starts).max())
    return np.minimum(starts[:, None] + steps, count - 1), steps < (ends - starts)[:, None]


_register_adaptive_max("adaptive_max_pool2d", 2)
_register_adaptive_max("adaptive_max_pool3d", 3)

_register_adaptive("_adaptive_avg_pool2d")
_register_adaptive("_adaptive_avg_pool3d")


# ---- resizing ---------------------------------------------------------------------------------


def _register_gradient(name: str, forward: Callable[..., Any]) -> None:
    """`name(grad, output size, input size, *options)`: the transpose of a resizing, which is linear."""

    @lowers(name)
    def backward(call: Call, grad: Any, output_size: Any, input_size: Any, *options: Any) -> Any:
        del output_size, input_size
        resize = lambda x: forward(x, tuple(grad.shape), *options).astype(grad.dtype)  # noqa: E731
        return jax.linear_transpose(resize, jnp.zeros(call.shape, grad.dtype))(grad)[0]


def _nearest(x: Any, shape: tuple[int, ...], *scales: Any, offset: float = 0.0) -> Any:
    for axis in range(2, x.ndim):
        ratio = _ratio(x.shape[axis], shape[axis], False, scales[axis - 2 : axis - 1])
        index = np.minimum(
            np.floor((np.arange(shape[axis]) + np.float32(offset)) * np.float32(ratio)), x.shape[axis] - 1
        ).astype(np.int64)
        x = jnp.take(x, index, axis=axis)
    return x


def _nearest_exact(x: Any, shape: tuple[int, ...], *scales: Any) -> Any:
    return _nearest(x, shape, *scales, offset=0.5)


def _linear(x: Any, shape: tuple[int, ...], align_corners: bool = False, *scales: Any) -> Any:
    x = widen(x)
    for axis in range(2, x.ndim):
        ratio = _ratio(x.shape[axis], shape[axis], align_corners, scales[axis - 2 : axis - 1])
        x = _linear_along(x, axis, shape[axis], ratio, align_corners)
    return x


def _linear_along(x: Any, axis: int, size: int, ratio: float, align_corners: bool) -> Any:
    count = x.shape[axis]
    target = np.arange(size, dtype=np.float32)
    source = target * ratio if align_corners else np.maximum((target + 0.5) * np.float32(ratio) - 0.5, 0)
    low = np.minimum(np.floor(source).astype(np.int64), count - 1)
    high = np.minimum(low + 1, count - 1)
    shape = [1] * x.ndim
    shape[axis] = size
    weight = jnp.asarray(source - low, x.dtype).reshape(shape)
    return jnp.take(x, low, axis=axis) * (1 - weight) + jnp.take(x, high, axis=axis) * weight


def _cubic(x: Any, shape: tuple[int, ...], align_corners: bool = False, *scales: Any) -> Any:
    x = widen(x)
    for axis in range(2, x.ndim):
        ratio = _ratio(x.shape[axis], shape[axis], align_corners, scales[axis - 2 : axis - 1])
        x = _cubic_along(x, axis, shape[axis], ratio, align_corners)
    return x


def _cubic_along(x: Any, axis: int, size: int, ratio: float, align_corners: bool) -> Any:
    target = np.arange(size, dtype=np.float32)
    source = target * np.float32(ratio) if align_corners else (target + 0.5) * np.float32(ratio) - np.float32(0.5)
    first = np.floor(source).astype(np.int64)
    shape = [1] * x.ndim
    shape[axis] = size
    terms = []
    for step in (-1, 0, 1, 2):
        weight = jnp.asarray(weigh_cubic(source - first - step, -0.75), x.dtype).reshape(shape)
        terms.append(jnp.take(x, np.clip(first + step, 0, x.shape[axis] - 1), axis=axis) * weight)
    return sum(terms[1:], terms[0])


def _ratio(count: int, size: int, align_corners: bool, scale: Sequence[Any]) -> float:
    """Elements of the argument for one of the result, along a dimension. scale: what the caller gave for it, if any."""
    if align_corners:
        return (count - 1) / (size - 1) if size > 1 else 0.0
    return 1 / scale[0] if scale and scale[0] else count / size


def weigh_cubic(distance: Any, a: float) -> Any:
    """Keys' weights of elements at a distance."""
    choose = jnp.where if isinstance(distance, jax.Array) else np.where
    d = abs(distance)
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((d - 5) * d + 8) * a * d - 4 * a
    return choose(d <= 1, near, choose(d < 2, far, 0.0))


def _linear_filter(distance: Any) -> Any:
    return np.maximum(1 - np.abs(distance), 0.0)


def _smooth(
    x: Any, shape: tuple[int, ...], align_corners: bool = False, *scales: Any, reach: int, weigh: Callable[[Any], Any]
) -> Any:
    """Resizing with antialias: each element is a mean over `reach` elements to a side of the coarser grid."""
    x = widen(x)
    for axis in range(2, x.ndim):
        count, size = x.shape[axis], shape[axis]
        ratio = _ratio(count, size, align_corners, scales[axis - 2 : axis - 1])
        width = max(ratio, 1.0)
        center = ratio * (np.arange(size)[:, None] + 0.5)
        places = np.arange(count)
        first = np.maximum(np.trunc(center - reach * width + 0.5), 0)
        last = np.minimum(np.trunc(center + reach * width + 0.5), count)
        weights = np.where((places >= first) & (places < last), weigh((places - center + 0.5) / width), 0.0)
        weights /= weights.sum(axis=1, keepdims=True)
        x = jnp.moveaxis(jnp.tensordot(x, jnp.asarray(weights, x.dtype), ((axis,), (1,))), -1, axis)
    return x


_smooth_linear = functools.partial(_smooth, reach=1, weigh=_linear_filter)
_smooth_cubic = functools.partial(_smooth, reach=2, weigh=functools.partial(weigh_cubic, a=-0.5))


for _dims in ("1d", "2d", "3d"):
    _register_gradient(f"upsample_nearest{_dims}_backward", _nearest)
    _register_gradient(f"_upsample_nearest_exact{_dims}_backward", _nearest_exact)
_register_gradient("upsample_linear1d_backward", _linear)
_register_gradient("upsample_bilinear2d_backward", _linear)
_register_gradient("upsample_trilinear3d_backward", _linear)
_register_gradient("upsample_bicubic2d_backward", _cubic)
_register_gradient("_upsample_bilinear2d_aa_backward", _smooth_linear)
_register_gradient("_upsample_bicubic2d_aa_backward", _smooth_cubic)


def _register_resize(name: str, forward: Callable[..., Any]) -> None:
    @lowers(name)
    def lower(call: Call, x: Any, output_size: Any, *options: Any, **named: Any) -> Any:
        del output_size
        return forward(x, call.shape, *options, *named.values())


for _dims in ("1d", "2d", "3d"):
    _register_resize(f"upsample_nearest{_dims}", _nearest)
    _register_resize(f"_upsample_nearest_exact{_dims}", _nearest_exact)
_register_resize("upsample_linear1d", _linear)
_register_resize("upsample_bilinear2d", _linear)
_register_resize("upsample_trilinear3d", _linear)
_register_resize("upsample_bicubic2d", _cubic)
_register_resize("_upsample_bilinear2d_aa", _smooth_linear)
_register_resize("_upsample_bicubic2d_aa", _smooth_cubic)


def _register_pad_gradient(name: str, mode: str) -> None:
    """`name(grad, x, padding)`: the transpose of a padding with elements of the array itself."""

    @lowers(name)
    def backward(call: Call, grad: Any, x: Any, padding: Sequence[int]) -> Any:
        widths = [(0, 0)] * x.ndim
        for number in range(len(padding) // 2):
            widths[x.ndim - 1 - number] = (padding[2 * number], padding[2 * number + 1])
        added = [(max(before, 0), max(after, 0)) for before, after in widths]
        inside = tuple(slice(max(-before, 0), min(after, 0) or None) for before, after in widths)  # widths below 0 cut
        pad = lambda x: jnp.pad(x, added, mode=mode)[inside]  # noqa: E731
        return jax.linear_transpose(pad, jnp.zeros(call.shape, grad.dtype))(grad)[0]


for _dims in ("1d", "2d", "3d"):
    _register_pad_gradient(f"replication_pad{_dims}_backward", "edge")
    _register_pad_gradient(f"reflection_pad{_dims}_backward", "reflect")
