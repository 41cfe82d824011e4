"""Wide ResNet-50 (Zagoruyko and Komodakis, 2016) with group norm.

Widths are the multiples of the groups that come nearest to the 250M and 1B parameters of Alpa's benchmark
(Zheng et al., 2022).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from workloads.cases import Case, Leaf, training_case
from workloads.models import convolutions as cn
from workloads.models import layers as nn


@dataclass(frozen=True, kw_only=True)
class Config:
    channels: int
    width_factor: int = 2
    blocks: tuple[int, ...] = (3, 4, 6, 3)
    image: int = 224
    classes: int = 1024
    batch_per_device: int = 24


SIZES = {"250M": Config(channels=128), "1B": Config(channels=256)}


def build(size: str, devices: int, optimizer: optax.GradientTransformation | None = None, **changes: Any) -> Case:
    """A step on `devices` devices' batch; optimizer: AdamW by default; changes: any field of Config."""
    config = replace(SIZES[size], **changes)
    batch = config.batch_per_device * devices
    data = {
        "images": Leaf((batch, config.image, config.image, 3), ("batch", None, None, None)),
        "labels": Leaf((batch,), ("batch",), jnp.int32),
    }

    def loss(params: nn.Params, batch: nn.Params) -> jax.Array:
        return nn.cross_entropy(logits_of(params, batch["images"], config), batch["labels"])

    return training_case(loss, parameters(config), data, optimizer)


def parameters(config: Config) -> nn.Params:
    stages, inputs = [], config.channels
    for number, count in enumerate(config.blocks):
        base = config.channels * 2**number
        outputs = 4 * base
        stage = []
        for block in range(count):
            stage.append(_block_params(inputs, base * config.width_factor, outputs, shortcut=block == 0))
            inputs = outputs
        stages.append(stage)
    return {
        "stem": cn.convolution_params(7, 3, config.channels),
        "stem_norm": cn.norm_params(config.channels),
        "stages": stages,
        "head": nn.linear_params(inputs, config.classes, (None, None)),
    }


def _block_params(inputs: int, inner: int, outputs: int, *, shortcut: bool) -> nn.Params:
    block = {
        "reduce": cn.convolution_params(1, inputs, inner, (None, "channels")),
        "reduce_norm": cn.norm_params(inner, "channels"),
        "spatial": cn.convolution_params(3, inner, inner, ("channels", None)),
        "spatial_norm": cn.norm_params(inner),
        "expand": cn.convolution_params(1, inner, outputs),
        "expand_norm": cn.norm_params(outputs),
    }
    if shortcut:
        block["shortcut"] = cn.convolution_params(1, inputs, outputs)
        block["shortcut_norm"] = cn.norm_params(outputs)
    return block


def logits_of(params: nn.Params, images: jax.Array, config: Config) -> jax.Array:
    """Class logits [batch, classes] of images [batch, height, width, 3]."""
    x = cn.convolution(params["stem"], images, stride=2)
    x = cn.pooled(jax.nn.relu(cn.group_norm(params["stem_norm"], x)))
    for number, stage in enumerate(params["stages"]):
        for position, block in enumerate(stage):
            x = _block(block, x, stride=2 if number and position == 0 else 1)
    return nn.linear(params["head"], x.mean((1, 2)))


def _block(p: nn.Params, x: jax.Array, stride: int) -> jax.Array:
    y = jax.nn.relu(cn.group_norm(p["reduce_norm"], cn.hidden(cn.convolution(p["reduce"], x))))
    y = jax.nn.relu(cn.group_norm(p["spatial_norm"], cn.features(cn.convolution(p["spatial"], y, stride=stride))))
    y = cn.group_norm(p["expand_norm"], cn.features(cn.convolution(p["expand"], y)))
    if "shortcut" in p:
        x = cn.group_norm(p["shortcut_norm"], cn.convolution(p["shortcut"], x, stride=stride))
    return cn.features(jax.nn.relu(x + y))
