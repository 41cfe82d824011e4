"""A small model in both its forms: initializer and step, for SGD and AdamW; and how far two states are apart."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardwright as sw

FEATURES, HIDDEN, CLASSES, ROWS = 16, 32, 8, 16


def init_params(key: Any) -> dict[str, Any]:
    first, second = jax.random.split(key)
    return {
        "w1": jax.random.normal(first, (FEATURES, HIDDEN)) * 0.3,
        "b1": jnp.zeros(HIDDEN),
        "w2": jax.random.normal(second, (HIDDEN, CLASSES)) * 0.3,
    }


def loss_of(params: Any, batch: Any) -> Any:
    hidden = jax.nn.gelu(batch["x"] @ params["w1"] + params["b1"])
    logits = hidden @ params["w2"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def sgd_step(params: Any, batch: Any) -> tuple[Any, Any]:
    loss, gradients = jax.value_and_grad(loss_of)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.3 * g, params, gradients), loss


ADAMW = optax.adamw(1e-2)


def init_adamw(key: Any) -> tuple[Any, Any]:
    params = init_params(key)
    return params, ADAMW.init(params)


def adamw_step(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, Any]:
    loss, gradients = jax.value_and_grad(loss_of)(params, batch)
    updates, opt_state = ADAMW.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def batches(count: int, rows: int = ROWS, seed: int = 0) -> Iterator[dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    for _ in range(count):
        x = rng.normal(size=(rows, FEATURES)).astype(np.float32)
        yield {"x": x, "y": np.argmax(x[:, :CLASSES], axis=1).astype(np.int32)}


def distance(ours: Any, theirs: Any) -> float:
    """Largest distance of two leaves, relative to the norm of the second tree's leaf."""
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    return max(
        float(np.linalg.norm(np.asarray(a) - np.asarray(b)) / max(np.linalg.norm(np.asarray(b)), 1e-12))
        for a, b in pairs
    )


@cache
def sgd_on_one_device(steps: int) -> tuple[Any, list[float]]:
    """Parameters and losses."""
    params, step, losses = jax.jit(init_params)(jax.random.key(0)), jax.jit(sgd_step), []
    for batch in batches(steps):
        params, loss = step(params, batch)
        losses.append(float(loss))
    return params, losses


def train_as_on_one_device(session: sw.Session, **options: Any) -> sw.Step:
    """Ten steps of SGD through servers, whose numbers are those of one device; the step that made them."""
    step = session.parallelize(sgd_step, donate_argnums=0, **options)
    params = step.init(init_params, jax.random.key(0))
    expected, expected_losses = sgd_on_one_device(10)
    for batch, expected_loss in zip(batches(10), expected_losses, strict=True):
        params, loss = step(params, batch)
        assert abs(float(loss) - expected_loss) <= 1e-5
    assert distance(params, expected) <= 1e-5
    return step
