"""A small training step, its batches, and what single-device JAX makes of both."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

WIDTH, BATCH, LAYERS = 256, 64, 3

State = list[jax.Array]


def init(key: Any) -> State:
    return [jax.random.normal(each, (WIDTH, WIDTH)) * 0.05 for each in jax.random.split(key, LAYERS)]


def loss_of(params: State, x: Any, y: Any) -> jax.Array:
    for weight in params:
        x = jnp.tanh(x @ weight)
    return jnp.mean((x - y) ** 2)


def train(params: State, x: Any, y: Any) -> tuple[State, jax.Array]:
    loss, gradients = jax.value_and_grad(loss_of)(params, x, y)
    return [weight - 0.1 * gradient for weight, gradient in zip(params, gradients, strict=True)], loss


def batch(number: int, size: int = BATCH) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(number)
    x, y = (random.normal(size=(size, WIDTH)).astype(np.float32) for _ in range(2))
    return x, y


class Run:
    """A step on the servers beside single-device JAX, on the same batches."""

    def __init__(self, step: Any) -> None:
        self.step = step
        self.params = step.init(init, jax.random.key(0))
        self.expected = init(jax.random.key(0))
        self.calls = 0

    def go(self, calls: int = 1, size: int = BATCH) -> None:
        """Calls both; the losses are equal."""
        for _ in range(calls):
            x, y = batch(self.calls, size)
            self.params, loss = self.step(self.params, x, y)
            self.expected, expected = jax.jit(train)(self.expected, x, y)
            assert abs(float(loss) - float(expected)) <= 1e-5
            self.calls += 1

    def check_state(self) -> None:
        for mine, theirs in zip(self.params, self.expected, strict=True):
            np.testing.assert_allclose(np.asarray(mine), np.asarray(theirs), atol=1e-5)
