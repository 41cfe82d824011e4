"""Wide ResNet (Zagoruyko and Komodakis, 2016) in plain JAX, written for one device.

Images are [batch, height, width, channels]. Group norm (Wu and He, 2018) takes the place of batch norm: its statistics
are those of one image, so a step whose batch is cut into micro-batches computes the same. Batch norm's are the batch's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

Params = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of the model and of its batch.

    depth: 50 or 101 layers as published, 14 for one block in each of four levels, 8 for two levels.
    channels: of the first level, a multiple of `groups`; each level doubles them.
    factor: width multiplier of the 3 × 3 convolutions.
    image: height and width, a multiple of 8; from 64 on the first convolution is 7 × 7 at stride 2 and pooled, else
        3 × 3.
    """

    depth: int = 14
    channels: int = 32
    factor: int = 2
    groups: int = 8
    image: int = 8
    image_channels: int = 1
    classes: int = 10
    batch: int = 64

    def __post_init__(self) -> None:
        if self.depth not in BLOCKS or self.channels % self.groups or self.image % 8:
            depths = ", ".join(map(str, BLOCKS))
            raise ValueError(f"depth is one of {depths}, channels a multiple of groups, image a multiple of 8")


#: Depth → bottleneck blocks of each level.
BLOCKS = {8: (1, 1), 14: (1, 1, 1, 1), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}


def _make_preset(channels: int, factor: int = 2, depth: int = 50) -> Config:
    return Config(
        depth=depth, channels=channels, factor=factor, groups=32, image=224, image_channels=3, classes=1024, batch=1536
    )


#: "tiny" and "small" train anywhere; the others are the models of Alpa's evaluation (Zheng et al., 2022), float32.
PRESETS = {
    "tiny": Config(depth=8, channels=8, groups=4),
    "small": Config(),
    "250M": _make_preset(160),
    "500M": _make_preset(224),
    "1B": _make_preset(320),
    "2B": _make_preset(448),
    "4B": _make_preset(640),
    "6.8B": _make_preset(320, factor=16),
    "13B": _make_preset(320, factor=16, depth=101),
}


# ---- parameters -------------------------------------------------------------------


def init_params(config: Config, key: jax.Array) -> Params:
    keys = iter(jax.random.split(key, 2 + sum(BLOCKS[config.depth])))
    size = 7 if config.image >= 64 else 3
    levels, inputs = [], config.channels
    for number, count in enumerate(BLOCKS[config.depth]):
        base = config.channels * 2**number
        level = []
        for _ in range(count):
            level.append(_init_block(next(keys), inputs, base, config))
            inputs = 4 * base
        levels.append(level)
    return {
        "stem": _init_convolution(next(keys), size, config.image_channels, config.channels),
        "levels": levels,
        "head": {
            "weight": inputs**-0.5 * jax.random.normal(next(keys), (inputs, config.classes)),
            "bias": jnp.zeros(config.classes),
        },
    }


def _init_block(key: jax.Array, inputs: int, base: int, config: Config) -> Params:
    """1 × 1 down to `base` channels, 3 × 3 to `factor` times as many, 1 × 1 up to four times `base`."""
    keys = jax.random.split(key, 4)
    block = {
        "reduce": _init_convolution(keys[0], 1, inputs, base),
        "spatial": _init_convolution(keys[1], 3, base, config.factor * base),
        "expand": _init_convolution(keys[2], 1, config.factor * base, 4 * base, scale=0.0),
    }
    if inputs != 4 * base:
        block["shortcut"] = _init_convolution(keys[3], 1, inputs, 4 * base)
    return block


def _init_convolution(key: jax.Array, size: int, inputs: int, outputs: int, scale: float = 1.0) -> Params:
    """A convolution and the norm after it, whose scale starts at `scale`."""
    kernel = (2 / (size * size * inputs)) ** 0.5 * jax.random.normal(key, (size, size, inputs, outputs))
    return {"kernel": kernel, "scale": jnp.full(outputs, scale), "offset": jnp.zeros(outputs)}


# ---- layers -----------------------------------------------------------------------


def convolution(p: Params, x: jax.Array, groups: int, stride: int = 1) -> jax.Array:
    """Convolution, then group norm."""
    x = jax.lax.conv_general_dilated(
        x, p["kernel"], (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    grouped = x.reshape(*x.shape[:3], groups, x.shape[3] // groups)
    mean = grouped.mean((1, 2, 4), keepdims=True)
    variance = jnp.square(grouped - mean).mean((1, 2, 4), keepdims=True)
    normal = ((grouped - mean) * jax.lax.rsqrt(variance + 1e-5)).reshape(x.shape)
    return normal * p["scale"] + p["offset"]


def apply_block(p: Params, x: jax.Array, groups: int, stride: int) -> jax.Array:
    y = jax.nn.relu(convolution(p["reduce"], x, groups))
    y = jax.nn.relu(convolution(p["spatial"], y, groups, stride))
    y = convolution(p["expand"], y, groups)
    if "shortcut" in p:
        x = convolution(p["shortcut"], x, groups, stride)
    return jax.nn.relu(x + y)


# ---- the model --------------------------------------------------------------------


def logits_of(params: Params, images: jax.Array, config: Config) -> jax.Array:
    """Logits [batch, classes] of images [batch, height, width, channels]."""
    is_large = config.image >= 64
    x = jax.nn.relu(convolution(params["stem"], images, config.groups, stride=2 if is_large else 1))
    if is_large:
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    for number, level in enumerate(params["levels"]):
        for position, block in enumerate(level):
            x = apply_block(block, x, config.groups, stride=2 if number and not position else 1)
    return x.mean((1, 2)) @ params["head"]["weight"] + params["head"]["bias"]


def loss_of(params: Params, images: jax.Array, labels: jax.Array, config: Config) -> jax.Array:
    """Mean cross entropy in nats."""
    logits = logits_of(params, images, config)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def make_steps(config: Config, optimizer: optax.GradientTransformation) -> tuple[Any, Any, Any]:
    """(init, train_step, eval_step); eval_step returns the accuracy on a batch."""

    def init(key: jax.Array) -> tuple[Params, Any]:
        params = init_params(config, key)
        return params, optimizer.init(params)

    def train_step(
        params: Params, opt_state: Any, images: jax.Array, labels: jax.Array
    ) -> tuple[Params, Any, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(params, images, labels, config)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    def eval_step(params: Params, images: jax.Array, labels: jax.Array) -> jax.Array:
        return (logits_of(params, images, config).argmax(-1) == labels).mean()

    return init, train_step, eval_step


def batch_types(config: Config) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Types of a batch of `train_step`: images and labels."""
    images = (config.batch, config.image, config.image, config.image_channels)
    return jax.ShapeDtypeStruct(images, "float32"), jax.ShapeDtypeStruct((config.batch,), "int32")
