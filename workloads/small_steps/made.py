"""What the steps are put together from: arrays with a seed each, and Adam with clipped gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

Tree = Any

#: Dimensions of images and of kernels.
IMAGES = ("NHWC", "HWIO", "NHWC")


class Step(NamedTuple):
    """A step, and the arrays that it is called with."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def weights(*shape: int, seed: int = 0) -> np.ndarray:
    return normal(*shape, seed=seed, scale=0.02)


def integers(low: int, high: int, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(low, high, shape).astype(np.int32)


def make_train_step(loss: Callable[..., jax.Array], params: Tree, *batch: Any, optimizer: Any = None) -> Step:
    """A step of AdamW with gradients clipped by their norm, or of another optimizer, on `loss(params, *batch)`."""
    chosen = optimizer or optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

    def step(params: Tree, state: Tree, *batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, *batch)
        updates, state = chosen.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return Step(step, (params, chosen.init(params), *batch))


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
