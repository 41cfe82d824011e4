"""Layers of convolutional models: images are [batch, height, width, channels]."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from workloads.cases import Leaf
from workloads.hooks import constrain
from workloads.models.layers import Params


def convolution_params(
    size: int, inputs: int, outputs: int, axes: tuple[str | None, str | None] = (None, None)
) -> Params:
    """Weight [size, size, inputs, outputs]; `axes` name inputs and outputs."""
    return Leaf((size, size, inputs, outputs), (None, None, *axes))


def convolution(weight: jax.Array, x: jax.Array, stride: int = 1) -> jax.Array:
    return jax.lax.conv_general_dilated(x, weight, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def norm_params(channels: int, axis: str | None = None) -> Params:
    return {"scale": Leaf((channels,), (axis,)), "bias": Leaf((channels,), (axis,))}


def group_norm(p: Params, x: jax.Array, groups: int = 32) -> jax.Array:
    """Group norm (Wu and He, 2018)."""
    batch, height, width, channels = x.shape
    y = x.reshape(batch, height, width, groups, channels // groups)
    mean = y.mean((1, 2, 4), keepdims=True)
    variance = jnp.square(y - mean).mean((1, 2, 4), keepdims=True)
    normed = ((y - mean) * jax.lax.rsqrt(variance + 1e-5)).reshape(x.shape)
    return normed * p["scale"] + p["bias"]


def pooled(x: jax.Array) -> jax.Array:
    """3 × 3 maximum at stride 2."""
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")


def features(x: jax.Array) -> jax.Array:
    """Activations between blocks."""
    return constrain(x, "batch", None, None, None)


def hidden(x: jax.Array) -> jax.Array:
    """Activations inside a block, whose channels a tensor axis may split."""
    return constrain(x, "batch", None, None, "channels")
