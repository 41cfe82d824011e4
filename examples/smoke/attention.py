"""Causal attention on eight CPU devices: once as the planner likes, once with batch and heads pinned.

    python examples/smoke/attention.py

Uses the server at SERVER_IP/SERVER_PORT, or starts an embedded one with eight CPU devices.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that a script finds the other examples

import shardwright as sw
from examples.smoke.check import check


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Queries, keys and values are [batch, time, heads, size]."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def attention_by_heads(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """The same with batch and heads split: no communication."""
    return attention(*(sw.annotate(x, {0: "data", 2: "model"}) for x in (q, k, v)))


def main() -> None:
    random = np.random.default_rng(0)
    q, k, v = random.normal(size=(3, 8, 64, 4, 16)).astype(np.float32)
    with sw.connect() as session:
        check(session, attention, q, k, v)
        check(session, attention_by_heads, q, k, v, mesh="2x4")


if __name__ == "__main__":
    main()
