"""Mixtures of experts as people write them, small: in what follows, pairs are `k` of each token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

GROUPS, K, TOKENS, WIDTH, HIDDEN = 8, 2, 64, 8, 16


def _route(p: Any, x: Any) -> tuple[Any, Any]:
    weights, chosen = jax.lax.top_k(jax.nn.softmax(x @ p["router"], -1), K)
    return weights, chosen.reshape(-1)


def taken(p: Any, x: Any) -> Any:
    """Rows taken by the permutation and taken back by its inverse, weighted as pairs: JAX's tutorials, MaxText."""
    weights, chosen = _route(p, x)
    order, sizes = jnp.argsort(chosen), jnp.bincount(chosen, length=GROUPS)
    rows = jnp.take(x, order // K, axis=0)
    h = jax.nn.silu(jax.lax.ragged_dot(rows, p["gate"], sizes)) * jax.lax.ragged_dot(rows, p["up"], sizes)
    y = jax.lax.ragged_dot(h, p["down"], sizes)
    return (jnp.take(y, jnp.argsort(order), axis=0).reshape(len(x), K, -1) * weights[..., None]).sum(1)


def scattered(p: Any, x: Any) -> Any:
    """Weighted in sorted order and added to the tokens; one product of gate and up, cut in two."""
    weights, chosen = _route(p, x)
    order, sizes = jnp.argsort(chosen), jnp.zeros(GROUPS, jnp.int32).at[chosen].add(1)
    both = jax.lax.ragged_dot(x[order // K], jnp.concatenate([p["gate"], p["up"]], -1), sizes)
    gate, up = jnp.split(both, 2, -1)
    y = jax.lax.ragged_dot(jnp.maximum(gate, 0) * up, p["down"], sizes) * weights.reshape(-1)[order][:, None]
    return jnp.zeros_like(x).at[order // K].add(y)


def read_in_order(p: Any, x: Any) -> Any:
    """A bias and a running sum in sorted order, which blocks have to make for them; cos(0) is not 0."""
    weights, chosen = _route(p, x)
    order, sizes = jnp.argsort(chosen), (chosen[:, None] == jnp.arange(GROUPS)).sum(0)
    h = jnp.cos(jax.lax.ragged_dot(x[order // K], p["gate"], sizes) + p["bias"][chosen[order]])
    y = jax.lax.ragged_dot(h, p["down"], sizes)
    summed = jnp.zeros_like(x).at[order // K].add(y * weights.reshape(-1)[order][:, None])
    return summed + 1e-3 * jnp.cumsum(y, 0)[-1]


def train(mixture: Callable[[Any, Any], Any], layers: str) -> Callable[[Any, Any], Any]:
    """Loss and gradients of one layer, of two computed again, or of two in a scan computed again."""
    again = jax.checkpoint(mixture)

    def loss(p: Any, x: Any) -> Any:
        if layers == "scan":
            stacked = jax.tree.map(lambda each: jnp.stack([each, 0.5 * each]), p)
            x, _ = jax.lax.scan(lambda h, q: (h + again(q, h), None), x, stacked)
        elif layers == "again":
            x = x + again(p, x)
            x = x + again(p, x)
        else:
            x = x + mixture(p, x)
        return (x**2).mean()

    return jax.value_and_grad(loss, (0, 1))


def arguments() -> tuple[Any, Any]:
    """Parameters and tokens, as numbers; groups are unequal, and the sixth is empty."""
    random = np.random.default_rng(0)

    def normal(*dims: int) -> Any:
        return (0.3 * random.standard_normal(dims)).astype(np.float32)

    tokens = np.abs(normal(TOKENS, WIDTH))
    skew = np.array([2, 0, 1, 0, 0, -9, 0, 1], np.float32)
    params = {
        "router": normal(WIDTH, GROUPS) + skew,
        "gate": normal(GROUPS, WIDTH, HIDDEN),
        "up": normal(GROUPS, WIDTH, HIDDEN),
        "down": normal(GROUPS, HIDDEN, WIDTH),
        "bias": normal(GROUPS, HIDDEN),
    }
    return params, tokens


#: Ragged products of a step of one layer, forward and backward.
PRODUCTS = {"taken": 9, "read_in_order": 6}


def wide_arguments() -> tuple[Any, Any]:
    """The same of widths that JAX's kernel takes, bfloat16."""
    random = np.random.default_rng(0)
    width, hidden, tokens = 128, 128, 256

    def normal(*dims: int) -> Any:
        return jnp.asarray(random.standard_normal(dims) / dims[-2] ** 0.5, "bfloat16")

    skew = jnp.asarray([2, 0, 1, 0, 0, -9, 0, 1], "bfloat16") / width
    params = {
        "router": normal(width, GROUPS) + skew,
        "gate": normal(GROUPS, width, hidden),
        "up": normal(GROUPS, width, hidden),
        "down": normal(GROUPS, hidden, width),
        "bias": jnp.zeros((GROUPS, hidden), "bfloat16"),
    }
    return params, abs(normal(tokens, width)) * width**0.5
