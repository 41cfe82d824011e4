"""BERT (Devlin et al., 2018): post-norm encoder, separate q, k and v, masked-token prediction with a tied embedding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from workloads.cases import Case, Leaf, training_case
from workloads.models import layers as nn


@dataclass(frozen=True, kw_only=True)
class Config:
    """scanned: layers in one `lax.scan`. remat: each computed again in the backward pass."""

    layers: int
    width: int
    heads: int
    context: int = 512
    vocabulary: int = 30522
    predicted: int = 76
    batch_per_device: int = 4
    scanned: bool = False
    remat: bool = False


SIZES = {
    "base": Config(layers=12, width=768, heads=12),
    "large": Config(layers=24, width=1024, heads=16),
}


def build(size: str, devices: int, **changes: Any) -> Case:
    """A step on `devices` devices' batch; changes: any field of Config."""
    config = replace(SIZES[size], **changes)
    batch = config.batch_per_device * devices
    masked = Leaf((batch, config.predicted), ("batch", None), jnp.int32)
    data = {
        "tokens": nn.tokens(batch, config.context),
        "segments": nn.tokens(batch, config.context),
        "padding": Leaf((batch, config.context), ("batch", "length")),
        "positions": masked,
        "labels": masked,
    }

    def loss(params: nn.Params, batch: nn.Params) -> jax.Array:
        x = encoded(params, batch, config)
        picked = jnp.take_along_axis(x, batch["positions"][..., None], axis=1)
        picked = nn.layer_norm(params["head_norm"], jax.nn.gelu(nn.linear(params["head"], picked)))
        return nn.cross_entropy(picked @ params["token_embedding"].T + params["head_bias"], batch["labels"])

    return training_case(loss, parameters(config), data)


def parameters(config: Config) -> nn.Params:
    width = config.width
    block = {
        "attention": nn.attention_params(width, width),
        "attention_norm": nn.norm_params(width),
        "mlp": nn.mlp_params(width, 4 * width),
        "mlp_norm": nn.norm_params(width),
    }
    return {
        "token_embedding": Leaf((config.vocabulary, width), ("vocabulary", "embed")),
        "segment_embedding": Leaf((2, width), (None, "embed")),
        "position_embedding": Leaf((config.context, width), (None, "embed")),
        "embedding_norm": nn.norm_params(width),
        "blocks": nn.blocks_params(block, config.layers, scanned=config.scanned),
        "head": nn.linear_params(width, width, ("embed", None)),
        "head_norm": nn.norm_params(width),
        "head_bias": Leaf((config.vocabulary,), ("vocabulary",)),
    }


def encoded(params: nn.Params, batch: nn.Params, config: Config) -> jax.Array:
    """Final hidden states [batch, length, width]; `padding` is 0 where a token counts, 1 where not."""
    embedded = params["token_embedding"][batch["tokens"]] + params["segment_embedding"][batch["segments"]]
    x = nn.residual(nn.layer_norm(params["embedding_norm"], embedded + params["position_embedding"]))
    bias = batch["padding"][:, None, None] * nn.NEGATIVE

    def layer(x: jax.Array, block: nn.Params) -> jax.Array:
        attended = nn.attention(block["attention"], x, config.heads, bias=bias)
        x = nn.residual(nn.layer_norm(block["attention_norm"], x + attended))
        return nn.residual(nn.layer_norm(block["mlp_norm"], x + nn.mlp(block["mlp"], x)))

    return nn.through(params["blocks"], layer, x, remat=config.remat)
