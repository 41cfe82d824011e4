"""Llama with optimizers and gradients of other kinds than the suite's, low-rank adapters, and decoding."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from workloads.cases import Case, Leaf, stacked, training_case
from workloads.hooks import constrain
from workloads.models import layers as nn
from workloads.unseen.blocks import (
    VOCABULARY,
    Params,
    attention_leaves,
    block,
    gated,
    gated_leaves,
    half_precision,
    rotated,
    token_data,
    weight,
)


def tied_llama(
    devices: int, layers: int = 4, width: int = 2048, optimizer: str = "lion", parts: int = 1, length: int = 2048
) -> Case:
    """Llama with a tied table, grouped queries and no remat. optimizer: "lion", "adafactor" or "adamw".

    parts: micro-batches that the step adds gradients over in a scan.
    """
    heads, kv_heads = width // 128, 4
    chosen = {
        "lion": partial(optax.lion, 1e-4, weight_decay=0.1),
        "adafactor": partial(optax.adafactor, 1e-3),
        "adamw": partial(optax.adamw, 1e-4),
    }[optimizer]()
    params = {
        "embedding": weight(VOCABULARY, width, "vocabulary", "embed"),
        "layers": stacked(attention_leaves(width, kv_heads * 128) | gated_leaves(width, 5632), layers),
        "norm": Leaf((width,), ("embed",)),
    }

    def loss(params: Params, batch: Params) -> jax.Array:
        table = params["embedding"].astype(jnp.bfloat16)
        x = nn.residual(table[batch["inputs"]])

        def one(x: jax.Array, p: Params) -> tuple[jax.Array, None]:
            return block(half_precision(p), x, heads, kv_heads), None

        x, _ = jax.lax.scan(one, x, params["layers"])
        return nn.cross_entropy(nn.rms_norm(params["norm"], x) @ table.T, batch["labels"])

    data = token_data(devices * parts, length)
    if optimizer == "adafactor":
        return _adafactor_case(loss, params, data, chosen)
    if parts == 1:
        return training_case(loss, params, data, chosen)
    whole = training_case(loss, params, data, chosen)

    def train_step(params: Params, opt_state: Params, batch: Params) -> Any:
        pieces = jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), batch)
        zeros = jax.tree.map(jnp.zeros_like, params)

        def add(total: Any, piece: Params) -> Any:
            value, gradients = jax.value_and_grad(loss)(params, piece)
            return jax.tree.map(jnp.add, total, (value, gradients)), None

        (value, gradients), _ = jax.lax.scan(add, (jnp.float32(0), zeros), pieces)
        gradients = jax.tree.map(lambda g: g / parts, gradients)
        norm = optax.global_norm(gradients)
        gradients = jax.tree.map(lambda g: g * jnp.minimum(1.0, 1.0 / (norm + 1e-6)), gradients)
        updates, opt_state = chosen.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value / parts

    return Case(step=train_step, params=whole.params, opt_state=whole.opt_state, batch=data)


def _plain(tree: Params) -> Params:
    """Avals as leaves whose dimensions have no names."""
    return jax.tree.map(lambda aval: Leaf(aval.shape, (None,) * aval.ndim, aval.dtype), tree)


def _adafactor_case(loss: Any, params: Params, data: Params, optimizer: Any) -> Case:
    case = Case(step=loss, params=params, opt_state={}, batch=data)
    state = _plain(jax.eval_shape(optimizer.init, case.avals[0]))

    def train_step(params: Params, opt_state: Params, batch: Params) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return Case(step=train_step, params=params, opt_state=state, batch=data)


def lora(devices: int, layers: int = 8, width: int = 4096, rank: int = 16, length: int = 1024) -> Case:
    """Low-rank adapters (Hu et al., 2021) of a frozen Llama 7B in bfloat16, layers in a scan with remat."""
    heads = width // 128
    base = {
        "embedding": weight(VOCABULARY, width, "vocabulary", "embed", dtype=jnp.bfloat16),
        "layers": stacked(
            attention_leaves(width, width, jnp.bfloat16) | gated_leaves(width, 11008, jnp.bfloat16), layers
        ),
        "norm": Leaf((width,), ("embed",)),
        "head": weight(width, VOCABULARY, "embed", "vocabulary", dtype=jnp.bfloat16),
    }
    one = {
        name: {"down": weight(width, rank, "embed", None), "up": weight(rank, width, None, "heads")}
        for name in ("query", "value")
    }
    adapters = stacked(one, layers)

    def loss(adapters: Params, base: Params, batch: Params) -> jax.Array:
        x = nn.residual(base["embedding"][batch["inputs"]])

        @jax.checkpoint
        def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
            p, a = weights
            a = jax.tree.map(lambda leaf: leaf.astype(x.dtype), a)
            # x (W + A B) = x W + (x A) B, the second as LoRA computes it
            y = nn.rms_norm(p["attention_norm"], x)
            q = y @ p["query"] + (y @ a["query"]["down"]) @ a["query"]["up"]
            v = y @ p["value"] + (y @ a["value"]["down"]) @ a["value"]["up"]
            q, k, v = (
                constrain(nn.split_heads(part, heads), "batch", "length", "heads", None)
                for part in (q, y @ p["key"], v)
            )
            positions = jnp.arange(x.shape[1])
            mixed = nn.merge_heads(nn.attend(rotated(q, positions), rotated(k, positions), v, causal=True))
            x = nn.residual(x + mixed @ p["output"])
            return nn.residual(x + gated(p, nn.rms_norm(p["mlp_norm"], x))), None

        x, _ = jax.lax.scan(layer, x, (base["layers"], adapters))
        return nn.cross_entropy(nn.rms_norm(base["norm"], x) @ base["head"], batch["labels"])

    trained = training_case(lambda p, b: jnp.float32(0), adapters, {})
    optimizer = optax.adamw(1e-4)

    def train_step(params: Params, opt_state: Params, batch: Params) -> Any:
        value, gradients = jax.value_and_grad(loss)(params["adapters"], params["base"], batch)
        updates, opt_state = optimizer.update(gradients, opt_state, params["adapters"])
        return {**params, "adapters": optax.apply_updates(params["adapters"], updates)}, opt_state, value

    return Case(
        step=train_step,
        params={"adapters": adapters, "base": base},
        opt_state=trained.opt_state,
        batch=token_data(devices * 2, length),
    )


def decode(devices: int, layers: int = 8, width: int = 4096, context: int = 4096, sequences: int = 4) -> Case:
    """One token for each of a batch of sequences, with a cache of keys and values that the step updates in place."""
    heads, kv_heads, size = width // 128, 8, 128
    params = {
        "embedding": weight(VOCABULARY, width, "vocabulary", "embed", dtype=jnp.bfloat16),
        "layers": stacked(
            attention_leaves(width, kv_heads * size, jnp.bfloat16) | gated_leaves(width, 14336, jnp.bfloat16), layers
        ),
        "norm": Leaf((width,), ("embed",)),
        "head": weight(width, VOCABULARY, "embed", "vocabulary", dtype=jnp.bfloat16),
    }
    batch = devices * sequences
    entry = Leaf((layers, batch, context, kv_heads, size), ("layers", "batch", None, "kv_heads", None), jnp.bfloat16)

    def step(params: Params, cache: Params, batch: Params) -> Any:
        position = batch["position"]
        x = constrain(params["embedding"][batch["token"]], "batch", None)

        def layer(x: jax.Array, weights: Any) -> Any:
            p, keys, values = weights
            y = nn.rms_norm(p["attention_norm"], x)[:, None]
            q = constrain(nn.split_heads(y @ p["query"], heads), "batch", None, "heads", None)
            k, v = (
                constrain(nn.split_heads(y @ p[n], kv_heads), "batch", None, "kv_heads", None) for n in ("key", "value")
            )
            q, k = rotated(q, position[None]), rotated(k, position[None])
            keys = jax.lax.dynamic_update_slice(keys, k, (0, position, 0, 0))
            values = jax.lax.dynamic_update_slice(values, v, (0, position, 0, 0))
            q = q.reshape(q.shape[0], kv_heads, heads // kv_heads, size)
            scores = jnp.einsum("bhgd,bkhd->bhgk", q, keys).astype(jnp.float32) * size**-0.5
            scores = jnp.where(jnp.arange(context) <= position, scores, -1e9)
            mixed = jnp.einsum("bhgk,bkhd->bhgd", jax.nn.softmax(scores, -1).astype(x.dtype), values)
            x = x + mixed.reshape(x.shape) @ p["output"]
            y = nn.rms_norm(p["mlp_norm"], x)
            return x + constrain(jax.nn.silu(y @ p["gate"]) * (y @ p["up"]), "batch", "mlp") @ p["down"], (keys, values)

        x, (keys, values) = jax.lax.scan(layer, x, (params["layers"], cache["keys"], cache["values"]))
        logits = nn.rms_norm(params["norm"], x) @ params["head"]
        return params, {"keys": keys, "values": values}, jnp.argmax(logits, -1)

    data = {"token": Leaf((batch,), ("batch",), jnp.int32), "position": Leaf((), (), jnp.int32)}
    return Case(step=step, params=params, opt_state={"keys": entry, "values": entry}, batch=data)
