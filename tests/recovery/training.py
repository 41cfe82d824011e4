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
    """A step of SGD with momentum, noise from a key, and a counter."""
    weights, momentum, count = state
    noise = jax.random.normal(jax.random.fold_in(jax.random.key(7), count), x.shape)

    def loss_of(weights: jax.Array) -> jax.Array:
        return jnp.mean((jnp.tanh((x + 0.1 * noise) @ weights) - 0.5) ** 2)

    loss, gradient = jax.value_and_grad(loss_of)(weights)
    momentum = 0.9 * momentum + gradient
    return (weights - 0.1 * momentum, momentum, count + 1), loss


def slow_train(state: State, x: jax.Array) -> tuple[State, jax.Array]:
    """The same, after some tenths of a second of work."""
    busy = jax.lax.fori_loop(0, 6_000, lambda _, value: jnp.tanh(value @ value), jnp.ones((64, 64)) * x[0, 0])
    return train(state, x + 0.0 * busy[0, 0])


def initial(key: jax.Array, size: int = 64) -> State:
    weights = jax.random.normal(key, (16, size))
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
