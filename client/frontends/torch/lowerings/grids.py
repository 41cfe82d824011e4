"""Sampling at places that a grid gives, between the elements of an image or a volume."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.client.frontends.torch.lowerings.pooling import weigh_cubic
from shardwright.client.frontends.torch.lowerings.registry import Call, lowers, widen

_NEAREST, _CUBIC = 1, 2
_BORDER, _REFLECTION = 1, 2


@lowers("grid_sampler_2d", "grid_sampler_3d")
def _grid_sampler(call: Call, x: Any, grid: Any, mode: int, padding: int, align_corners: bool) -> Any:
    del call
    return _sample(widen(x), widen(grid), mode, padding, align_corners)


@lowers("grid_sampler_2d_backward", "grid_sampler_3d_backward")
def _grid_sampler_backward(
    call: Call, grad: Any, x: Any, grid: Any, mode: int, padding: int, align_corners: bool, mask: Any
) -> Any:
    """Gradients of the image, where it is wanted, and of the grid."""
    del call
    sample = lambda x, grid: _sample(x, grid, mode, padding, align_corners)  # noqa: E731
    of_image, of_grid = jax.vjp(sample, widen(x), widen(grid))[1](widen(grad))
    return of_image if mask[0] else None, of_grid


def _sample(x: Any, grid: Any, mode: int, padding: int, align_corners: bool) -> Any:
    """[batch, channels, places …] of x [batch, channels, space …] at grid [batch, places …, coordinates].

    A grid names the innermost dimension first; −1 and 1 are the space's ends.
    """
    space = x.shape[2:]
    places = [_unnormalize(grid[..., len(space) - 1 - n], size, align_corners) for n, size in enumerate(space)]
    if mode != _CUBIC:
        places = [_pad(p, size, padding, align_corners) for p, size in zip(places, space, strict=True)]
    if mode == _NEAREST:
        return _read(x, [jnp.round(p) for p in places])
    steps = (-1, 0, 1, 2) if mode == _CUBIC else (0, 1)
    taps = np.array(list(itertools.product(steps, repeat=len(space))), np.float32)
    at, weights = [], []
    for n, (place, size) in enumerate(zip(places, space, strict=True)):
        step = taps[:, n].reshape(-1, *(1,) * (place.ndim - 1))
        tap = jax.lax.stop_gradient(jnp.floor(place))[:, None] + step
        distance = place[:, None] - tap
        weights.append(weigh_cubic(distance, -0.75) if mode == _CUBIC else 1 - jnp.abs(distance))
        at.append(_pad(tap, size, padding, align_corners) if mode == _CUBIC else tap)
    return jnp.sum(_read(x, at) * functools.reduce(jnp.multiply, weights)[:, None], axis=2)


def _unnormalize(place: Any, size: int, align_corners: bool) -> Any:
    return (place + 1) / 2 * (size - 1) if align_corners else ((place + 1) * size - 1) / 2


def _pad(place: Any, size: int, padding: int, align_corners: bool) -> Any:
    """Where a place outside is read."""
    if padding == _REFLECTION:
        low, span = (0.0, size - 1.0) if align_corners else (-0.5, float(size))
        if span == 0:
            return jnp.zeros_like(place)
        distance = jnp.abs(place - low)
        flips = jax.lax.stop_gradient(jnp.floor(distance / span))
        rest = distance - flips * span
        place = jnp.where(flips % 2 == 0, rest + low, span - rest + low)
    return jnp.clip(place, 0, size - 1) if padding in (_BORDER, _REFLECTION) else place


def _read(x: Any, at: list[Any]) -> Any:
    """Elements at whole places; 0 outside."""
    space, flat, is_inside = x.shape[2:], jnp.zeros((), jnp.int64), jnp.ones((), jnp.bool_)
    for place, size in zip(at, space, strict=True):
        is_inside &= (place >= 0) & (place <= size - 1)
        flat = flat * size + jnp.clip(jax.lax.stop_gradient(place), 0, size - 1).astype(jnp.int64)
    rows = x.reshape(*x.shape[:2], -1)
    values = jnp.take_along_axis(rows, flat.reshape(flat.shape[0], 1, -1), axis=2)
    return jnp.where(is_inside[:, None], values.reshape(*x.shape[:2], *flat.shape[1:]), 0)
