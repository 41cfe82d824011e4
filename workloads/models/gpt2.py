"""GPT-2 (Radford et al., 2019) with layers unrolled, learned positions, tied embedding and fused QKV.

Sizes: GPT-2 small and XL, and the shape of GPT-3 175B (Brown et al., 2020).
"""

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
    """fused: one array for q, k and v. scanned: layers in one `lax.scan`. remat: each computed again in the backward
    pass."""

    layers: int
    width: int
    heads: int
    context: int = 1024
    vocabulary: int = 50257
    batch_per_device: int = 2
    fused: bool = True
    scanned: bool = False
    remat: bool = False


SIZES = {
    "124M": Config(layers=12, width=768, heads=12),
    "1.5B": Config(layers=48, width=1600, heads=25, batch_per_device=1),
    "175B": Config(layers=96, width=12288, heads=96, context=2048, batch_per_device=1),
}


def build(size: str, devices: int, **changes: Any) -> Case:
    """A step on `devices` devices' batch. Changes: any field of Config, e.g. `layers=4`, `fused=False`."""
    config = replace(SIZES[size], **changes)
    batch = config.batch_per_device * devices
    data = {"inputs": nn.tokens(batch, config.context), "labels": nn.tokens(batch, config.context)}

    def loss(params: nn.Params, batch: nn.Params) -> jax.Array:
        return nn.cross_entropy(logits_of(params, batch["inputs"], config), batch["labels"])

    return training_case(loss, parameters(config), data)


def parameters(config: Config) -> nn.Params:
    width = config.width

    def attention() -> nn.Params:
        projections = {
            "weight": Leaf((width, 3, width), ("embed", None, "heads")),
            "bias": Leaf((3, width), (None, "heads")),
        }
        return {
            "qkv": nn.linear_params(width, 3 * width, ("embed", None)) if config.fused else projections,
            "output": {"weight": Leaf((width, width), ("heads", "embed")), "bias": Leaf((width,), ("embed",))},
        }

    block = {
        "attention_norm": nn.norm_params(width),
        "attention": attention(),
        "mlp_norm": nn.norm_params(width),
        "mlp": nn.mlp_params(width, 4 * width),
    }
    return {
        "token_embedding": Leaf((config.vocabulary, width), ("vocabulary", "embed")),
        "position_embedding": Leaf((config.context, width), (None, "embed")),
        "blocks": nn.blocks_params(block, config.layers, scanned=config.scanned),
        "final_norm": nn.norm_params(width),
    }


def logits_of(params: nn.Params, tokens: jax.Array, config: Config, head: jax.Array | None = None) -> jax.Array:
    """Next-token logits [batch, length, vocabulary]. head: [vocabulary, embed]; None: tied to the embedding."""
    x = nn.residual(params["token_embedding"][tokens] + params["position_embedding"][: tokens.shape[1]])

    def layer(x: jax.Array, block: nn.Params) -> jax.Array:
        x = nn.residual(x + _attention(block["attention"], nn.layer_norm(block["attention_norm"], x), config))
        return nn.residual(x + nn.mlp(block["mlp"], nn.layer_norm(block["mlp_norm"], x)))

    x = nn.through(params["blocks"], layer, x, remat=config.remat)
    head = params["token_embedding"] if head is None else head
    return nn.layer_norm(params["final_norm"], x) @ head.T


def _attention(p: nn.Params, x: jax.Array, config: Config) -> jax.Array:
    if config.fused:
        projected = jnp.split(nn.linear(p["qkv"], x), 3, axis=-1)
    else:
        stacked = jnp.einsum("bld,dph->pblh", x, p["qkv"]["weight"]) + p["qkv"]["bias"][:, None, None]
        projected = list(constrain(stacked, None, "batch", "length", "heads"))
    q, k, v = (constrain(nn.split_heads(part, config.heads), "batch", "length", "heads", None) for part in projected)
    return nn.linear(p["output"], nn.merge_heads(nn.attend(q, k, v, causal=True)))
