"""Training steps of models that the planner was not built on: what it says of them is as it comes.

Shapes only, no arrays; small, as those of `collective_steps` are.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from workloads.collective_steps import array, step_text, tokens


def mamba(layers: int = 2, width: int = 64, state: int = 8) -> str:
    """Selective state spaces (Gu and Dao, 2023): causal depthwise convolutions and an associative scan over time."""
    inner, taps, vocabulary = 2 * width, 4, 256

    def merge(left: Any, right: Any) -> Any:
        return left[0] * right[0], left[1] * right[0] + right[1]

    def mixer(p: Any, x: jax.Array) -> jax.Array:
        hidden, gate = jnp.split(x @ p["into"], 2, axis=-1)
        padded = jnp.pad(hidden, ((0, 0), (taps - 1, 0), (0, 0)))
        hidden = sum(padded[:, tap : tap + x.shape[1]] * p["taps"][tap] for tap in range(taps))
        hidden = jax.nn.silu(hidden)
        delta = jax.nn.softplus(hidden @ p["delta"])
        into, out = jnp.split(hidden @ p["states"], 2, axis=-1)
        decay = jnp.exp(-delta[..., None] * jnp.exp(p["decay"]))
        _, states = jax.lax.associative_scan(merge, (decay, (delta * hidden)[..., None] * into[..., None, :]), axis=1)
        mixed = jnp.einsum("blds,bls->bld", states, out) + hidden * p["skip"]
        return (mixed * jax.nn.silu(gate)) @ p["out"]

    def loss(params: Any, words: jax.Array) -> jax.Array:
        x = params["embedding"][words[:, :-1]]
        for p in params["layers"]:
            x = x + mixer(p, x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5))
        logits = x @ params["embedding"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, words[:, 1:]).mean()

    layer = {
        "into": array(width, 2 * inner),
        "taps": array(taps, inner),
        "delta": array(inner, inner),
        "states": array(inner, 2 * state),
        "decay": array(inner, state),
        "skip": array(inner),
        "out": array(inner, width),
    }
    return step_text(loss, {"embedding": array(vocabulary, width), "layers": [layer] * layers}, tokens(16, 33))


def convnext(blocks: int = 2, width: int = 32) -> str:
    """ConvNeXt (Liu et al., 2022): patches by strided convolutions, 7×7 depthwise ones, layer norm, layer scale."""

    def convolve(x: jax.Array, kernel: jax.Array, stride: int = 1, groups: int = 1) -> jax.Array:
        return jax.lax.conv_general_dilated(
            x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups
        )

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        centred = x - x.mean(-1, keepdims=True)
        return centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-6) * scale

    def block(p: Any, x: jax.Array) -> jax.Array:
        y = norm(convolve(x, p["depthwise"], groups=x.shape[-1]), p["norm"])
        return x + p["scale"] * (jax.nn.gelu(y @ p["up"]) @ p["down"])

    def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        x = convolve(images, params["stem"], 4)
        for stage in params["stages"]:
            x = convolve(norm(x, stage["norm"]), stage["shrink"], 2)
            for p in stage["blocks"]:
                x = block(p, x)
        logits = x.mean((1, 2)) @ params["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def stage(inputs: int, outputs: int) -> Any:
        layer = {
            "depthwise": array(7, 7, 1, outputs),
            "norm": array(outputs),
            "up": array(outputs, 4 * outputs),
            "down": array(4 * outputs, outputs),
            "scale": array(outputs),
        }
        return {"norm": array(inputs), "shrink": array(2, 2, inputs, outputs), "blocks": [layer] * blocks}

    params = {
        "stem": array(4, 4, 3, width),
        "stages": [stage(width, 2 * width), stage(2 * width, 4 * width)],
        "head": array(4 * width, 64),
    }
    return step_text(loss, params, array(32, 64, 64, 3), array(32, dtype=jnp.int32))


def dit(layers: int = 2, width: int = 64, heads: int = 4, patch: int = 2) -> str:
    """A diffusion transformer (Peebles and Xie, 2023): images cut to patches, norms modulated by the time, noise
    drawn in the step."""
    size, channels = 16, 4

    def patches(x: jax.Array) -> jax.Array:
        side = size // patch
        cut = x.reshape(-1, side, patch, side, patch, channels)
        return cut.transpose(0, 1, 3, 2, 4, 5).reshape(-1, side * side, patch * patch * channels)

    def modulated(x: jax.Array, shift: jax.Array, scale: jax.Array) -> jax.Array:
        centred = x - x.mean(-1, keepdims=True)
        normed = centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-6)
        return normed * (1 + scale[:, None]) + shift[:, None]

    def block(p: Any, x: jax.Array, condition: jax.Array) -> jax.Array:
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = jnp.split(jax.nn.silu(condition) @ p["modulate"], 6, -1)
        qkv = (modulated(x, shift_a, scale_a) @ p["qkv"]).reshape(*x.shape[:2], 3, heads, -1)
        q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) * (width // heads) ** -0.5)
        attended = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
        x = x + gate_a[:, None] * (attended @ p["out"])
        return x + gate_m[:, None] * (jax.nn.gelu(modulated(x, shift_m, scale_m) @ p["up"]) @ p["down"])

    def loss(params: Any, images: jax.Array, times: jax.Array, labels: jax.Array, key: jax.Array) -> jax.Array:
        noise = jax.random.normal(jax.random.wrap_key_data(key), images.shape)
        level = times[:, None, None, None]
        x = patches(jnp.cos(level) * images + jnp.sin(level) * noise) @ params["into"] + params["places"]
        angles = times[:, None] * jnp.exp(-jnp.arange(width // 2) / width)
        condition = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], -1) @ params["time"] + params["classes"][labels]
        for p in params["layers"]:
            x = block(p, x, condition)
        return jnp.mean(jnp.square(x @ params["out"] - patches(noise)))

    layer = {
        "modulate": array(width, 6 * width),
        "qkv": array(width, 3 * width),
        "out": array(width, width),
        "up": array(width, 4 * width),
        "down": array(4 * width, width),
    }
    values = patch * patch * channels
    params = {
        "into": array(values, width),
        "places": array((size // patch) ** 2, width),
        "time": array(width, width),
        "classes": array(16, width),
        "layers": [layer] * layers,
        "out": array(width, values),
    }
    images = array(32, size, size, channels)
    return step_text(loss, params, images, array(32), array(32, dtype=jnp.int32), array(2, dtype=jnp.uint32))


def gnn(layers: int = 2, width: int = 64, nodes: int = 512, edges: int = 2048) -> str:
    """Message passing with attention over edges: rows of nodes gathered, messages summed by segment."""

    def layer(p: Any, x: jax.Array, senders: jax.Array, receivers: jax.Array, features: jax.Array) -> jax.Array:
        sent, received = x[senders], x[receivers]
        message = jax.nn.relu(sent @ p["sent"] + received @ p["received"] + features @ p["edge"])
        score = (message @ p["score"])[:, 0]
        score = jnp.exp(score - jax.ops.segment_max(score, receivers, nodes)[receivers])
        weight = score / (jax.ops.segment_sum(score, receivers, nodes)[receivers] + 1e-6)
        gathered = jax.ops.segment_sum(message * weight[:, None], receivers, nodes)
        return x + jax.nn.relu(jnp.concatenate([x, gathered], -1) @ p["update"])

    def loss(params: Any, x: jax.Array, senders: Any, receivers: Any, features: Any, labels: Any) -> jax.Array:
        x = x @ params["into"]
        for p in params["layers"]:
            x = layer(p, x, senders, receivers, features)
        return optax.softmax_cross_entropy_with_integer_labels(x @ params["head"], labels).mean()

    one = {
        "sent": array(width, width),
        "received": array(width, width),
        "edge": array(16, width),
        "score": array(width, 1),
        "update": array(2 * width, width),
    }
    params = {"into": array(32, width), "layers": [one] * layers, "head": array(width, 16)}
    ends = array(edges, dtype=jnp.int32)
    return step_text(loss, params, array(nodes, 32), ends, ends, array(edges, 16), array(nodes, dtype=jnp.int32))


UNUSUAL = {"mamba": mamba, "convnext": convnext, "dit": dit, "gnn": gnn}
