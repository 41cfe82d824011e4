"""Steps of networks for text, speech, images and proteins."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from workloads.small_steps.made import IMAGES, Step, cross_entropy, integers, make_train_step, normal, weights


def ctc() -> Step:
    """Speech with connectionist temporal classification (Graves et al., 2006): a loop over time in the loss."""
    params = {"into": weights(80, 128), "hidden": weights(128, 256, seed=1), "out": weights(256, 32, seed=2)}

    def loss(p: Any, x: jax.Array, lengths: jax.Array, words: jax.Array, word_lengths: jax.Array) -> jax.Array:
        logits = jax.nn.gelu(jax.nn.gelu(x @ p["into"]) @ p["hidden"]) @ p["out"]
        padding = (jnp.arange(x.shape[1]) >= lengths[:, None]).astype(jnp.float32)
        word_padding = (jnp.arange(words.shape[1]) >= word_lengths[:, None]).astype(jnp.float32)
        return optax.ctc_loss(logits, padding, words, word_padding).mean()

    batch = (normal(16, 40, 80), integers(20, 40, 16), integers(1, 32, 16, 10), integers(2, 10, 16))
    return make_train_step(loss, params, *batch)


def states_and_filters() -> Step:
    """A linear state space by an associative scan, then a long filter by Fourier transforms."""
    width, length = 64, 128
    params = {
        "into": weights(32, width),
        "decay": normal(width, scale=0.5),
        "gain": weights(width, seed=2),
        "filter": weights(width, length, seed=4),
        "out": weights(width, 32, seed=5),
    }

    def merged(left: Any, right: Any) -> Any:
        return left[0] * right[0], right[0] * left[1] + right[1]

    def loss(p: Any, x: jax.Array, wanted: jax.Array) -> jax.Array:
        hidden = x @ p["into"]
        decay = jnp.broadcast_to(jax.nn.sigmoid(p["decay"]), hidden.shape)
        _, states = lax.associative_scan(merged, (decay, hidden * p["gain"]), axis=1)
        response = jnp.fft.rfft(p["filter"], n=2 * length).T
        filtered = jnp.fft.irfft(jnp.fft.rfft(states, n=2 * length, axis=1) * response, n=2 * length, axis=1)
        return jnp.mean((jax.nn.silu(filtered[:, :length]) @ p["out"] - wanted) ** 2)

    return make_train_step(loss, params, normal(16, length, 32), normal(16, length, 32, seed=1))


def rotations() -> Step:
    """A recurrence in complex numbers (Orvieto et al., 2023)."""
    params = {"decay": normal(64, scale=0.5), "angle": normal(64), "into": weights(32, 64), "out": weights(64, 32)}

    def loss(p: Any, x: jax.Array, wanted: jax.Array) -> jax.Array:
        turn = jnp.exp(-jnp.exp(p["decay"]) + 1j * p["angle"])
        inputs = (x @ p["into"]).astype(jnp.complex64).swapaxes(0, 1)

        def turned(h: jax.Array, u: jax.Array) -> tuple[jax.Array, jax.Array]:
            return (h := turn * h + u), h

        _, states = lax.scan(turned, jnp.zeros_like(inputs[0]), inputs)
        return jnp.mean((states.swapaxes(0, 1).real @ p["out"] - wanted) ** 2)

    return make_train_step(loss, params, normal(16, 20, 32), normal(16, 20, 32, seed=1))


def codebook() -> Step:
    """An autoencoder whose code is the nearest of 256 (van den Oord et al., 2017), with transposed convolutions."""
    params = {
        "first": weights(4, 4, 3, 64),
        "second": weights(4, 4, 64, 64, seed=1),
        "codes": normal(256, 64, seed=2, scale=0.1),
        "third": weights(4, 4, 64, 64, seed=3),
        "last": weights(4, 4, 64, 3, seed=4),
    }

    def loss(p: Any, x: jax.Array) -> jax.Array:
        hidden = jax.nn.relu(lax.conv_general_dilated(x, p["first"], (2, 2), "SAME", dimension_numbers=IMAGES))
        z = lax.conv_general_dilated(hidden, p["second"], (2, 2), "SAME", dimension_numbers=IMAGES)
        distance = jnp.sum(z**2, -1, keepdims=True) - 2 * z @ p["codes"].T + jnp.sum(p["codes"] ** 2, -1)
        nearest = p["codes"][jnp.argmin(distance, -1)]
        apart = jnp.mean((lax.stop_gradient(z) - nearest) ** 2) + jnp.mean((z - lax.stop_gradient(nearest)) ** 2)
        straight = z + lax.stop_gradient(nearest - z)
        hidden = jax.nn.relu(lax.conv_transpose(straight, p["third"], (2, 2), "SAME", dimension_numbers=IMAGES))
        result = lax.conv_transpose(hidden, p["last"], (2, 2), "SAME", dimension_numbers=IMAGES)
        return jnp.mean((result - x) ** 2) + apart

    return make_train_step(loss, params, normal(16, 32, 32, 3))


def windows() -> Step:
    """Attention inside windows of an image, the second time shifted (Liu et al., 2021)."""
    width = 64
    params = {
        "patch": weights(4, 4, 3, width),
        "qkv": weights(2, width, 3 * width, seed=1),
        "out": weights(2, width, width, seed=2),
        "up": weights(2, width, 4 * width, seed=3),
        "down": weights(2, 4 * width, width, seed=4),
        "bias": weights(2, 4, 16, 16, seed=5),
        "head": weights(width, 10, seed=6),
    }

    def block(p: Any, x: jax.Array, number: int) -> jax.Array:
        batch, rows, columns, width = x.shape
        h = jnp.roll(x, (-2 * number, -2 * number), (1, 2))
        h = (h - h.mean(-1, keepdims=True)) * lax.rsqrt(h.var(-1, keepdims=True) + 1e-5)
        h = h.reshape(batch, rows // 4, 4, columns // 4, 4, width).transpose(0, 1, 3, 2, 4, 5).reshape(-1, 16, width)
        q, k, v = jnp.split((h @ p["qkv"][number]).reshape(-1, 16, 4, 3 * width // 4), 3, -1)
        seen = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 4 + p["bias"][number])
        h = jnp.einsum("bhqk,bkhd->bqhd", seen, v).reshape(-1, 16, width) @ p["out"][number]
        h = h.reshape(batch, rows // 4, columns // 4, 4, 4, width).transpose(0, 1, 3, 2, 4, 5).reshape(x.shape)
        x = x + jnp.roll(h, (2 * number, 2 * number), (1, 2))
        return x + jax.nn.gelu(x @ p["up"][number]) @ p["down"][number]

    def loss(p: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        h = lax.conv_general_dilated(x, p["patch"], (4, 4), "VALID", dimension_numbers=IMAGES)
        for number in range(2):
            h = block(p, h, number)
        return cross_entropy(h.mean((1, 2)) @ p["head"], labels)

    return make_train_step(loss, params, normal(16, 32, 32, 3), integers(0, 10, 16))


def pairs() -> Step:
    """Residues in pairs, along triangles (Jumper et al., 2021)."""
    width = 32
    params = {name: weights(width, width, seed=number) for number, name in enumerate(("left", "right", "gate", "out"))}
    params |= {
        "outer": weights(width, 8, seed=5),
        "spread": weights(64, width, seed=6),
        "head": weights(width, 16, seed=7),
    }

    def loss(p: Any, rows: jax.Array, pair: jax.Array, labels: jax.Array) -> jax.Array:
        outer = jnp.einsum("bsic,bsjd->bijcd", rows @ p["outer"], rows @ p["outer"])
        z = pair + outer.reshape(*pair.shape[:3], -1) @ p["spread"] / rows.shape[1]
        left, right = jax.nn.sigmoid(z @ p["gate"]) * (z @ p["left"]), z @ p["right"]
        z = z + jnp.einsum("bikc,bjkc->bijc", left, right) @ p["out"]
        z = z + jnp.einsum("bkic,bkjc->bijc", left, right) @ p["out"]
        seen = jax.nn.softmax(jnp.einsum("bijc,bikc->bijk", z, z) / 6, -1)
        z = z + jnp.einsum("bijk,bikc->bijc", seen, z)
        return cross_entropy((z + z.swapaxes(1, 2)) @ p["head"], labels)

    return make_train_step(loss, params, normal(8, 16, 24, width), normal(8, 24, 24, width), integers(0, 16, 8, 24, 24))


def attention_in_blocks() -> Step:
    """Attention over blocks of keys in a loop, with a running softmax (Rabe and Staats, 2021)."""
    width, heads, blocks = 64, 4, 4
    params = {
        "qkv": weights(width, 3 * width),
        "out": weights(width, width, seed=1),
        "head": weights(width, 10, seed=2),
    }

    def attended(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        batch, length, _, size = q.shape
        k, v = (x.reshape(batch, blocks, length // blocks, heads, size).swapaxes(0, 1) for x in (k, v))

        def block(carry: Any, keys: Any) -> tuple[Any, None]:
            most, total, result = carry
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, keys[0]) / 8
            now = jnp.maximum(most, scores.max(-1))
            share, outcome = jnp.exp(scores - now[..., None]), jnp.exp(most - now)
            result = result * outcome[..., None] + jnp.einsum("bhqk,bkhd->bhqd", share, keys[1])
            return (now, total * outcome + share.sum(-1), result), None

        shape = (batch, heads, length)
        start = (jnp.full(shape, -1e9), jnp.zeros(shape), jnp.zeros((*shape, size)))
        (_, total, found), _ = lax.scan(jax.checkpoint(block), start, (k, v))
        return (found / total[..., None]).swapaxes(1, 2)

    def loss(p: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        q, k, v = jnp.split((x @ p["qkv"]).reshape(*x.shape[:2], heads, -1), 3, -1)
        return cross_entropy((x + attended(q, k, v).reshape(x.shape) @ p["out"]).mean(1) @ p["head"], labels)

    return make_train_step(loss, params, normal(16, 64, width), integers(0, 10, 16))


def adapters() -> Step:
    """Low-rank adapters (Hu et al., 2021) of frozen weights in eight bits, layers in a scan, Adafactor."""
    layers, width, vocabulary = 4, 128, 512
    frozen = {
        "layers": integers(-127, 127, layers, width, width).astype(np.int8),
        "scale": np.full((layers, width), 1e-3, np.float32),
        "embedding": weights(vocabulary, width).astype(jnp.bfloat16),
    }
    params = {"down": weights(layers, width, 8, seed=1), "up": weights(layers, 8, width, seed=2)}

    def loss(p: Any, base: Any, words: jax.Array, following: jax.Array) -> jax.Array:
        def layer(h: jax.Array, w: Any) -> tuple[jax.Array, None]:
            stored, scale, down, up = (each.astype(jnp.bfloat16) for each in w)
            return h + jax.nn.silu(h @ (stored * scale) + (h @ down) @ up), None

        stacked = (base["layers"], base["scale"], p["down"], p["up"])
        h, _ = lax.scan(jax.checkpoint(layer), base["embedding"][words], stacked)
        return cross_entropy((h @ base["embedding"].T).astype(jnp.float32), following)

    words, following = integers(0, vocabulary, 16, 32), integers(0, vocabulary, 16, 32, seed=1)
    return make_train_step(loss, params, frozen, words, following, optimizer=optax.adafactor(1e-3))


def two_towers() -> Step:
    """Images and captions side by side (Radford et al., 2021), with dropout."""
    params = {"words": weights(512, 64), "text": weights(64, 64, seed=1), "image": weights(48, 64, seed=2)}
    params["heat"] = np.float32(2.0)

    def dropped(key: jax.Array, x: jax.Array) -> jax.Array:
        return x * jax.random.bernoulli(key, 0.9, x.shape) / 0.9

    def loss(p: Any, key: jax.Array, images: jax.Array, captions: jax.Array) -> jax.Array:
        of_text, of_images = jax.random.split(key)
        result = (dropped(of_text, p["words"][captions]).mean(1) @ p["text"], dropped(of_images, images @ p["image"]))
        text, image = (each / jnp.linalg.norm(each, axis=-1, keepdims=True) for each in result)
        logits = image @ text.T * jnp.exp(p["heat"])
        own = jnp.arange(logits.shape[0])
        return cross_entropy(logits, own) + cross_entropy(logits.T, own)

    return make_train_step(loss, params, jax.random.PRNGKey(3), normal(64, 48), integers(0, 512, 64, 12))


def ragged_experts() -> Step:
    """Two experts of eight for each word, whose rows are sorted by expert: products of ragged groups."""
    experts, width, hidden = 8, 64, 128
    params = {
        "router": normal(width, experts, scale=0.5),
        "up": weights(experts, width, hidden, seed=1),
        "down": weights(experts, hidden, width, seed=2),
        "head": weights(width, 10, seed=3),
    }

    def loss(p: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        words = x.reshape(-1, width)
        share, expert = lax.top_k(jax.nn.softmax(words @ p["router"]), 2)
        order = jnp.argsort(expert.reshape(-1))
        sizes = jnp.bincount(expert.reshape(-1), length=experts).astype(jnp.int32)
        h = jax.nn.silu(lax.ragged_dot(jnp.repeat(words, 2, 0)[order], p["up"], sizes))
        h = lax.ragged_dot(h, p["down"], sizes)[jnp.argsort(order)].reshape(-1, 2, width)
        return cross_entropy((x + jnp.sum(h * share[..., None], 1).reshape(x.shape)).mean(1) @ p["head"], labels)

    return make_train_step(loss, params, normal(16, 16, width), integers(0, 10, 16))


def boxes() -> Step:
    """Boxes in images: the best for each object by overlap, scattered labels, the most certain ones."""
    params = {
        "first": weights(3, 3, 3, 32),
        "second": weights(3, 3, 32, 64, seed=1),
        "box": weights(64, 4, seed=2),
        "label": weights(64, 8, seed=3),
    }

    def overlap(a: jax.Array, b: jax.Array) -> jax.Array:
        low = jnp.maximum(a[:, None, :2], b[:, :2])
        high = jnp.minimum((a[:, :2] + a[:, 2:])[:, None], b[:, :2] + b[:, 2:])
        shared = jnp.prod(jnp.clip(high - low, 0), -1)
        return shared / (jnp.prod(a[:, None, 2:], -1) + jnp.prod(b[:, 2:], -1) - shared + 1e-6)

    def of_image(boxes: jax.Array, logits: jax.Array, targets: jax.Array, labels: jax.Array) -> jax.Array:
        best = jnp.argmax(lax.stop_gradient(overlap(boxes, targets)), 0)
        target = jnp.zeros(logits.shape[0], jnp.int32).at[best].set(labels)
        _, certain = lax.top_k(jax.nn.softmax(logits)[:, 1], 8)
        near = jnp.abs(boxes[best] - targets).mean() + 0.01 * jnp.abs(boxes[certain]).mean()
        return cross_entropy(logits, target) + near

    def loss(p: Any, x: jax.Array, wanted: jax.Array, labels: jax.Array) -> jax.Array:
        h = jax.nn.relu(lax.conv_general_dilated(x, p["first"], (2, 2), "SAME", dimension_numbers=IMAGES))
        h = lax.reduce_window(h, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")
        h = jax.nn.relu(lax.conv_general_dilated(h, p["second"], (1, 1), "SAME", dimension_numbers=IMAGES))
        h = h.reshape(x.shape[0], -1, 64)
        return jax.vmap(of_image)(jax.nn.sigmoid(h @ p["box"]), h @ p["label"], wanted, labels).mean()

    wanted = np.random.default_rng(0).random((16, 5, 4)).astype(np.float32)
    return make_train_step(loss, params, normal(16, 32, 32, 3), wanted, integers(1, 8, 16, 5))


NETWORKS = {
    each.__name__.replace("_", "-"): each
    for each in (
        ctc, states_and_filters, rotations, codebook, windows, pairs, attention_in_blocks, adapters, two_towers,
        ragged_experts, boxes,
    )
}  # fmt: skip
