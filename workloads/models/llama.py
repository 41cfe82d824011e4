"""Llama (Touvron et al., 2023): RMS norm, rotary positions, grouped queries, SwiGLU; layers in a scan with remat.

bfloat16 activations over float32 parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from workloads.cases import Case, Leaf, stacked, training_case
from workloads.hooks import constrain
from workloads.models import layers as nn


@dataclass(frozen=True, kw_only=True)
class Config:
    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int = 32000
    context: int = 2048
    batch_per_device: int = 1


SIZES = {
    "1B": Config(layers=16, width=2048, heads=32, kv_heads=8, hidden=8192),
    "7B": Config(layers=32, width=4096, heads=32, kv_heads=32, hidden=11008),
}


def build(size: str, devices: int, **changes: Any) -> Case:
    """A step on `devices` devices' batch; changes: any field of Config."""
    config = replace(SIZES[size], **changes)
    batch = config.batch_per_device * devices
    data = {"inputs": nn.tokens(batch, config.context), "labels": nn.tokens(batch, config.context)}

    def loss(params: nn.Params, batch: nn.Params) -> jax.Array:
        return nn.cross_entropy(logits_of(params, batch["inputs"], config), batch["labels"])

    return training_case(loss, parameters(config), data)


def parameters(config: Config) -> nn.Params:
    width, size = config.width, config.width // config.heads

    def weight(inputs: int, outputs: int, *axes: str) -> Leaf:
        return Leaf((inputs, outputs), axes)

    layer = {
        "attention_norm": Leaf((width,), ("embed",)),
        "query": weight(width, width, "embed", "heads"),
        "key": weight(width, config.kv_heads * size, "embed", "kv_heads"),
        "value": weight(width, config.kv_heads * size, "embed", "kv_heads"),
        "output": weight(width, width, "heads", "embed"),
        "mlp_norm": Leaf((width,), ("embed",)),
        "gate": weight(width, config.hidden, "embed", "mlp"),
        "up": weight(width, config.hidden, "embed", "mlp"),
        "down": weight(config.hidden, width, "mlp", "embed"),
    }
    return {
        "embedding": Leaf((config.vocabulary, width), ("vocabulary", "embed")),
        "layers": stacked(layer, config.layers),
        "final_norm": Leaf((width,), ("embed",)),
        "head": weight(width, config.vocabulary, "embed", "vocabulary"),
    }


def logits_of(params: nn.Params, tokens: jax.Array, config: Config) -> jax.Array:
    """Next-token logits [batch, length, vocabulary]."""
    x = nn.residual(params["embedding"][tokens].astype(jnp.bfloat16))

    @jax.checkpoint
    def layer(x: jax.Array, p: nn.Params) -> tuple[jax.Array, None]:
        p = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16) if leaf.ndim > 1 else leaf, p)
        x = nn.residual(x + _attention(p, nn.rms_norm(p["attention_norm"], x), config))
        y = nn.rms_norm(p["mlp_norm"], x)
        hidden = constrain(jax.nn.silu(y @ p["gate"]) * (y @ p["up"]), "batch", "length", "mlp")
        return nn.residual(x + hidden @ p["down"]), None

    x, _ = jax.lax.scan(layer, x, params["layers"])
    return nn.rms_norm(params["final_norm"], x) @ params["head"].astype(jnp.bfloat16)


def _attention(p: nn.Params, x: jax.Array, config: Config) -> jax.Array:
    q = constrain(nn.split_heads(x @ p["query"], config.heads), "batch", "length", "heads", None)
    k, v = (
        constrain(nn.split_heads(x @ p[name], config.kv_heads), "batch", "length", "kv_heads", None)
        for name in ("key", "value")
    )
    q, k = _rotated(q), _rotated(k)
    repeats = config.heads // config.kv_heads
    k, v = (jnp.repeat(part, repeats, axis=2) if repeats > 1 else part for part in (k, v))
    return nn.merge_heads(nn.attend(q, k, v, causal=True)) @ p["output"]


def _rotated(x: jax.Array) -> jax.Array:
    """Rotary position embedding of x [batch, length, heads, size] (Su et al., 2021)."""
    length, size = x.shape[1], x.shape[-1]
    rates = 10000.0 ** (-jnp.arange(0, size, 2) / size)
    angles = jnp.arange(length)[:, None] * rates
    cos, sin = jnp.cos(angles)[:, None].astype(x.dtype), jnp.sin(angles)[:, None].astype(x.dtype)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)
