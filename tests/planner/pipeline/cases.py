"""Training steps whose layers carry the number of their chunk: `jax.named_scope("chunk2")`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardwright as sw
from shardwright.hlo import Module

#: (step, arguments, donated argument numbers).
Case = tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]


def chunk_of(module: Module) -> dict[str, int]:
    """Chunks by instruction, from the scopes."""
    entries = {}
    for instruction in module.entry:
        scopes = re.findall(r"chunk(\d+)", instruction.op_name)
        if scopes:
            entries[instruction.name] = int(scopes[-1])
    return entries


def normal(seed: int, *shape: int, scale: float = 0.3) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float32)


def training(loss: Callable[..., Any], params: Any, *batch: Any, optimizer: Any = None) -> Case:
    optimizer = optimizer or optax.sgd(0.1, momentum=0.9)

    def step(params: Any, state: Any, *batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, *batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return step, (params, optimizer.init(params), *batch), (0, 1)


def mlp(chunks: int = 2, batch: int = 16, width: int = 8, optimizer: Any = None) -> Case:
    params = [{"w": normal(i, width, 2 * width), "v": normal(i + 50, 2 * width, width)} for i in range(chunks)]

    def loss(p: Any, x: Any, y: Any) -> Any:
        for i in range(chunks):
            with jax.named_scope(f"chunk{i}"):
                x = sw.annotate(x, {0: "data"})
                x = x + jnp.tanh(x @ p[i]["w"]) @ p[i]["v"]
        with jax.named_scope(f"chunk{chunks - 1}"):
            return jnp.mean((x - y) ** 2)

    return training(
        loss, params, normal(100, batch, width, scale=1.0), normal(101, batch, width, scale=1.0), optimizer=optimizer
    )


def normed(p: Any, x: Any) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * p["g"] + p["b"]


def _norm(width: int) -> dict[str, np.ndarray]:
    return {"g": np.ones(width, np.float32), "b": np.zeros(width, np.float32)}


def gpt2(
    chunks: int = 2, layers: int = 2, width: int = 16, heads: int = 2, vocabulary: int = 32, length: int = 8,
    batch: int = 8, dropout: float = 0.0, optimizer: Any = None,
) -> Case:  # fmt: skip
    """Decoder with a tied embedding: the first chunk looks it up, the last one multiplies by it."""
    params: dict[str, Any] = {"wte": normal(1, vocabulary, width), "wpe": normal(2, length, width), "ln": _norm(width)}
    for i in range(layers):
        params[f"h{i}"] = {
            "ln1": _norm(width), "ln2": _norm(width), "o": normal(9 * i + 6, width, width),
            **{name: normal(9 * i + 3 + n, width, width) for n, name in enumerate("qkv")},
            "fc": normal(9 * i + 7, width, 4 * width), "out": normal(9 * i + 8, 4 * width, width),
        }  # fmt: skip

    def dropped(key: Any, x: Any) -> Any:
        if not dropout:
            return x
        return jnp.where(jax.random.bernoulli(key, 1 - dropout, x.shape), x / (1 - dropout), 0)

    def block(p: Any, x: Any, key: Any) -> Any:
        y = normed(p["ln1"], x)
        q, k, v = ((y @ p[n]).reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3) for n in "qkv")
        mask = jnp.tril(jnp.ones((length, length), bool))
        scores = jnp.where(mask, q @ k.transpose(0, 1, 3, 2) / (width // heads) ** 0.5, -1e9)
        x = x + dropped(key, (jax.nn.softmax(scores) @ v).transpose(0, 2, 1, 3).reshape(x.shape) @ p["o"])
        return x + jax.nn.gelu(normed(p["ln2"], x) @ p["fc"]) @ p["out"]

    def loss(p: Any, tokens: Any, key: Any) -> Any:
        with jax.named_scope("chunk0"):
            x = sw.annotate(p["wte"][tokens[:, :-1]] + p["wpe"], {0: "data"})
        for i in range(layers):
            with jax.named_scope(f"chunk{i * chunks // layers}"):
                x = sw.annotate(block(p[f"h{i}"], x, jax.random.fold_in(key, i)), {0: "data"})
        with jax.named_scope(f"chunk{chunks - 1}"):
            logits = normed(p["ln"], x) @ p["wte"].T
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    tokens = np.random.default_rng(0).integers(0, vocabulary, (batch, length + 1)).astype(np.int32)
    return training(loss, params, tokens, jax.random.PRNGKey(7), optimizer=optimizer)


def _convolved(x: Any, w: Any, stride: int = 1) -> Any:
    return jax.lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def _group_normed(p: Any, x: Any, groups: int = 2) -> Any:
    y = x.reshape(*x.shape[:3], groups, -1)
    mean, var = y.mean((1, 2, 4), keepdims=True), y.var((1, 2, 4), keepdims=True)
    return ((y - mean) * jax.lax.rsqrt(var + 1e-5)).reshape(x.shape) * p["g"] + p["b"]


def unet(chunks: int = 4, batch: int = 8, channels: int = 4) -> Case:
    """Down and up again: what goes down is added on the way up, chunks apart.

    Images are 4 wide at the bottom: of a single pixel a group norm leaves nothing, and gradients are noise.
    """
    depth = chunks // 2
    size = 4 << (depth - 1)
    params = {
        "in": normal(0, 3, 3, 3, channels), "out": normal(1, 3, 3, channels, 3),
        "down": [{"w": normal(2 + i, 3, 3, channels, channels), "n": _norm(channels)} for i in range(depth)],
        "up": [{"w": normal(20 + i, 3, 3, 2 * channels, channels), "n": _norm(channels)} for i in range(depth)],
    }  # fmt: skip

    def loss(p: Any, x: Any, y: Any) -> Any:
        skips = []
        with jax.named_scope("chunk0"):
            x = _convolved(x, p["in"])
        for i in range(depth):
            with jax.named_scope(f"chunk{i}"):
                x = jax.nn.relu(_group_normed(p["down"][i]["n"], _convolved(x, p["down"][i]["w"])))
                skips.append(x)
                x = x[:, ::2, ::2] if i < depth - 1 else x
        for i in range(depth):
            with jax.named_scope(f"chunk{depth + i}"):
                skip = skips[depth - 1 - i]
                x = jax.image.resize(x, skip.shape, "nearest")
                x = jax.nn.relu(
                    _group_normed(p["up"][i]["n"], _convolved(jnp.concatenate([x, skip], -1), p["up"][i]["w"]))
                )
        with jax.named_scope(f"chunk{chunks - 1}"):
            return jnp.mean((_convolved(x, p["out"]) - y) ** 2)

    images = normal(30, batch, size, size, 3, scale=1.0), normal(31, batch, size, size, 3, scale=1.0)
    return training(loss, params, *images)


def wide_resnet(chunks: int = 2, layers: int = 2, batch: int = 8, size: int = 8, channels: int = 4) -> Case:
    params = {
        "in": normal(0, 3, 3, 3, channels), "head": normal(1, channels, 5),
        "blocks": [
            {"w1": normal(2 + i, 3, 3, channels, channels), "w2": normal(20 + i, 3, 3, channels, channels),
             "n1": _norm(channels), "n2": _norm(channels)}
            for i in range(layers)
        ],
    }  # fmt: skip

    def loss(p: Any, x: Any, labels: Any) -> Any:
        with jax.named_scope("chunk0"):
            x = _convolved(x, p["in"])
        for i, b in enumerate(p["blocks"]):
            with jax.named_scope(f"chunk{i * chunks // layers}"):
                y = _convolved(jax.nn.relu(_group_normed(b["n1"], x)), b["w1"])
                x = sw.annotate(x + _convolved(jax.nn.relu(_group_normed(b["n2"], y)), b["w2"]), {0: "data"})
        with jax.named_scope(f"chunk{chunks - 1}"):
            logits = x.mean((1, 2)) @ p["head"]
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    labels = np.random.default_rng(1).integers(0, 5, batch).astype(np.int32)
    return training(loss, params, normal(30, batch, size, size, 3, scale=1.0), labels)


def moe(chunks: int = 2, layers: int = 2, experts: int = 4, batch: int = 8, length: int = 8, width: int = 8) -> Case:
    """Top-1 experts with a capacity per sequence, and a loss that balances them, added up over the layers."""
    capacity = length // 2
    params = [
        {"gate": normal(i, width, experts), "w": normal(20 + i, experts, width, 2 * width),
         "v": normal(40 + i, experts, 2 * width, width)}
        for i in range(layers)
    ]  # fmt: skip

    def layer(p: Any, x: Any) -> Any:
        gates = jax.nn.softmax(x @ p["gate"])
        chosen = jax.nn.one_hot(jnp.argmax(gates, -1), experts)
        place = jnp.cumsum(chosen, 1) * chosen - 1
        outcome = chosen[..., None] * jax.nn.one_hot(place.astype(jnp.int32), capacity)
        inside = jnp.einsum("bsec,bsd->becd", outcome, x)
        result = jnp.einsum("becf,efd->becd", jax.nn.relu(jnp.einsum("becd,edf->becf", inside, p["w"])), p["v"])
        weight = (gates * chosen).sum(-1, keepdims=True)
        balance = (gates.mean(1) * chosen.mean(1)).sum(-1).mean()
        return x + weight * jnp.einsum("bsec,becd->bsd", outcome, result), balance

    def loss(p: Any, x: Any, y: Any) -> Any:
        balance = 0.0
        for i in range(layers):
            with jax.named_scope(f"chunk{i * chunks // layers}"):
                x, more = layer(p[i], x)
                balance += more
        with jax.named_scope(f"chunk{chunks - 1}"):
            return jnp.mean((x - y) ** 2) + 0.01 * balance

    return training(
        loss, params, normal(60, batch, length, width, scale=1.0), normal(61, batch, length, width, scale=1.0)
    )


def scanned(layers: int = 4, batch: int = 8, width: int = 8) -> Case:
    """Rematerialised layers in a scan; the loop has to be split before its rows can be in two chunks."""
    params = {
        "in": normal(0, width, width), "head": normal(3, width, width),
        "layers": {"w": normal(1, layers, width, 2 * width), "v": normal(2, layers, 2 * width, width)},
    }  # fmt: skip

    def loss(p: Any, x: Any, y: Any) -> Any:
        with jax.named_scope("chunk0"):
            x = x @ p["in"]

        def layer(h: Any, q: Any) -> Any:
            h = sw.annotate(h, {0: "data"})
            return h + jnp.tanh(h @ q["w"]) @ q["v"], None

        x, _ = jax.lax.scan(jax.checkpoint(layer), x, p["layers"])
        with jax.named_scope("chunk1"):
            return jnp.mean((x @ p["head"] - y) ** 2)

    return training(loss, params, normal(5, batch, width), normal(6, batch, width), optimizer=optax.adam(1e-2))


def passed_on(batch: int = 16, width: int = 8) -> Case:
    """Outputs of every kind: updates, the loss, one per example, one of all examples, an argument as it came."""
    params = [normal(i, width, width) for i in range(2)]

    def step(p: Any, x: Any, y: Any, scale: Any) -> Any:
        def loss(p: Any) -> Any:
            h = x
            for i in range(2):
                with jax.named_scope(f"chunk{i}"):
                    h = sw.annotate(jnp.tanh(h @ p[i]), {0: "data"})
            with jax.named_scope("chunk1"):
                return jnp.mean((h - y) ** 2), h

        (value, h), gradients = jax.value_and_grad(loss, has_aux=True)(p)
        updated = jax.tree.map(lambda w, g: w - scale * g, p, gradients)
        return updated, value, h, jnp.sort(h.sum(1)), p[0]

    return step, (params, normal(3, batch, width), normal(4, batch, width), np.float32(0.1)), (0,)


def tied(chunks: int = 2, vocabulary: int = 64, width: int = 8, length: int = 4, batch: int = 8) -> Case:
    """A tied embedding with little between its ends, dropout, and updates that a norm over all gradients scales."""
    params = {"table": normal(1, vocabulary, width), "w": [normal(2 + i, width, width) for i in range(chunks)]}

    def loss(p: Any, tokens: Any, key: Any) -> Any:
        with jax.named_scope("chunk0"):
            x = p["table"][tokens[:, :-1]]
        for i, w in enumerate(p["w"]):
            with jax.named_scope(f"chunk{i}"):
                result = jax.random.bernoulli(jax.random.fold_in(key, i), 0.8, x.shape)
                x = x + jnp.where(result, jnp.tanh(x @ w), 0) / 0.8
        with jax.named_scope(f"chunk{chunks - 1}"):
            return optax.softmax_cross_entropy_with_integer_labels(x @ p["table"].T, tokens[:, 1:]).mean()

    tokens = np.random.default_rng(0).integers(0, vocabulary, (batch, length + 1)).astype(np.int32)
    clipped = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1))
    return training(loss, params, tokens, jax.random.PRNGKey(7), optimizer=clipped)
