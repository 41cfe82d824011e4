"""Training steps whose batch is used in ways that micro-batches must follow.

Each builder returns (step, arguments, donated argument numbers), as in `tests.planner.programs`; all update by plain
gradient descent, so that parameters can be compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.planner.programs import Program, cnn, control, gpt2, scan

BATCH, LENGTH, WIDTH = 4, 6, 8


def normal(seed: int, *shape: int) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=shape) * 0.5).astype(np.float32)


def integers(seed: int, high: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, high, shape).astype(np.int32)


def descent(loss: Callable[..., Any], params: Any, *batch: Any) -> Program:
    """One step of gradient descent; the batch is not donated."""

    def step(params: Any, *batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, *batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    return step, (params, *batch), (0,)


def dropout(implementation: str = "threefry2x32") -> Program:
    """Masks drawn for the whole batch at once, from counters (threefry) or by a generator (rbg)."""
    params = {"w": normal(1, WIDTH, WIDTH), "v": normal(2, WIDTH, WIDTH)}

    def loss(p: Any, x: Any, key_data: Any) -> Any:
        key = jax.random.wrap_key_data(key_data, impl=implementation)
        for weight in p.values():
            key, drop = jax.random.split(key)
            x = jnp.tanh(x @ weight)
            x = jnp.where(jax.random.bernoulli(drop, 0.7, x.shape), x / 0.7, 0.0)
        return jnp.mean(x**2)

    key_data = np.asarray(jax.random.key_data(jax.random.key(3, impl=implementation)))
    return descent(loss, params, normal(4, BATCH, LENGTH, WIDTH), key_data)


def masked() -> Program:
    """The mean over tokens that count, of which every micro-batch has another number."""
    params = {"w": normal(1, WIDTH, WIDTH)}

    def loss(p: Any, x: Any, lengths: Any) -> Any:
        mask = (jnp.arange(LENGTH) < lengths[:, None]).astype(jnp.float32)
        return jnp.sum(jnp.tanh(x @ p["w"]).mean(-1) * mask) / jnp.maximum(jnp.sum(mask), 1.0)

    return descent(loss, params, normal(2, BATCH, LENGTH, WIDTH), np.array([1, 2, 6, 5], np.int32))


def weighted() -> Program:
    """Inputs normalised by their own statistics, labels weighted by their frequency in the batch."""
    params = {"w": normal(1, WIDTH, 3)}

    def loss(p: Any, x: Any, y: Any) -> Any:
        weights = 1 / jnp.maximum(jnp.sum(jax.nn.one_hot(y, 3), axis=0), 1.0)
        logits = ((x - x.mean(0)) / x.std(0)) @ p["w"]
        return -jnp.sum(jax.nn.log_softmax(logits) * jax.nn.one_hot(y, 3) * weights)

    return descent(loss, params, normal(2, BATCH, WIDTH), integers(3, 3, BATCH))


def own_labels() -> Program:
    """Each token's own logit by counted indices, in a scan over layers too."""
    params = {"w": normal(1, 2, WIDTH, WIDTH), "v": normal(2, WIDTH, 5)}

    def loss(p: Any, x: Any, y: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            h = jnp.tanh(x @ w)
            return h.at[jnp.arange(BATCH), y].add(1.0), h[jnp.arange(BATCH), y]

        x, picked = jax.lax.scan(layer, x, p["w"])
        scores = jax.nn.log_softmax(x @ p["v"])
        return picked.mean() - scores[jnp.arange(BATCH), y].mean()

    return descent(loss, params, normal(3, BATCH, WIDTH), integers(4, 5, BATCH))


def time_major() -> Program:
    """The batch second, merged with time and parted again."""
    params = {"w": normal(1, WIDTH, WIDTH), "u": normal(2, WIDTH, WIDTH)}

    def loss(p: Any, x: Any) -> Any:
        y = jnp.tanh(x.reshape(LENGTH * BATCH, WIDTH) @ p["w"]).reshape(x.shape)

        def cell(h: Any, row: Any) -> Any:
            h = jnp.tanh(h @ p["u"] + row)
            return h, h

        _, hs = jax.lax.scan(cell, jnp.zeros((BATCH, WIDTH)), y)
        return jnp.mean(hs**2)

    return descent(loss, params, normal(3, LENGTH, BATCH, WIDTH))


def clipped() -> Program:
    """Gradients clipped by their norm over all parameters; the norm is handed out."""
    params = {"w": normal(1, WIDTH, WIDTH), "b": normal(2, WIDTH)}

    def step(p: Any, x: Any) -> Any:
        value, gradients = jax.value_and_grad(lambda p: jnp.mean((x @ p["w"] + p["b"]) ** 4))(p)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(gradients)))
        scale = jnp.minimum(1.0, 0.01 / norm)
        return jax.tree.map(lambda p, g: p - scale * g, p, gradients), value, norm

    return step, (params, normal(3, BATCH, WIDTH)), (0,)


