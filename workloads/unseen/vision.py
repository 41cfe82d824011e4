"""Images: a diffusion transformer, depthwise convolutions, pairs of images and texts."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from workloads.cases import Case, Leaf, stacked, training_case
from workloads.hooks import constrain
from workloads.models import layers as nn

Params = Any


def dit(devices: int, layers: int = 4, width: int = 1152, heads: int = 16, per_device: int = 16) -> Case:
    """A diffusion transformer, XL/2 widths (Peebles and Xie, 2023): norms modulated by the time; layers in a scan."""
    side, patch, channels = 32, 2, 4
    layer = {
        "modulate": nn.linear_params(width, 6 * width, ("embed", None)),
        "attention": nn.attention_params(width, width),
        "mlp": nn.mlp_params(width, 4 * width),
    }
    values = patch * patch * channels
    params = {
        "into": nn.linear_params(values, width, (None, "embed")),
        "places": Leaf(((side // patch) ** 2, width), (None, "embed")),
        "time": [nn.linear_params(256, width, (None, "embed")), nn.linear_params(width, width, ("embed", None))],
        "classes": Leaf((1001, width), (None, "embed")),
        "layers": stacked(layer, layers),
        "out": nn.linear_params(width, values, ("embed", None)),
    }

    def patches(x: jax.Array) -> jax.Array:
        count = side // patch
        cut = x.reshape(-1, count, patch, count, patch, channels)
        return cut.transpose(0, 1, 3, 2, 4, 5).reshape(-1, count * count, values)

    def modulated(x: jax.Array, shift: jax.Array, scale: jax.Array) -> jax.Array:
        centred = x - x.mean(-1, keepdims=True)
        normed = centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-6)
        return normed * (1 + scale[:, None]) + shift[:, None]

    def block(x: jax.Array, weights: Params, condition: jax.Array) -> jax.Array:
        parts = jnp.split(nn.linear(weights["modulate"], jax.nn.silu(condition)), 6, -1)
        x = nn.residual(x + parts[2][:, None] * nn.attention(weights["attention"], modulated(x, *parts[:2]), heads))
        return nn.residual(x + parts[5][:, None] * nn.mlp(weights["mlp"], modulated(x, *parts[3:5])))

    def loss(params: Params, batch: Params) -> jax.Array:
        key = jax.random.wrap_key_data(batch["key"])
        noise = jax.random.normal(key, batch["images"].shape)
        level = batch["times"][:, None, None, None]
        x = nn.linear(params["into"], patches((1 - level) * batch["images"] + level * noise)) + params["places"]
        angles = 1000 * batch["times"][:, None] * jnp.exp(-jnp.arange(128) / 14.0)
        time = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], -1)
        time = nn.linear(params["time"][1], jax.nn.silu(nn.linear(params["time"][0], time)))
        condition = time + params["classes"][batch["labels"]]
        x, _ = jax.lax.scan(lambda x, p: (block(x, p, condition), None), nn.residual(x), params["layers"])
        return jnp.square(nn.linear(params["out"], x) - patches(noise - batch["images"])).mean()

    count = devices * per_device
    data = {
        "images": Leaf((count, side, side, channels), ("batch", None, None, None)),
        "times": Leaf((count,), ("batch",)),
        "labels": Leaf((count,), ("batch",), jnp.int32),
        "key": Leaf((2,), (None,), jnp.uint32),
    }
    return training_case(loss, params, data)


def convnext(devices: int, blocks: tuple[int, ...] = (1, 1, 2, 1), width: int = 128, per_device: int = 16) -> Case:
    """ConvNeXt-B (Liu et al., 2022), fewer blocks: 7×7 depthwise convolutions, layer scale, momentum SGD."""
    widths = [width * 2**number for number in range(len(blocks))]

    def convolve(x: jax.Array, kernel: jax.Array, stride: int = 1, groups: int = 1) -> jax.Array:
        return jax.lax.conv_general_dilated(
            x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups
        )

    def block(p: Params, x: jax.Array) -> jax.Array:
        y = convolve(x, p["depthwise"], groups=x.shape[-1])
        y = nn.layer_norm(p["norm"], y)
        y = constrain(jax.nn.gelu(nn.linear(p["up"], y)), "batch", None, None, "mlp")
        return constrain(x + p["scale"] * nn.linear(p["down"], y), "batch", None, None, None)

    def leaves(size: int) -> Params:
        return {
            "depthwise": Leaf((7, 7, 1, size), (None, None, None, "embed")),
            "norm": nn.norm_params(size),
            "scale": Leaf((size,), ("embed",)),
            **nn.mlp_params(size, 4 * size),
        }

    params = {
        "stem": Leaf((4, 4, 3, width), (None, None, None, "embed")),
        "stem_norm": nn.norm_params(width),
        "shrinks": [
            {"norm": nn.norm_params(a), "kernel": Leaf((2, 2, a, b), (None, None, None, "embed"))}
            for a, b in itertools.pairwise(widths)
        ],
        "stages": [[leaves(size)] * count for size, count in zip(widths, blocks, strict=True)],
        "norm": nn.norm_params(widths[-1]),
        "head": nn.linear_params(widths[-1], 1000, ("embed", None)),
    }

    def loss(params: Params, batch: Params) -> jax.Array:
        x = nn.layer_norm(params["stem_norm"], convolve(batch["images"], params["stem"], 4))
        for number, stage in enumerate(params["stages"]):
            if number:
                shrink = params["shrinks"][number - 1]
                x = convolve(nn.layer_norm(shrink["norm"], x), shrink["kernel"], 2)
            for p in stage:
                x = block(p, x)
        logits = nn.linear(params["head"], nn.layer_norm(params["norm"], x.mean((1, 2))))
        return nn.cross_entropy(logits, batch["labels"])

    count = devices * per_device
    data = {
        "images": Leaf((count, 224, 224, 3), ("batch", None, None, None)),
        "labels": Leaf((count,), ("batch",), jnp.int32),
    }
    return training_case(loss, params, data, optax.sgd(0.1, momentum=0.9, nesterov=True))


def clip(devices: int, layers: int = 2, per_device: int = 128) -> Case:
    """Two towers and a symmetric contrastive loss over the whole batch (Radford et al., 2021), ViT-B/16 widths."""
    image_width, text_width, shared, context = 768, 512, 512, 76

    def tower(width: int) -> Params:
        layer = {
            "attention_norm": nn.norm_params(width),
            "attention": nn.attention_params(width, width),
            "mlp_norm": nn.norm_params(width),
            "mlp": nn.mlp_params(width, 4 * width),
        }
        return {"layers": stacked(layer, layers), "norm": nn.norm_params(width)}

    params = {
        "patch": nn.linear_params(16 * 16 * 3, image_width, (None, "embed")),
        "image_places": Leaf((196, image_width), (None, "embed")),
        "image": tower(image_width),
        "image_out": Leaf((image_width, shared), ("embed", None)),
        "table": Leaf((49408, text_width), ("vocabulary", "embed")),
        "text_places": Leaf((context, text_width), (None, "embed")),
        "text": tower(text_width),
        "text_out": Leaf((text_width, shared), ("embed", None)),
        "temperature": Leaf((), ()),
    }

    def encode(p: Params, x: jax.Array, heads: int, causal: bool) -> jax.Array:
        def layer(x: jax.Array, weights: Params) -> tuple[jax.Array, None]:
            y = nn.attention(weights["attention"], nn.layer_norm(weights["attention_norm"], x), heads, causal=causal)
            x = nn.residual(x + y)
            return nn.residual(x + nn.mlp(weights["mlp"], nn.layer_norm(weights["mlp_norm"], x))), None

        x, _ = jax.lax.scan(layer, nn.residual(x), p["layers"])
        return nn.layer_norm(p["norm"], x)

    def unit(x: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.square(x).sum(-1, keepdims=True) + 1e-8)

    def loss(params: Params, batch: Params) -> jax.Array:
        images = batch["images"].reshape(-1, 14, 16, 14, 16, 3).transpose(0, 1, 3, 2, 4, 5).reshape(-1, 196, 768)
        x = encode(params["image"], nn.linear(params["patch"], images) + params["image_places"], 12, False)
        image = unit(x.mean(1) @ params["image_out"])
        y = encode(params["text"], params["table"][batch["texts"]] + params["text_places"], 8, True)
        ends = jnp.argmax(batch["texts"], -1)
        text = unit(jnp.take_along_axis(y, ends[:, None, None], 1)[:, 0] @ params["text_out"])
        image, text = constrain(image, "batch", None), constrain(text, "batch", None)
        logits = jnp.exp(params["temperature"]) * constrain(image @ text.T, "batch", None)
        labels = jnp.arange(logits.shape[0])
        return (nn.cross_entropy(logits, labels) + nn.cross_entropy(logits.T, labels)) / 2

    count = devices * per_device
    data = {
        "images": Leaf((count, 224, 224, 3), ("batch", None, None, None)),
        "texts": Leaf((count, context), ("batch", None), jnp.int32),
    }
    return training_case(loss, params, data)
