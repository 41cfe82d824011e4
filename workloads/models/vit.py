"""Vision transformer (Dosovitskiy et al., 2020): patches by a convolution, class token, pre-norm encoder."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from workloads.cases import Case, Leaf, training_case
from workloads.models import layers as nn


@dataclass(frozen=True, kw_only=True)
class Config:
    layers: int
    width: int
    heads: int
    patch: int
    image: int = 224
    classes: int = 1000
    batch_per_device: int = 32


SIZES = {
    "B16": Config(layers=12, width=768, heads=12, patch=16),
    "L16": Config(layers=24, width=1024, heads=16, patch=16),
}


def build(size: str, devices: int, **changes: Any) -> Case:
    """A step on `devices` devices' batch; changes: any field of Config."""
    config = replace(SIZES[size], **changes)
    batch = config.batch_per_device * devices
    data = {
        "images": Leaf((batch, config.image, config.image, 3), ("batch", None, None, None)),
        "labels": Leaf((batch,), ("batch",), jnp.int32),
    }

    def loss(params: nn.Params, batch: nn.Params) -> jax.Array:
        return nn.cross_entropy(logits_of(params, batch["images"], config), batch["labels"])

    return training_case(loss, parameters(config), data)


def parameters(config: Config) -> nn.Params:
    width = config.width
    patches = (config.image // config.patch) ** 2
    return {
        "patch": {
            "weight": Leaf((config.patch, config.patch, 3, width), (None, None, None, "embed")),
            "bias": Leaf((width,), ("embed",)),
        },
        "class_token": Leaf((1, 1, width), (None, None, "embed")),
        "position_embedding": Leaf((1, patches + 1, width), (None, None, "embed")),
        "blocks": [
            {
                "attention_norm": nn.norm_params(width),
                "attention": nn.attention_params(width, width),
                "mlp_norm": nn.norm_params(width),
                "mlp": nn.mlp_params(width, 4 * width),
            }
            for _ in range(config.layers)
        ],
        "final_norm": nn.norm_params(width),
        "head": nn.linear_params(width, config.classes, ("embed", None)),
    }


def logits_of(params: nn.Params, images: jax.Array, config: Config) -> jax.Array:
    """Class logits [batch, classes] of images [batch, height, width, 3]."""
    x = jax.lax.conv_general_dilated(
        images, params["patch"]["weight"], (config.patch,) * 2, "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    x = (x + params["patch"]["bias"]).reshape(images.shape[0], -1, config.width)
    first = jnp.broadcast_to(params["class_token"], (x.shape[0], 1, config.width))
    x = nn.residual(jnp.concatenate([first, x], axis=1) + params["position_embedding"])
    for block in params["blocks"]:
        x = nn.residual(x + nn.attention(block["attention"], nn.layer_norm(block["attention_norm"], x), config.heads))
        x = nn.residual(x + nn.mlp(block["mlp"], nn.layer_norm(block["mlp_norm"], x)))
    return nn.linear(params["head"], nn.layer_norm(params["final_norm"], x)[:, 0])
