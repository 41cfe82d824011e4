"""The U-Net of diffusion models (Ho et al., 2020): residual blocks with time embedding, attention at low resolution."""

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
    multipliers: tuple[int, ...] = (1, 2, 4)
    blocks: int = 2
    attention_at: tuple[int, ...] = (2,)
    heads: int = 8
    image: int = 64
    batch_per_device: int = 8


SIZES = {"128": Config(channels=128), "320": Config(channels=320)}


def build(size: str, devices: int, optimizer: optax.GradientTransformation | None = None, **changes: Any) -> Case:
    """A step on `devices` devices' batch; optimizer: AdamW by default; changes: any field of Config."""
    config = replace(SIZES[size], **changes)
    batch = config.batch_per_device * devices
    images = Leaf((batch, config.image, config.image, 3), ("batch", None, None, None))
    data = {"images": images, "noise": images, "times": Leaf((batch,), ("batch",))}

    def loss(params: nn.Params, batch: nn.Params) -> jax.Array:
        times = batch["times"]
        mixed = jnp.sqrt(times)[:, None, None, None] * batch["images"]
        mixed = mixed + jnp.sqrt(1 - times)[:, None, None, None] * batch["noise"]
        return jnp.square(predicted_noise(params, mixed, times, config) - batch["noise"]).mean()

    return training_case(loss, parameters(config), data, optimizer)


def parameters(config: Config) -> nn.Params:
    base, time = config.channels, 4 * config.channels
    widths = [base * multiplier for multiplier in config.multipliers]
    down, skips, width = [], [base], base
    for level, outputs in enumerate(widths):
        blocks = []
        for _ in range(config.blocks):
            blocks.append(_block_params(width, outputs, time, attention=level in config.attention_at))
            width = outputs
            skips.append(width)
        last = level == len(widths) - 1
        down.append({"blocks": blocks, "shrink": None if last else cn.convolution_params(3, width, width)})
        skips += [] if last else [width]
    middle = [_block_params(width, width, time, attention=number == 0) for number in range(2)]
    up = []
    for level, outputs in reversed(list(enumerate(widths))):
        blocks = []
        for _ in range(config.blocks + 1):
            blocks.append(_block_params(width + skips.pop(), outputs, time, attention=level in config.attention_at))
            width = outputs
        up.append({"blocks": blocks, "grow": cn.convolution_params(3, width, width) if level else None})
    return {
        "time": [nn.linear_params(base, time, (None, None)), nn.linear_params(time, time, (None, None))],
        "first": cn.convolution_params(3, 3, base),
        "down": down,
        "middle": middle,
        "up": up,
        "last_norm": cn.norm_params(width),
        "last": cn.convolution_params(3, width, 3),
    }


def _block_params(inputs: int, outputs: int, time: int, *, attention: bool) -> nn.Params:
    block = {
        "first_norm": cn.norm_params(inputs),
        "first": cn.convolution_params(3, inputs, outputs, (None, "channels")),
        "time": nn.linear_params(time, outputs, (None, "channels")),
        "second_norm": cn.norm_params(outputs, "channels"),
        "second": cn.convolution_params(3, outputs, outputs, ("channels", None)),
    }
    if inputs != outputs:
        block["shortcut"] = cn.convolution_params(1, inputs, outputs)
    if attention:
        block["attention_norm"] = cn.norm_params(outputs)
        block["attention"] = nn.attention_params(outputs, outputs)
    return block


def predicted_noise(params: nn.Params, x: jax.Array, times: jax.Array, config: Config) -> jax.Array:
    """The noise in images x [batch, height, width, 3] at times [batch]."""
    time = jax.nn.silu(nn.linear(params["time"][0], _sinusoids(times, config.channels)))
    time = jax.nn.silu(nn.linear(params["time"][1], time))
    x = cn.convolution(params["first"], x)
    skips = [x]
    for level in params["down"]:
        for block in level["blocks"]:
            x = _block(block, x, time, config)
            skips.append(x)
        if level["shrink"] is not None:
            x = cn.convolution(level["shrink"], x, stride=2)
            skips.append(x)
    for block in params["middle"]:
        x = _block(block, x, time, config)
    for level in params["up"]:
        for block in level["blocks"]:
            x = _block(block, jnp.concatenate([x, skips.pop()], axis=-1), time, config)
        if level["grow"] is not None:
            x = cn.convolution(level["grow"], jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2))
    return cn.convolution(params["last"], jax.nn.silu(cn.group_norm(params["last_norm"], x)))


def _block(p: nn.Params, x: jax.Array, time: jax.Array, config: Config) -> jax.Array:
    y = cn.convolution(p["first"], jax.nn.silu(cn.group_norm(p["first_norm"], x)))
    y = cn.hidden(y + nn.linear(p["time"], time)[:, None, None])
    y = cn.convolution(p["second"], jax.nn.silu(cn.group_norm(p["second_norm"], y)))
    x = cn.features(y + (cn.convolution(p["shortcut"], x) if "shortcut" in p else x))
    if "attention" not in p:
        return x
    flat = cn.group_norm(p["attention_norm"], x).reshape(x.shape[0], -1, x.shape[-1])
    return cn.features(x + nn.attention(p["attention"], flat, config.heads).reshape(x.shape))


def _sinusoids(times: jax.Array, width: int) -> jax.Array:
    rates = jnp.exp(-jnp.log(10000.0) * jnp.arange(width // 2) / (width // 2))
    angles = 1000 * times[:, None] * rates
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
