"""A training whose batch many numbers of devices divide, and its oracle: JAX on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import shardwright as sw

State = dict[str, jax.Array]


def train(state: State, x: jax.Array) -> tuple[State, jax.Array]:
    """A step of SGD with momentum of a perceptron with one hidden layer."""

    def loss_of(weights: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ weights["in"]) @ weights["out"] - 0.5) ** 2)

    weights = {name: state[name] for name in ("in", "out")}
    loss, gradient = jax.value_and_grad(loss_of)(weights)
    momentum = {name: 0.9 * state[f"{name}_momentum"] + gradient[name] for name in weights}
    updated = {name: weights[name] - 0.1 * momentum[name] for name in weights}
    return {
        **updated,
        **{f"{name}_momentum": value for name, value in momentum.items()},
        "count": state["count"] + 1,
    }, loss


def initial(key: jax.Array) -> State:
    first, second = jax.random.split(key)
    weights = {"in": jax.random.normal(first, (24, 48)), "out": jax.random.normal(second, (48, 12))}
    momentum = {f"{name}_momentum": jnp.zeros_like(value) for name, value in weights.items()}
    return {**weights, **momentum, "count": jnp.zeros((), jnp.int32)}


def batches(count: int) -> Iterator[np.ndarray]:
    random = np.random.default_rng(3)
    for _ in range(count):
        yield random.normal(size=(24, 24)).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run left: its losses, and the state."""

    losses: list[float]
    state: dict[str, np.ndarray]


def run(
    session: sw.Session,
    steps: int,
    *,
    function: Callable[..., Any] = train,
    after_call: Callable[[int], None] = lambda number: None,
    **options: Any,
) -> Outcome:
    """A user's loop. after_call: is told of each call, of 1 on, when it has been sent."""
    step = session.parallelize(function, donate_argnums=0, **options)
    state = step.init(initial, jax.random.key(0))
    losses = []
    for number, x in enumerate(batches(steps), start=1):
        state, loss = step(state, x)
        losses.append(loss)
        after_call(number)
    return Outcome([float(loss) for loss in losses], {name: np.asarray(leaf) for name, leaf in state.items()})


def run_on_one_device(steps: int) -> Outcome:
    """The same by JAX alone."""
    state, losses = initial(jax.random.key(0)), []
    for x in batches(steps):
        state, loss = jax.jit(train)(state, x)
        losses.append(float(loss))
    return Outcome(losses, {name: np.asarray(leaf) for name, leaf in state.items()})


def assert_close(disturbed: Outcome, undisturbed: Outcome) -> None:
    """Within 1e-5, relative to the largest; no step twice, none left out."""
    assert disturbed.state["count"] == len(disturbed.losses) == undisturbed.state["count"]
    np.testing.assert_allclose(disturbed.losses, undisturbed.losses, rtol=1e-5)
    for name, expected in undisturbed.state.items():
        np.testing.assert_allclose(disturbed.state[name], expected, atol=1e-5 * np.abs(expected).max())
