"""A small training on a dataset, on servers and on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import shardwright as sw
from tests.datasets import sources

MODULE = "tests.datasets.sources"
BATCHES = f"{MODULE}:batches"
BATCH = 16


def loss_of(w: jax.Array, batch: Any) -> jax.Array:
    return jnp.mean((jnp.tanh(batch["x"] @ w) - batch["y"]) ** 2)


def train_step(w: jax.Array, batch: Any) -> tuple[jax.Array, jax.Array]:
    loss, gradient = jax.value_and_grad(loss_of)(w, batch)
    return w - 0.1 * gradient, loss


def initial(key: jax.Array) -> jax.Array:
    return jax.random.normal(key, (sources.WIDTH, 1))


def run(
    session: sw.Session,
    data: sw.Dataset,
    steps: int,
    *,
    after_call: Callable[[int], None] = lambda number: None,
    **options: Any,
) -> list[float]:
    """Losses of a user's loop. after_call: is told of each call, of 1 on, when it has been sent."""
    step = session.parallelize(train_step, donate_argnums=0, **options)
    w = step.init(initial, jax.random.key(0))
    losses = []
    for number in range(1, steps + 1):
        w, loss = step(w, next(data))
        losses.append(loss)
        after_call(number)
    return [float(loss) for loss in losses]


def expected(steps: int, *, batch: int = BATCH, seed: int = 0) -> list[float]:
    """Losses of one device."""
    step, w = jax.jit(train_step), initial(jax.random.key(0))
    losses = []
    for number in range(steps):
        whole = sources.whole_batch(number, batch, seed)
        w, loss = step(w, {name: whole[name] for name in ("x", "y")})
        losses.append(float(loss))
    return losses


def assert_close(actual: list[float], expected: list[float]) -> None:
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
