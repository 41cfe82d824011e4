"""Small training steps whose collectives are predicted and counted: one per way of building a model.

Shapes only, no arrays. Sizes are small so that XLA's partitioner takes a second or two a program; every
dimension that plans split is a multiple of 8, but for the head counts and one odd model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from examples.gpt2.model import Config, make_steps

Shapes = Any
F32 = jnp.float32


def array(*shape: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def tokens(batch: int, length: int) -> jax.ShapeDtypeStruct:
    return array(batch, length, dtype=jnp.int32)


def step_text(loss: Callable[..., jax.Array], params: Shapes, *batch: Shapes, optimizer: Any = None) -> str:
    """HLO text of one training step of `loss(params, *batch)`; state is donated."""
    chosen = optimizer or optax.adamw(1e-3)

    def step(params: Any, state: Any, *batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, *batch)
        updates, state = chosen.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    state = jax.eval_shape(chosen.init, params)
    return lower_text(step, params, state, *batch)


def lower_text(step: Callable[..., Any], *arguments: Shapes) -> str:
    lowering = jax.jit(step, donate_argnums=(0, 1), keep_unused=True).lower(*arguments)
    return lowering.as_text("hlo", debug_info=True)


def gpt2(**sizes: int) -> str:
    batch = sizes.pop("batch", 16)
    config = Config(**{"vocabulary": 512, "context": 64, "layers": 2, "heads": 8, "width": 128, **sizes})
    init, step, _ = make_steps(config, optax.adamw(1e-3))
    params, state = jax.eval_shape(init, jax.random.key(0))
    return lower_text(step, params, state, tokens(batch, config.context + 1))


def mlp(width: int = 256) -> str:
    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        for weight, bias in params:
            x = jax.nn.gelu(x @ weight + bias)
        return jnp.mean(jnp.square(x - y))

    params = [(array(width, width), array(width))] * 3
    return step_text(loss, params, array(512, width), array(512, width))


def cnn() -> str:
    def convolve(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
        return jax.lax.conv_general_dilated(
            x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        groups = x.reshape(*x.shape[:3], 8, -1)
        mean = groups.mean((1, 2, 4), keepdims=True)
        variance = jnp.square(groups - mean).mean((1, 2, 4), keepdims=True)
        return ((groups - mean) * jax.lax.rsqrt(variance + 1e-5)).reshape(x.shape) * scale

    def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        x = convolve(images, params["stem"])
        for block in params["blocks"]:
            hidden = jax.nn.relu(norm(convolve(x, block["a"]), block["scale"]))
            x = jax.nn.relu(x + convolve(hidden, block["b"]))
        logits = x.mean((1, 2)) @ params["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    block = {"a": array(3, 3, 32, 32), "b": array(3, 3, 32, 32), "scale": array(32)}
    params = {"stem": array(3, 3, 8, 32), "blocks": [block] * 2, "head": array(32, 64)}
    return step_text(loss, params, array(32, 16, 16, 8), array(32, dtype=jnp.int32))


def lstm() -> str:
    width = 64

    def cell(params: Any, carry: Any, x: jax.Array) -> Any:
        hidden, memory = carry
        gates = x @ params["input"] + hidden @ params["hidden"] + params["bias"]
        i, f, g, o = jnp.split(gates, 4, axis=-1)
        memory = jax.nn.sigmoid(f) * memory + jax.nn.sigmoid(i) * jnp.tanh(g)
        hidden = jax.nn.sigmoid(o) * jnp.tanh(memory)
        return (hidden, memory), hidden

    def loss(params: Any, words: jax.Array) -> jax.Array:
        x = params["embedding"][words[:, :-1]]
        start = (jnp.zeros((x.shape[0], width)),) * 2
        _, outputs = jax.lax.scan(partial(cell, params), start, x.swapaxes(0, 1))
        logits = outputs.swapaxes(0, 1) @ params["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, words[:, 1:]).mean()

    params = {
        "embedding": array(256, width),
        "input": array(width, 4 * width),
        "hidden": array(width, 4 * width),
        "bias": array(4 * width),
        "head": array(width, 256),
    }
    return step_text(loss, params, tokens(32, 17))


def moe(top: int | None = None) -> str:
    """One expert for each token. top: that many, found by `lax.top_k`."""
    width, hidden, experts, capacity = 64, 128, 8, 64

    def choice(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What each expert's answer counts, and which are asked: [groups, tokens, experts]."""
        if top is None:
            gates = jax.nn.softmax(logits)
            return gates, jax.nn.one_hot(gates.argmax(-1), experts)
        best, which = jax.lax.top_k(logits, top)
        chosen = jax.nn.one_hot(which, experts)
        return jnp.einsum("gsk,gske->gse", jax.nn.softmax(best), chosen), chosen.sum(-2)

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        gates, chosen = choice(x @ params["router"])
        place = jnp.cumsum(chosen, axis=1) * chosen
        dispatch = jax.nn.one_hot(place.astype(jnp.int32) - 1, capacity) * chosen[..., None]
        inside = jnp.einsum("gsec,gsm->egcm", dispatch, x)
        inside = jax.nn.gelu(jnp.einsum("egcm,emh->egch", inside, params["up"]))
        inside = jnp.einsum("egch,ehm->egcm", inside, params["down"])
        combine = dispatch * gates[..., None]
        return jnp.mean(jnp.square(jnp.einsum("gsec,egcm->gsm", combine, inside) - y))

    params = {
        "router": array(width, experts),
        "up": array(experts, width, hidden),
        "down": array(experts, hidden, width),
    }
    return step_text(loss, params, array(16, 64, width), array(16, 64, width))


