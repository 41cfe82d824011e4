"""Layers as values: a network is a sequence of them. Images are [batch, height, width, channels].

A layer says the shapes of its parameters for inputs of a shape, and applies them. Batch normalization is a function
of its own, so that who builds a network says over what its statistics go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from workloads.cases import Leaf, is_leaf

Params = Any
Shape = tuple[int, ...]

#: Images [batch, height, width, channels] → the same, normalized for each channel over all other dimensions.
Normalize = Callable[[jax.Array], jax.Array]


class Layer(Protocol):
    def parameters(self, shape: Shape) -> Params:
        """A tree of `Leaf` for inputs of a shape."""

    def apply(self, params: Params, x: jax.Array, normalize: Normalize) -> jax.Array:
        """Its result for an array `x` of that shape."""


def batch_norm(x: jax.Array) -> jax.Array:
    """Batch normalization without scale and offset (Ioffe and Szegedy, 2015), as in training."""
    mean = x.mean((0, 1, 2))
    variance = jnp.square(x).mean((0, 1, 2)) - jnp.square(mean)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-3)


@dataclass(frozen=True, kw_only=True)
class Convolution:
    """A convolution, then batch normalization with scale and offset, or without it a bias; then a rectifier."""

    channels: int
    size: tuple[int, int] = (1, 1)
    stride: int = 1
    padding: str = "SAME"
    is_normalized: bool = True
    is_rectified: bool = True

    def parameters(self, shape: Shape) -> Params:
        kernel = (*self.size, shape[-1], self.channels)
        offset = {"offset": Leaf((self.channels,), (None,))}
        scale = {"scale": Leaf((self.channels,), (None,))} if self.is_normalized else {}
        return {"kernel": Leaf(kernel, (None,) * 4), **scale, **offset}

    def apply(self, params: Params, x: jax.Array, normalize: Normalize) -> jax.Array:
        numbers = ("NHWC", "HWIO", "NHWC")
        strides = (self.stride, self.stride)
        x = jax.lax.conv_general_dilated(x, params["kernel"], strides, self.padding, dimension_numbers=numbers)
        if self.is_normalized:
            x = normalize(x) * params["scale"]
        x = x + params["offset"]
        return jax.nn.relu(x) if self.is_rectified else x


@dataclass(frozen=True, kw_only=True)
class MaxPool:
    size: int
    stride: int
    padding: str = "VALID"

    def parameters(self, shape: Shape) -> Params:
        return ()

    def apply(self, params: Params, x: jax.Array, normalize: Normalize) -> jax.Array:
        windows, strides = (1, self.size, self.size, 1), (1, self.stride, self.stride, 1)
        result: jax.Array = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, windows, strides, self.padding)
        return result


@dataclass(frozen=True, kw_only=True)
class MeanPool:
    """Means of windows at stride 1; zeros beyond the edge count."""

    size: int

    def parameters(self, shape: Shape) -> Params:
        return ()

    def apply(self, params: Params, x: jax.Array, normalize: Normalize) -> jax.Array:
        windows = (1, self.size, self.size, 1)
        sums: jax.Array = jax.lax.reduce_window(x, 0.0, jax.lax.add, windows, (1, 1, 1, 1), "SAME")
        return sums / self.size**2


@dataclass(frozen=True, kw_only=True)
class Dense:
    """A product of what each image has, all of it in a row, and a weight; a bias; a rectifier."""

    features: int
    is_rectified: bool = False

    def parameters(self, shape: Shape) -> Params:
        weight = (prod(shape[1:]), self.features)
        return {"weight": Leaf(weight, (None, None)), "bias": Leaf((self.features,), (None,))}

    def apply(self, params: Params, x: jax.Array, normalize: Normalize) -> jax.Array:
        y = x.reshape(x.shape[0], -1) @ params["weight"] + params["bias"]
        return jax.nn.relu(y) if self.is_rectified else y


@dataclass(frozen=True)
class SpatialMean:
    """The mean of each channel: [batch, channels]."""

    def parameters(self, shape: Shape) -> Params:
        return ()

    def apply(self, params: Params, x: jax.Array, normalize: Normalize) -> jax.Array:
        return x.mean((1, 2))


@dataclass(frozen=True)
class Chain:
    """Layers one after the other."""

    layers: tuple[Layer, ...]

    def parameters(self, shape: Shape) -> Params:
        params = []
        for layer in self.layers:
            params.append(layer.parameters(shape))
            shape = _result_shape(layer, params[-1], shape)
        return params

    def apply(self, params: Params, x: jax.Array, normalize: Normalize) -> jax.Array:
        for layer, own in zip(self.layers, params, strict=True):
            x = layer.apply(own, x, normalize)
        return x


@dataclass(frozen=True)
class Branches:
    """Layers side by side, their channels one behind the other."""

    branches: tuple[Layer, ...]

    def parameters(self, shape: Shape) -> Params:
        return [branch.parameters(shape) for branch in self.branches]

    def apply(self, params: Params, x: jax.Array, normalize: Normalize) -> jax.Array:
        results = [branch.apply(own, x, normalize) for branch, own in zip(self.branches, params, strict=True)]
        return jnp.concatenate(results, axis=-1)


@dataclass(frozen=True, kw_only=True)
class Residual:
    """A rectified sum of a body's result and its input, or a shortcut's result of it."""

    body: Layer
    shortcut: Layer | None = None

    def parameters(self, shape: Shape) -> Params:
        return {
            "body": self.body.parameters(shape),
            "shortcut": () if self.shortcut is None else self.shortcut.parameters(shape),
        }

    def apply(self, params: Params, x: jax.Array, normalize: Normalize) -> jax.Array:
        kept = x if self.shortcut is None else self.shortcut.apply(params["shortcut"], x, normalize)
        return jax.nn.relu(self.body.apply(params["body"], x, normalize) + kept)


def chain(layers: Sequence[Layer]) -> Layer:
    """Layers one after the other; one of them is itself."""
    return layers[0] if len(layers) == 1 else Chain(tuple(layers))


def _result_shape(layer: Layer, params: Params, shape: Shape) -> Shape:
    def apply(values: Params, x: jax.Array) -> jax.Array:
        return layer.apply(values, x, batch_norm)

    avals = jax.tree.map(lambda leaf: leaf.aval, params, is_leaf=is_leaf)
    result: jax.ShapeDtypeStruct = jax.eval_shape(apply, avals, Leaf(shape, (None,) * len(shape)).aval)
    return tuple(result.shape)