def rematerialised() -> Program:
    """Layers run by a scan and computed again for the backward pass, each with dropout of its own."""
    params = {"w": normal(1, 3, WIDTH, WIDTH), "v": normal(2, 3, WIDTH, WIDTH)}

    def loss(p: Any, x: Any, key_data: Any) -> Any:
        @jax.checkpoint
        def layer(carry: Any, p: Any) -> Any:
            x, key = carry
            key, drop = jax.random.split(key)
            y = jnp.tanh(x @ p["w"]) * jax.random.bernoulli(drop, 0.8, x.shape)
            return (x + y @ p["v"], key), None

        (x, _), _ = jax.lax.scan(layer, (x, jax.random.wrap_key_data(key_data)), p)
        return jnp.mean(x**2)

    return descent(loss, params, normal(3, BATCH, LENGTH, WIDTH), np.array([1, 2], np.uint32))


def outputs() -> Program:
    """What is handed out for each example, in the batch's order, and the largest over all."""
    params = {"w": normal(1, WIDTH, WIDTH)}

    def step(p: Any, x: Any, y: Any) -> Any:
        def loss(p: Any) -> Any:
            logits = jnp.tanh(x @ p["w"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), logits

        (value, logits), gradients = jax.value_and_grad(loss, has_aux=True)(p)
        right = jnp.mean(jnp.argmax(logits, -1) == y)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, gradients), value, logits, right, jnp.max(logits)

    return step, (params, normal(2, BATCH, LENGTH, WIDTH), integers(3, WIDTH, BATCH, LENGTH)), (0,)


def attending() -> Program:
    """A mask as large as the scores, that layers run by a scan read."""

    def loss(p: Any, x: Any) -> Any:
        mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))

        @jax.checkpoint
        def layer(x: Any, w: Any) -> Any:
            q = x @ w
            scores = jnp.einsum("bqd,bkd->bqk", q, q)
            scores = jnp.where(jnp.broadcast_to(mask, scores.shape), scores, -1e9)
            return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), x), None

        return jnp.mean(jax.lax.scan(layer, x, p)[0] ** 2)

    return descent(loss, normal(1, 3, WIDTH, WIDTH), normal(2, BATCH, LENGTH, WIDTH))


def carried() -> Program:
    """A state for each example, kept between steps and updated in place; a branch that looks at a counter."""
    params = {"w": normal(1, WIDTH, WIDTH), "u": normal(2, WIDTH, WIDTH)}

    def step(p: Any, state: Any, count: Any, x: Any) -> Any:
        def loss(p: Any) -> Any:
            h = jnp.tanh(x @ p["w"] + state @ p["u"])
            h = jax.lax.cond(count % 2 == 0, lambda h: h * 2.0, jnp.zeros_like, h)
            return jnp.mean(h**2), h

        (value, state), gradients = jax.value_and_grad(loss, has_aux=True)(p)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, gradients), state, count + 1, value

    return step, (params, normal(3, BATCH, WIDTH), np.int32(4), normal(4, BATCH, WIDTH)), (0, 1, 2)


def images() -> Program:
    """Convolutions, one of them grouped, with group norm, pooling, and its gradients."""
    params = {"k": normal(1, 3, 3, 2, WIDTH), "d": normal(2, 3, 3, 1, WIDTH), "w": normal(3, WIDTH, 5)}
    layout = ("NHWC", "HWIO", "NHWC")

    def loss(p: Any, x: Any, y: Any) -> Any:
        h = jax.lax.conv_general_dilated(x, p["k"], (1, 1), "SAME", dimension_numbers=layout)
        groups = h.reshape(*h.shape[:3], 2, -1)
        mean, variance = groups.mean((1, 2, 4), keepdims=True), groups.var((1, 2, 4), keepdims=True)
        h = jax.nn.relu(((groups - mean) * jax.lax.rsqrt(variance + 1e-5)).reshape(h.shape))
        h = jax.lax.conv_general_dilated(h, p["d"], (1, 1), "SAME", dimension_numbers=layout, feature_group_count=WIDTH)
        h = jax.lax.reduce_window(h, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return optax.softmax_cross_entropy_with_integer_labels(h.mean((1, 2)) @ p["w"], y).mean()

    return descent(loss, params, normal(4, BATCH, 6, 6, 2), integers(5, 5, BATCH))


def small_gpt2() -> Program:
    return gpt2(layers=1, width=16, heads=2, vocabulary=32, length=6, batch=16)


EXACT: dict[str, Callable[[], Program]] = {
    "gpt2 tied": lambda: gpt2(layers=1, width=16, heads=2, vocabulary=32, length=6, batch=4),
    "scan": lambda: scan(layers=2, batch=4, width=8),
    "control": lambda: control(batch=4, width=8),
    "dropout": dropout,
    "dropout rbg": lambda: dropout("rbg"),
    "masked": masked,
    "own labels": own_labels,
    "weighted": weighted,
    "time major": time_major,
    "clipped": clipped,
    "rematerialised": rematerialised,
    "outputs": outputs,
    "attending": attending,
    "carried": carried,
    "images": images,
}

BATCH_NORM = cnn
