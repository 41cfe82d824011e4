"""What the unseen language models share: grouped queries with rotary positions, SwiGLU, casts to bfloat16."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from workloads.cases import Leaf
from workloads.hooks import constrain
from workloads.models import layers as nn

Params = Any
VOCABULARY = 32000


def weight(inputs: int, outputs: int, *axes: str | None, dtype: Any = jnp.float32) -> Leaf:
    return Leaf((inputs, outputs), axes, dtype)


def attention_leaves(width: int, kv_width: int, dtype: Any = jnp.float32) -> Params:
    return {
        "attention_norm": Leaf((width,), ("embed",)),
        "query": weight(width, width, "embed", "heads", dtype=dtype),
        "key": weight(width, kv_width, "embed", "kv_heads", dtype=dtype),
        "value": weight(width, kv_width, "embed", "kv_heads", dtype=dtype),
        "output": weight(width, width, "heads", "embed", dtype=dtype),
        "mlp_norm": Leaf((width,), ("embed",)),
    }


def gated_leaves(width: int, hidden: int, dtype: Any = jnp.float32) -> Params:
    return {
        "gate": weight(width, hidden, "embed", "mlp", dtype=dtype),
        "up": weight(width, hidden, "embed", "mlp", dtype=dtype),
        "down": weight(hidden, width, "mlp", "embed", dtype=dtype),
    }


def rotated(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotary positions of x [batch, length, ..., size], pairs interleaved (RoFormer)."""
    rates = 10000.0 ** (-jnp.arange(0, x.shape[-1], 2) / x.shape[-1])
    angles = positions[:, None] * rates
    angles = angles.reshape(1, angles.shape[0], *(1,) * (x.ndim - 3), angles.shape[1])
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    return jnp.stack([even * cos - odd * sin, even * sin + odd * cos], -1).reshape(x.shape)


def grouped_attention(p: Params, x: jax.Array, heads: int, kv_heads: int) -> jax.Array:
    """Grouped queries with no repeated keys: q [batch, length, groups, heads of one, size]."""
    groups, positions = heads // kv_heads, jnp.arange(x.shape[1])
    q = constrain(nn.split_heads(x @ p["query"], heads), "batch", "length", "heads", None)
    k = constrain(nn.split_heads(x @ p["key"], kv_heads), "batch", "length", "kv_heads", None)
    v = constrain(nn.split_heads(x @ p["value"], kv_heads), "batch", "length", "kv_heads", None)
    q = rotated(q, positions).reshape(*q.shape[:2], kv_heads, groups, -1)
    k = rotated(k, positions)
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
    scores = jnp.where(positions[:, None] >= positions, scores, -1e9)
    mixed = jnp.einsum("bhgqk,bkhd->bqhgd", jax.nn.softmax(scores, -1).astype(x.dtype), v)
    return mixed.reshape(x.shape) @ p["output"]


def gated(p: Params, y: jax.Array) -> jax.Array:
    return constrain(jax.nn.silu(y @ p["gate"]) * (y @ p["up"]), "batch", "length", "mlp") @ p["down"]


def half_precision(p: Params) -> Params:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16) if leaf.ndim > 1 else leaf, p)


def block(p: Params, x: jax.Array, heads: int, kv_heads: int) -> jax.Array:
    x = nn.residual(x + grouped_attention(p, nn.rms_norm(p["attention_norm"], x), heads, kv_heads))
    return nn.residual(x + gated(p, nn.rms_norm(p["mlp_norm"], x)))


def token_data(batch: int, length: int) -> Params:
    return {"inputs": nn.tokens(batch, length), "labels": nn.tokens(batch, length)}
