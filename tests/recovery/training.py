"""A small training with a counter in its state, and loops that are disturbed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import shardwright as sw

State = tuple[jax.Array, jax.Array, jax.Array]


def train(state: State, x: jax.Array) -> tuple[State, jax.Array]:
    """A step of SGD with momentum, noise that only the right counter gives again, and the counter."""
    return _update(state, x, jnp.sin(state[2] * jnp.arange(1.0, 1 + x.size, dtype=x.dtype)).reshape(x.shape))


def train_by_key(state: State, x: jax.Array) -> tuple[State, jax.Array]:
    """The same with noise from a key: a program that takes three times as long to compile."""
    return _update(state, x, jax.random.normal(jax.random.fold_in(jax.random.key(7), state[2]), x.shape))


def slow_train(state: State, x: jax.Array) -> tuple[State, jax.Array]:
    """The same, after some hundredths of a second of work on each device."""
    busy = jax.lax.fori_loop(0, 3_000, lambda _, value: jnp.tanh(value @ value), jnp.ones((64, 64)) * x[0, 0])
    return train_by_key(state, x + 0.0 * busy[0, 0])


def _update(state: State, x: jax.Array, noise: jax.Array) -> tuple[State, jax.Array]:
    weights, momentum, count = state

    def loss_of(weights: jax.Array) -> jax.Array:
        return jnp.mean((jnp.tanh((x + 0.1 * noise) @ weights) - 0.5) ** 2)

    loss, gradient = jax.value_and_grad(loss_of)(weights)
    momentum = 0.9 * momentum + gradient
    return (weights - 0.1 * momentum, momentum, count + 1), loss


def deep_train(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
    """A step of SGD with momentum of two layers, for two stages, at a rate that the counter decides."""
    weights, momentum, count = state

    def loss_of(weights: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean((jnp.tanh(jnp.tanh(x @ weights["in"]) @ weights["out"]) - x) ** 2)

    loss, gradient = jax.value_and_grad(loss_of)(weights)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradient)
    return (jax.tree.map(lambda w, m: w - 0.1 / (1 + count) * m, weights, momentum), momentum, count + 1), loss


def deep_initial(key: jax.Array) -> Any:
    weights, momentum, count = initial(key)
    return {"in": weights, "out": jnp.cos(weights.T)}, {"in": momentum, "out": momentum.T}, count


def initial(key: jax.Array, size: int = 64) -> State:
    """Weights of (16, size) that are soon made, whatever the size."""
    weights = jnp.sin(jax.random.uniform(key, (16, 1)) * jnp.arange(1.0, 1 + size))
    return weights, jnp.zeros_like(weights), jnp.zeros((), jnp.int32)


def batches(count: int) -> Iterator[np.ndarray]:
    random = np.random.default_rng(3)
    for _ in range(count):
        yield random.normal(size=(8, 16)).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run left: its losses, and the state."""

    losses: list[float]
    weights: np.ndarray
    momentum: np.ndarray
    count: int


def run(
    session: sw.Session,
    steps: int,
    *,
    function: Callable[..., Any] = train,
    size: int = 64,
    after_call: Callable[[int], None] = lambda number: None,
    **options: Any,
) -> Outcome:
    """A user's loop. after_call: is told of each call, of 1 on, when it has been sent."""
    step = session.parallelize(function, donate_argnums=0, **options)
    state = step.init(lambda key: initial(key, size), jax.random.key(0))
    losses = []
    for number, x in enumerate(batches(steps), start=1):
        state, loss = step(state, x)
        losses.append(loss)
        after_call(number)
    weights, momentum, count = (np.asarray(leaf) for leaf in state)
    return Outcome([float(loss) for loss in losses], weights, momentum, int(count))


def assert_same(disturbed: Outcome, undisturbed: Outcome) -> None:
    """Bit for bit."""
    assert disturbed.count == len(disturbed.losses) == undisturbed.count
    assert disturbed.losses == undisturbed.losses
    np.testing.assert_array_equal(disturbed.weights, undisturbed.weights)
    np.testing.assert_array_equal(disturbed.momentum, undisturbed.momentum)


def later(seconds: float, act: Callable[[], object]) -> threading.Timer:
    """`act`, in a thread of its own."""
    timer = threading.Timer(seconds, act)
    timer.start()
    return timer
