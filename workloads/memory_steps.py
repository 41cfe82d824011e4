"""Training steps whose memory is predicted and judged: one per way of building a model.

Shapes only, no arrays. Sizes are small so that XLA compiles a step in seconds; activations, state and
gradients are of comparable size, so that each can be what a prediction gets wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from examples.gpt2.model import Config, make_steps

Tree = Any


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def training_step(loss: Callable[..., jax.Array], params: Tree, *batch: Tree, optimizer: Any) -> str:
    """HLO text of one step of `loss(params, *batch)`; parameters and optimizer state are donated."""

    def step(params: Tree, state: Tree, *batch: Tree) -> Tree:
        value, gradients = jax.value_and_grad(loss)(params, *batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    state = jax.eval_shape(optimizer.init, params)
    lowered = jax.jit(step, donate_argnums=(0, 1), keep_unused=True).lower(params, state, *batch)
    return str(lowered.as_text("hlo", debug_info=True))


def sgd() -> Any:
    return optax.sgd(0.1)


def adamw() -> Any:
    return optax.adamw(1e-3)


def gpt2(
    layers: int, width: int = 128, context: int = 128, batch: int = 16, vocabulary: int = 256, heads: int = 4,
    optimizer: Any = adamw,
) -> str:  # fmt: skip
    config = Config(layers=layers, width=width, context=context, vocabulary=vocabulary, heads=heads)
    init, step, _ = make_steps(config, optimizer())
    params, state = jax.eval_shape(init, jax.random.key(0))
    tokens = array(batch, context + 1, dtype=jnp.int32)
    lowered = jax.jit(step, donate_argnums=(0, 1), keep_unused=True).lower(params, state, tokens)
    return str(lowered.as_text("hlo", debug_info=True))


def mlp(batch: int = 1024, width: int = 256, layers: int = 6, dtype: Any = jnp.float32, optimizer: Any = sgd) -> str:
    def loss(params: Tree, x: jax.Array, y: jax.Array) -> jax.Array:
        for layer in params:
            x = jax.nn.gelu(x @ layer["w"] + layer["b"])
        return jnp.mean(jnp.square((x - y).astype(jnp.float32)))

    params = [{"w": array(width, width, dtype=dtype), "b": array(width, dtype=dtype)} for _ in range(layers)]
    x = array(batch, width, dtype=dtype)
    return training_step(loss, params, x, x, optimizer=optimizer())


def convolution(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    return jax.lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def group_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, groups: int = 8) -> jax.Array:
    batch, height, width, channels = x.shape
    grouped = x.reshape(batch, height * width, groups, channels // groups)
    mean, variance = grouped.mean((1, 3), keepdims=True), grouped.var((1, 3), keepdims=True)
    normed = ((grouped - mean) * jax.lax.rsqrt(variance + 1e-5)).reshape(x.shape)
    return normed * scale + bias


def _residual_block(params: Tree, x: jax.Array, stride: int) -> jax.Array:
    h = jax.nn.relu(group_norm(convolution(x, params["k1"], stride), *params["n1"]))
    h = group_norm(convolution(h, params["k2"]), *params["n2"])
    short = x if "short" not in params else convolution(x, params["short"], stride)
    return jax.nn.relu(h + short)


def _block_params(inputs: int, outputs: int) -> Tree:
    params = {
        "k1": array(3, 3, inputs, outputs), "n1": (array(outputs), array(outputs)),
        "k2": array(3, 3, outputs, outputs), "n2": (array(outputs), array(outputs)),
    }  # fmt: skip
    if inputs != outputs:
        params["short"] = array(1, 1, inputs, outputs)
    return params


def resnet(batch: int = 32, size: int = 32, channels: int = 16, optimizer: Any = sgd) -> str:
    """Residual convolutions with group normalisation: 3 stages of 2 blocks."""
    widths = [channels, 2 * channels, 4 * channels]

    def loss(params: Tree, x: jax.Array, labels: jax.Array) -> jax.Array:
        x = convolution(x, params["stem"])
        for stage, blocks in enumerate(params["stages"]):
            for i, block in enumerate(blocks):
                x = _residual_block(block, x, 2 if stage and not i else 1)
        logits = x.mean((1, 2)) @ params["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    stages = [[_block_params(a, b), _block_params(b, b)] for a, b in zip([channels, *widths], widths, strict=False)]
    params = {"stem": array(3, 3, 3, channels), "stages": stages, "head": array(widths[-1], 16)}
    images, labels = array(batch, size, size, 3), array(batch, dtype=jnp.int32)
    return training_step(loss, params, images, labels, optimizer=optimizer())


def unet(batch: int = 16, size: int = 32, channels: int = 16, levels: int = 3, optimizer: Any = adamw) -> str:
    """Down and up again with skip connections that live through the whole of it."""

    def loss(params: Tree, x: jax.Array, y: jax.Array) -> jax.Array:
        h, skips = convolution(x, params["in"]), []
        for block in params["down"]:
            h = _residual_block(block, h, 1)
            skips.append(h)
            h = jax.lax.reduce_window(h, 0.0, jax.lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") / 4
        h = _residual_block(params["middle"], h, 1)
        for block in params["up"]:
            skip = skips.pop()
            h = jnp.repeat(jnp.repeat(h, 2, 1), 2, 2)
            h = _residual_block(block, jnp.concatenate([h, skip], -1), 1)
        return jnp.mean((convolution(h, params["out"]) - y) ** 2)

    params = {
        "in": array(3, 3, 4, channels),
        "down": [_block_params(channels, channels) for _ in range(levels)],
        "middle": _block_params(channels, channels),
        "up": [_block_params(2 * channels, channels) for _ in range(levels)],
        "out": array(3, 3, channels, 4),
    }
    images = array(batch, size, size, 4)
    return training_step(loss, params, images, images, optimizer=optimizer())


def lstm(batch: int = 64, length: int = 32, width: int = 128, vocabulary: int = 256, optimizer: Any = sgd) -> str:
    """A language model of one LSTM layer, scanned over time."""

    def loss(params: Tree, tokens: jax.Array) -> jax.Array:
        inputs = params["embedding"][tokens[:, :-1]].transpose(1, 0, 2)

        def cell(carry: Tree, x: jax.Array) -> Tree:
            h, c = carry
            gates = x @ params["wx"] + h @ params["wh"] + params["b"]
            i, f, g, o = jnp.split(gates, 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zeros = jnp.zeros((tokens.shape[0], width))
        _, outputs = jax.lax.scan(cell, (zeros, zeros), inputs)
        logits = outputs @ params["embedding"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:].T).mean()

    params = {
        "embedding": array(vocabulary, width), "wx": array(width, 4 * width),
        "wh": array(width, 4 * width), "b": array(4 * width),
    }  # fmt: skip
    return training_step(loss, params, array(batch, length + 1, dtype=jnp.int32), optimizer=optimizer())


def _llama_layer(x: jax.Array, p: Tree, heads: int) -> jax.Array:
    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale

    batch, time, width = x.shape
    h = norm(x, p["norm1"])
    q, k, v = ((h @ p[name]).reshape(batch, time, heads, width // heads) for name in "qkv")
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (width // heads) ** 0.5
    scores = jnp.where(jnp.tril(jnp.ones((time, time), bool)), scores, -1e9)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(x.shape)
    x = x + mixed @ p["o"]
    h = norm(x, p["norm2"])
    return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


def llama(
    layers: int = 6, batch: int = 16, length: int = 128, width: int = 128, heads: int = 4, vocabulary: int = 256,
    remat: bool = True, optimizer: Any = adamw,
) -> str:  # fmt: skip
    """Layers by `lax.scan` over stacked parameters, each rematerialised in the backward pass."""
    hidden = 3 * width
    layer = partial(_llama_layer, heads=heads)

    def loss(params: Tree, tokens: jax.Array) -> jax.Array:
        x = params["embedding"][tokens[:, :-1]]
        body = jax.checkpoint(layer) if remat else layer
        x, _ = jax.lax.scan(lambda h, p: (body(h, p), None), x, params["layers"])
        return optax.softmax_cross_entropy_with_integer_labels(x @ params["head"], tokens[:, 1:]).mean()

    stacked = {name: array(layers, width, width) for name in "qkvo"}
    stacked |= {"gate": array(layers, width, hidden), "up": array(layers, width, hidden)}
    stacked |= {"down": array(layers, hidden, width), "norm1": array(layers, width), "norm2": array(layers, width)}
    params = {"embedding": array(vocabulary, width), "layers": stacked, "head": array(width, vocabulary)}
    return training_step(loss, params, array(batch, length + 1, dtype=jnp.int32), optimizer=optimizer())


def moe(
    batch: int = 16, length: int = 64, width: int = 64, experts: int = 8, layers: int = 2, optimizer: Any = adamw
) -> str:
    """Mixture of experts with top-1 routing by capacity, dispatched by products (GShard)."""
    hidden = 4 * width
    capacity = 2 * length // experts

    def layer(p: Tree, x: jax.Array) -> jax.Array:
        chances = jax.nn.softmax(jnp.einsum("btd,de->bte", x, p["route"]))
        chosen = jax.nn.one_hot(jnp.argmax(chances, -1), experts)
        place = (jnp.cumsum(chosen, 1) * chosen - 1).astype(jnp.int32)
        dispatch = chosen[..., None] * jax.nn.one_hot(place, capacity)
        combine = dispatch * jnp.sum(chances * chosen, -1)[..., None, None]
        sent = jnp.einsum("btec,btd->ebcd", dispatch, x)
        h = jax.nn.gelu(jnp.einsum("ebcd,edf->ebcf", sent, p["up"]))
        return x + jnp.einsum("btec,ebcd->btd", combine, jnp.einsum("ebcf,efd->ebcd", h, p["down"]))

    def loss(params: Tree, x: jax.Array, y: jax.Array) -> jax.Array:
        for p in params:
            x = layer(p, x)
        return jnp.mean((x - y) ** 2)

    one = {
        "route": array(width, experts), "up": array(experts, width, hidden), "down": array(experts, hidden, width),
    }  # fmt: skip
    x = array(batch, length, width)
    return training_step(loss, [one] * layers, x, x, optimizer=optimizer())


MODELS: dict[str, Callable[[], str]] = {
    "gpt2-2": partial(gpt2, 2, width=256, batch=8),
    "gpt2-4": partial(gpt2, 4),
    "gpt2-4-sgd": partial(gpt2, 4, optimizer=sgd),
    "gpt2-4-wide": partial(gpt2, 4, width=256, context=64, batch=8),
    "gpt2-12": partial(gpt2, 12),
    "gpt2-24": partial(gpt2, 24, context=64),
    "mlp": mlp,
    "mlp-adamw": partial(mlp, optimizer=adamw, batch=256),
    "mlp-bf16": partial(mlp, dtype=jnp.bfloat16, optimizer=adamw),
    "resnet": resnet,
    "resnet-adamw": partial(resnet, batch=8, optimizer=adamw),
    "unet": unet,
    "lstm": lstm,
    "lstm-adamw": partial(lstm, batch=16, optimizer=adamw),
    "llama": llama,
    "llama-kept": partial(llama, remat=False),
    "moe": moe,
}

#: For the TPU compiler, which keeps values of a few megabytes on the chip and counts what does not fit there.
LARGE_MODELS: dict[str, Callable[[], str]] = {
    "gpt2-2": partial(gpt2, 2, width=768, heads=12, context=1024, batch=64, vocabulary=32768),
    "gpt2-4-sgd": partial(gpt2, 4, width=1024, heads=8, context=1024, batch=64, vocabulary=8192, optimizer=sgd),
    "mlp": partial(mlp, batch=65536, width=4096),
    "mlp-bf16": partial(mlp, batch=65536, width=4096, dtype=jnp.bfloat16, optimizer=adamw),
    "resnet": partial(resnet, batch=1024, size=64, channels=128),
    "llama": partial(llama, batch=64, length=1024, width=1024, heads=8, vocabulary=8192),
    "lstm": partial(lstm, batch=1024, length=128, width=1024, vocabulary=8192),
    "moe": partial(moe, batch=64, length=1024, width=1024, experts=8),
}
