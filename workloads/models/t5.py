"""T5-style encoder-decoder (Raffel et al., 2019; gated version 1.1): relative position bias, RMS norm, gated GELU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from workloads.cases import Case, Leaf, training_case
from workloads.hooks import constrain
from workloads.models import layers as nn


@dataclass(frozen=True, kw_only=True)
class Config:
    layers: int
    width: int
    heads: int
    hidden: int
    vocabulary: int = 32128
    inputs: int = 512
    targets: int = 128
    buckets: int = 32
    batch_per_device: int = 4


SIZES = {
    "base": Config(layers=12, width=768, heads=12, hidden=2048),
    "large": Config(layers=24, width=1024, heads=16, hidden=2816),
}


def build(size: str, devices: int, **changes: Any) -> Case:
    """A step on `devices` devices' batch; changes: any field of Config."""
    config = replace(SIZES[size], **changes)
    batch = config.batch_per_device * devices
    data = {
        "inputs": nn.tokens(batch, config.inputs),
        "targets": nn.tokens(batch, config.targets),
        "labels": nn.tokens(batch, config.targets),
    }

    def loss(params: nn.Params, batch: nn.Params) -> jax.Array:
        memory = _encoded(params, batch["inputs"], config)
        return nn.cross_entropy(_decoded(params, batch["targets"], memory, config) @ params["head"], batch["labels"])

    return training_case(loss, parameters(config), data)


def parameters(config: Config) -> nn.Params:
    width = config.width

    def norm() -> Leaf:
        return Leaf((width,), ("embed",))

    def attention() -> nn.Params:
        return nn.attention_params(width, width, bias=False)

    def feed_forward() -> nn.Params:
        return {
            "gate": Leaf((width, config.hidden), ("embed", "mlp")),
            "up": Leaf((width, config.hidden), ("embed", "mlp")),
            "down": Leaf((config.hidden, width), ("mlp", "embed")),
        }

    def encoder() -> nn.Params:
        return {"self_norm": norm(), "self": attention(), "mlp_norm": norm(), "mlp": feed_forward()}

    positions = Leaf((config.buckets, config.heads), (None, "heads"))
    return {
        "embedding": Leaf((config.vocabulary, width), ("vocabulary", "embed")),
        "encoder": [encoder() for _ in range(config.layers)],
        "encoder_positions": positions,
        "encoder_norm": norm(),
        "decoder": [{**encoder(), "cross_norm": norm(), "cross": attention()} for _ in range(config.layers)],
        "decoder_positions": positions,
        "decoder_norm": norm(),
        "head": Leaf((width, config.vocabulary), ("embed", "vocabulary")),
    }


def _encoded(params: nn.Params, tokens: jax.Array, config: Config) -> jax.Array:
    x = nn.residual(params["embedding"][tokens])
    bias = _position_bias(params["encoder_positions"], tokens.shape[1], config)
    for p in params["encoder"]:
        x = nn.residual(x + nn.attention(p["self"], nn.rms_norm(p["self_norm"], x), config.heads, bias=bias))
        x = nn.residual(x + _feed_forward(p["mlp"], nn.rms_norm(p["mlp_norm"], x)))
    return nn.rms_norm(params["encoder_norm"], x)


def _decoded(params: nn.Params, tokens: jax.Array, memory: jax.Array, config: Config) -> jax.Array:
    x = nn.residual(params["embedding"][tokens])
    bias = _position_bias(params["decoder_positions"], tokens.shape[1], config)
    for p in params["decoder"]:
        y = nn.rms_norm(p["self_norm"], x)
        x = nn.residual(x + nn.attention(p["self"], y, config.heads, bias=bias, causal=True))
        y = nn.rms_norm(p["cross_norm"], x)
        x = nn.residual(x + nn.attention(p["cross"], y, config.heads, memory=memory))
        x = nn.residual(x + _feed_forward(p["mlp"], nn.rms_norm(p["mlp_norm"], x)))
    return nn.rms_norm(params["decoder_norm"], x)


def _feed_forward(p: nn.Params, x: jax.Array) -> jax.Array:
    hidden = constrain(jax.nn.gelu(x @ p["gate"]) * (x @ p["up"]), "batch", "length", "mlp")
    return hidden @ p["down"]


def _position_bias(table: jax.Array, length: int, config: Config) -> jax.Array:
    """Bias [1, heads, length, length] by logarithmic buckets of the distance."""
    distance = jnp.abs(jnp.arange(length)[None, :] - jnp.arange(length)[:, None])
    exact = config.buckets // 2
    scale = jnp.log(jnp.maximum(distance, 1) / exact) / jnp.log(128 / exact)
    large = jnp.minimum(exact + (scale * (config.buckets - exact)).astype(jnp.int32), config.buckets - 1)
    bias = table[jnp.where(distance < exact, distance, large)]
    return jnp.transpose(bias, (2, 0, 1))[None]