def llama(layers: int = 4, width: int = 64, heads: int = 8) -> str:
    """Layers in a scan over stacked parameters, each recomputed on the way back."""
    hidden, vocabulary, length = 4 * width, 256, 32

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5) * scale

    def rotated(x: jax.Array) -> jax.Array:
        half = x.shape[-1] // 2
        angles = jnp.arange(x.shape[1])[:, None] / 10000 ** (jnp.arange(half) / half)
        cos, sin = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
        a, b = x[..., :half], x[..., half:]
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def block(x: jax.Array, p: Any) -> jax.Array:
        batch, time, _ = x.shape
        y = norm(x, p["attention_norm"])
        q, k, v = ((y @ p[name]).reshape(batch, time, heads, -1) for name in ("q", "k", "v"))
        scores = jnp.einsum("bqhd,bkhd->bhqk", rotated(q), rotated(k)) / (width // heads) ** 0.5
        weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((time, time), bool)), scores, -1e9))
        x = x + jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ p["o"]
        y = norm(x, p["mlp_norm"])
        return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]

    def loss(params: Any, words: jax.Array) -> jax.Array:
        x = params["embedding"][words[:, :-1]]
        x, _ = jax.lax.scan(jax.checkpoint(lambda x, p: (block(x, p), None)), x, params["blocks"])
        logits = norm(x, params["norm"]) @ params["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, words[:, 1:]).mean()

    matrix = {name: array(layers, width, width) for name in ("q", "k", "v", "o")}
    blocks = {
        **matrix,
        "gate": array(layers, width, hidden),
        "up": array(layers, width, hidden),
        "down": array(layers, hidden, width),
        "attention_norm": array(layers, width),
        "mlp_norm": array(layers, width),
    }
    params = {
        "embedding": array(vocabulary, width),
        "head": array(width, vocabulary),
        "norm": array(width),
        "blocks": blocks,
    }
    return step_text(loss, params, tokens(16, length + 1))


def odd() -> str:
    """Dimensions that 8 devices do not divide."""

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        hidden = jax.nn.gelu(x @ params["a"])
        return jnp.mean(jnp.square(hidden @ params["b"] - y))

    params = {"a": array(100, 300), "b": array(300, 60)}
    return step_text(loss, params, array(320, 100), array(320, 60))


def dlrm() -> str:
    """Tables looked up by several indices an example, their rows summed, beside dense features."""
    width, rows, looked_up = 32, 4096, 4

    def loss(params: Any, dense: jax.Array, indices: jax.Array, labels: jax.Array) -> jax.Array:
        bags = [table[indices[:, i]].sum(1) for i, table in enumerate(params["tables"])]
        features = jnp.stack([jax.nn.relu(dense @ params["bottom"]), *bags], 1)
        crossed = jnp.einsum("bif,bjf->bij", features, features).reshape(dense.shape[0], -1)
        logits = jax.nn.relu(crossed @ params["top"]) @ params["out"]
        return optax.sigmoid_binary_cross_entropy(logits[:, 0], labels).mean()

    params = {
        "tables": [array(rows, width)] * 3,
        "bottom": array(16, width),
        "top": array(16, 64),
        "out": array(64, 1),
    }
    return step_text(loss, params, array(256, 16), array(256, 3, looked_up, dtype=jnp.int32), array(256))


MODELS: dict[str, Callable[[], str]] = {
    "mlp": mlp,
    "odd": odd,
    "cnn": cnn,
    "lstm": lstm,
    "moe": moe,
    "moe-top-2": partial(moe, top=2),
    "llama": llama,
    "gpt2": gpt2,
    "gpt2-6-heads": partial(gpt2, heads=6, width=96),
    "dlrm": dlrm,
}
