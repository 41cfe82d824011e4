"""One model under losses written in every way, and with results in every order."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.planner.stages.stage_programs import normal

BATCH, WIDTH, CLASSES, LAYERS = 16, 16, 8, 4

_cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def _one_hot(labels: Any) -> Any:
    return jax.nn.one_hot(labels, CLASSES)


def _picked(values: Any, labels: Any) -> Any:
    return jnp.take_along_axis(values, labels[:, None], 1)[:, 0]


#: Of logits and labels.
LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "optax": lambda z, y: _cross_entropy(z, y).mean(),
    "take_along_axis": lambda z, y: -_picked(jax.nn.log_softmax(z), y).mean(),
    "one-hot": lambda z, y: optax.softmax_cross_entropy(z, _one_hot(y)).mean(),
    "logsumexp": lambda z, y: (jax.nn.logsumexp(z, -1) - _picked(z, y)).mean(),
    "masked": lambda z, y: jnp.sum(_cross_entropy(z, y) * (y > 0)) / BATCH,
    "smoothed": lambda z, y: optax.softmax_cross_entropy(z, optax.smooth_labels(_one_hot(y), 0.1)).mean(),
    "indexed": lambda z, y: -jax.nn.log_softmax(z)[jnp.arange(BATCH), y].mean(),
    "several": lambda z, y: _cross_entropy(z, y).mean() + 0.1 * jnp.mean((z - _one_hot(y)) ** 2),
}


def _accuracy(logits: Any) -> Any:
    return (logits.argmax(-1) == 0).mean()


def _in_top(logits: Any) -> Any:
    return jnp.any(jax.lax.top_k(logits, 3)[1] == 1, -1).mean()


def _norm(tree: Any) -> Any:
    return jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree)))


def _rate(state: Any) -> Any:
    return optax.cosine_decay_schedule(0.1, 10)(state[0].count)


#: Of the loss's value, logits, gradients, parameters and the optimizer's state.
RESULTS: dict[str, Callable[..., Any]] = {
    "loss, accuracy": lambda v, z, g, p, s: (v, _accuracy(z)),
    "accuracy, loss": lambda v, z, g, p, s: (_accuracy(z), v),
    "gradient norm, loss": lambda v, z, g, p, s: {"a": _norm(g), "b": v},
    "loss, gradient norm": lambda v, z, g, p, s: {"a": v, "b": _norm(g)},
    "many": lambda v, z, g, p, s: {
        "accuracy": _accuracy(z), "grad_norm": _norm(g), "loss": v, "lr": _rate(s),
        "norm": _norm(p), "perplexity": jnp.exp(v), "top3": _in_top(z),
    },
    "logits, loss": lambda v, z, g, p, s: (z, v),
    "accuracy": lambda v, z, g, p, s: _accuracy(z),
    "gradient norm": lambda v, z, g, p, s: _norm(g),
    "nothing": lambda v, z, g, p, s: (),
}  # fmt: skip


def classifier(loss: str = "optax", results: str = "accuracy, loss", layers: int = LAYERS) -> Any:
    """A step of a deep classifier, as (step, arguments, donated argument numbers)."""
    optimizer = optax.adam(1e-3)
    params = {
        "w": [normal(i, WIDTH, WIDTH) for i in range(layers)],
        "b": [normal(50 + i, WIDTH) for i in range(layers)],
        "head": normal(99, WIDTH, CLASSES),
    }

    def loss_of(p: Any, x: Any, y: Any) -> Any:
        for w, b in zip(p["w"], p["b"], strict=True):
            x = jax.nn.relu(x @ w + b)
        logits = x @ p["head"]
        return LOSSES[loss](logits, y), logits

    def step(p: Any, state: Any, x: Any, y: Any) -> Any:
        (value, logits), gradients = jax.value_and_grad(loss_of, has_aux=True)(p, x, y)
        updates, new_state = optimizer.update(gradients, state, p)
        told = RESULTS[results](value, logits, gradients, p, state)
        return optax.apply_updates(p, updates), new_state, told

    labels = np.random.default_rng(0).integers(0, CLASSES, BATCH).astype(np.int32)
    return step, (params, optimizer.init(params), normal(200, BATCH, WIDTH), labels), (0, 1)


def without_names(text: str) -> str:
    """The text as frameworks write it that keep no name stack."""
    return re.sub(r", metadata=\{[^{}]*\}", "", text)
