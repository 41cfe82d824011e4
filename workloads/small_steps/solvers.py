"""Steps with solvers, decompositions, sorting and control flow: kernels, policies, optimizers of matrices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from workloads.small_steps.made import Step, integers, make_train_step, normal, weights


def gaussian_process() -> Step:
    """The evidence of Gaussian processes: Cholesky factors and triangular solves, a batch of them."""
    params = {"lengths": np.zeros(8, np.float32), "noise": np.float32(0.1), "mix": normal(8, 8, scale=0.3)}

    def loss(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        def of_one(x: jax.Array, y: jax.Array) -> jax.Array:
            z = (x @ p["mix"]) * jnp.exp(p["lengths"])
            kernel = jnp.exp(-0.5 * jnp.sum((z[:, None] - z) ** 2, -1))
            factor = jnp.linalg.cholesky(kernel + (jnp.exp(p["noise"]) + 0.01) * jnp.eye(x.shape[0]))
            white = jax.scipy.linalg.solve_triangular(factor, y, lower=True)
            return 0.5 * jnp.sum(white**2) + jnp.sum(jnp.log(jnp.diag(factor)))

        return jax.vmap(of_one)(x, y).mean()

    return make_train_step(loss, params, normal(16, 24, 8), normal(16, 24, seed=1))


def policy() -> Step:
    """Proximal policy optimization (Schulman et al., 2017): advantages by a scan backwards, shuffled minibatches."""
    params = {"first": weights(24, 128), "second": weights(128, 128, seed=1)}
    params |= {"action": weights(128, 6, seed=2), "value": weights(128, 1, seed=3)}
    optimizer = optax.adam(3e-4)

    def network(p: Any, observation: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = jnp.tanh(jnp.tanh(observation @ p["first"]) @ p["second"])
        return h @ p["action"], (h @ p["value"])[..., 0]

    def loss(p: Any, batch: Any) -> jax.Array:
        seen, action, before, advantage, wanted = batch
        logits, value = network(p, seen)
        now = jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], 1)[:, 0]
        ratio, gain = jnp.exp(now - before), (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        return (
            0.5 * jnp.mean((value - wanted) ** 2) - jnp.minimum(ratio * gain, jnp.clip(ratio, 0.8, 1.2) * gain).mean()
        )

    def step(
        p: Any, state: Any, key: jax.Array, seen: jax.Array, action: Any, reward: Any, done: Any, before: Any
    ) -> Any:
        _, value = network(p, seen)

        def summed(later: jax.Array, now: Any) -> tuple[jax.Array, jax.Array]:
            reward, done, value, following = now
            result = reward + 0.99 * following * (1 - done) - value + 0.94 * (1 - done) * later
            return result, result

        following = jnp.concatenate([value[1:], value[-1:]])
        _, advantage = lax.scan(summed, jnp.zeros(value.shape[1]), (reward, done, value, following), reverse=True)
        rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (seen, action, before, advantage, advantage + value))
        order = jax.random.permutation(key, len(rows[1])).reshape(4, -1)

        def updated(carry: Any, batch: Any) -> tuple[Any, jax.Array]:
            result, gradients = jax.value_and_grad(loss)(carry[0], batch)
            updates, state = optimizer.update(gradients, carry[1], carry[0])
            return (optax.apply_updates(carry[0], updates), state), result

        (p, state), losses = lax.scan(updated, (p, state), jax.tree.map(lambda x: x[order], rows))
        return p, state, losses.mean()

    shape = (32, 16)
    done = (np.random.default_rng(0).random(shape) < 0.05).astype(np.float32)
    batch = (normal(*shape, 24), integers(0, 6, *shape), normal(*shape, seed=1), done, -np.ones(shape, np.float32))
    return Step(step, (params, optimizer.init(params), jax.random.PRNGKey(0), *batch))


def followed_slope() -> Step:
    """A network that gives slopes, followed by the Runge-Kutta method (Chen et al., 2018)."""
    params = {"up": weights(32, 128, seed=1), "down": weights(128, 32, seed=2)}

    def loss(p: Any, x: jax.Array, wanted: jax.Array) -> jax.Array:
        def slope(x: jax.Array, t: Any) -> jax.Array:
            return jnp.tanh(x @ p["up"] + t) @ p["down"]

        def step(x: jax.Array, t: jax.Array) -> tuple[jax.Array, None]:
            first = slope(x, t)
            second = slope(x + 0.05 * first, t + 0.05)
            third = slope(x + 0.05 * second, t + 0.05)
            return x + 0.1 / 6 * (first + 2 * second + 2 * third + slope(x + 0.1 * third, t + 0.1)), None

        return jnp.mean((lax.scan(step, x, jnp.arange(10) * 0.1)[0] - wanted) ** 2)

    return make_train_step(loss, params, normal(64, 32), normal(64, 32, seed=1))


def quantiles() -> Step:
    """Sorted predictions, and a loss over the examples of least weight: sort, cumulative sums, a binary search."""
    params = {"first": weights(16, 64, seed=1), "second": weights(64, 9, seed=2)}

    def loss(p: Any, x: jax.Array, y: jax.Array, share: jax.Array) -> jax.Array:
        error = y[:, None] - jnp.sort(jax.nn.gelu(x @ p["first"]) @ p["second"], -1)
        level = jnp.linspace(0.1, 0.9, 9)
        pinball = jnp.maximum(level * error, (level - 1) * error).sum(-1)
        order = jnp.argsort(pinball)
        reached = jnp.cumsum(share[order])
        result = jnp.arange(len(pinball)) < jnp.searchsorted(reached, 0.9 * reached[-1])
        return jnp.sum(jnp.where(result, pinball[order], 0)) / jnp.maximum(1, result.sum())

    return make_train_step(loss, params, normal(128, 16), normal(128, seed=1), np.abs(normal(128, seed=2)))


def scaled_loss() -> Step:
    """Half precision with a loss scale, and an update only where every gradient is finite."""
    params = {"first": weights(64, 128, seed=1), "second": weights(128, 64, seed=2)}
    optimizer = optax.sgd(1e-2, momentum=0.9)

    def step(p: Any, state: Any, scale: jax.Array, x: jax.Array, y: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            first, second, half = (each.astype(jnp.float16) for each in (p["first"], p["second"], x))
            return (
                jnp.mean((jax.nn.relu(half @ first) @ second - y.astype(jnp.float16)).astype(jnp.float32) ** 2) * scale
            )

        result, gradients = jax.value_and_grad(loss)(p)
        gradients = jax.tree.map(lambda g: g / scale, gradients)
        is_finite = jnp.all(jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(gradients)]))

        def updated(p: Any, state: Any) -> Any:
            updates, state = optimizer.update(gradients, state, p)
            return optax.apply_updates(p, updates), state

        p, state = lax.cond(is_finite, updated, lambda p, state: (p, state), p, state)
        return p, state, jnp.where(is_finite, scale * 1.001, scale / 2), result / scale

    return Step(step, (params, optimizer.init(params), np.float32(1024), normal(64, 64), normal(64, 64, seed=1)))


def orthogonal_updates() -> Step:
    """Momentum made orthogonal by Newton-Schulz iterations (Jordan et al., 2024)."""
    params = {"a": weights(64, 256, seed=1), "b": weights(256, 256, seed=2), "c": weights(256, 64, seed=3)}

    def orthogonal(g: jax.Array) -> jax.Array:
        is_tall = g.shape[0] > g.shape[1]
        x = g.T if is_tall else g

        def turn(_: Any, x: jax.Array) -> jax.Array:
            square = x @ x.T
            return 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x

        x = lax.fori_loop(0, 5, turn, x / (jnp.linalg.norm(x) + 1e-7))
        return x.T if is_tall else x

    def step(p: Any, momentum: Any, x: jax.Array, y: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            return jnp.mean((jax.nn.relu(jax.nn.relu(x @ p["a"]) @ p["b"]) @ p["c"] - y) ** 2)

        result, gradients = jax.value_and_grad(loss)(p)
        momentum = jax.tree.map(lambda m, g: 0.95 * m + g, momentum, gradients)
        return jax.tree.map(lambda p, m: p - 0.02 * orthogonal(m), p, momentum), momentum, result

    return Step(step, (params, jax.tree.map(np.zeros_like, params), normal(64, 64), normal(64, 64, seed=1)))


def inverse_roots() -> Step:
    """Gradients preconditioned by inverse roots of their second moments (Gupta et al., 2018), by eigenvectors."""
    params = {"first": weights(32, 48, seed=1), "second": weights(48, 16, seed=2)}
    moments = {name: tuple(np.eye(size, dtype=np.float32) for size in p.shape) for name, p in params.items()}

    def root(moment: jax.Array) -> jax.Array:
        values, vectors = jnp.linalg.eigh(moment + 1e-4 * jnp.eye(len(moment)))
        return (vectors * jnp.maximum(values, 1e-6) ** -0.25) @ vectors.T

    def step(p: Any, moments: Any, x: jax.Array, y: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            return jnp.mean((jnp.tanh(x @ p["first"]) @ p["second"] - y) ** 2)

        result, gradients = jax.value_and_grad(loss)(p)
        moments = {name: (left + gradients[name] @ gradients[name].T, right + gradients[name].T @ gradients[name])
                   for name, (left, right) in moments.items()}  # fmt: skip
        p = {
            name: p[name] - 0.01 * root(left) @ gradients[name] @ root(right) for name, (left, right) in moments.items()
        }
        return p, moments, result

    return Step(step, (params, moments, normal(64, 32), normal(64, 16, seed=1)))


SOLVERS = {
    each.__name__.replace("_", "-"): each
    for each in (
        gaussian_process, policy, followed_slope, quantiles, scaled_loss, orthogonal_updates, inverse_roots,
    )
}  # fmt: skip
