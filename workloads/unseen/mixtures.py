"""A mixture of experts that sends tokens by scatter, and a selective state space model: layers in scans with remat."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from workloads.cases import Case, Leaf, stacked, training_case
from workloads.hooks import constrain
from workloads.models import layers as nn
from workloads.unseen.blocks import (
    VOCABULARY,
    Params,
    attention_leaves,
    grouped_attention,
    half_precision,
    token_data,
    weight,
)


def mixtral(
    devices: int, layers: int = 4, width: int = 2048, hidden: int = 7168, experts: int = 8, length: int = 2048
) -> Case:
    """Mixtral (Jiang et al., 2024), half as wide: layers in a scan with remat, top-2 by `top_k`, tokens to experts by
    scatter, capacity 1.25, bfloat16 over float32."""
    heads, kv_heads, capacity = width // 128, 8, 2 * length * 5 // (4 * experts)
    layer = attention_leaves(width, kv_heads * 128) | {
        "router": weight(width, experts, "embed", None),
        "gate": Leaf((experts, width, hidden), ("experts", "embed", "mlp")),
        "up": Leaf((experts, width, hidden), ("experts", "embed", "mlp")),
        "down": Leaf((experts, hidden, width), ("experts", "mlp", "embed")),
    }
    params = {
        "embedding": weight(VOCABULARY, width, "vocabulary", "embed"),
        "layers": stacked(layer, layers),
        "norm": Leaf((width,), ("embed",)),
        "head": weight(width, VOCABULARY, "embed", "vocabulary"),
    }

    def mixture(p: Params, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = (x @ p["router"]).astype(jnp.float32)
        weights, chosen = jax.lax.top_k(jax.nn.softmax(logits), 2)  # [batch, length, 2]
        weights = weights / weights.sum(-1, keepdims=True)
        choices = jax.nn.one_hot(chosen.reshape(x.shape[0], -1), experts, dtype=jnp.int32)
        place = ((jnp.cumsum(choices, 1) - 1) * choices).sum(-1)
        result = place < capacity
        slot = jnp.where(result, chosen.reshape(place.shape) * capacity + place, experts * capacity)

        def send(tokens: jax.Array, slots: jax.Array) -> jax.Array:
            return jnp.zeros((experts * capacity, width), x.dtype).at[slots].set(jnp.repeat(tokens, 2, 0), mode="drop")

        inputs = jax.vmap(send)(x, slot).reshape(-1, experts, capacity, width)
        inputs = constrain(inputs, "batch", None, None, None)
        inputs = constrain(inputs, "expert_batch", "experts", None, None)
        hiddens = jax.nn.silu(jnp.einsum("becd,edh->bech", inputs, p["gate"]))
        hiddens = constrain(
            hiddens * jnp.einsum("becd,edh->bech", inputs, p["up"]), "expert_batch", "experts", None, "mlp"
        )
        outputs = constrain(jnp.einsum("bech,ehd->becd", hiddens, p["down"]), "expert_batch", "experts", None, None)
        outputs = constrain(outputs, "batch", None, None, None).reshape(-1, experts * capacity, width)
        back = jax.vmap(lambda rows, slots: rows.at[slots].get(mode="fill", fill_value=0))(outputs, slot)
        back = back.reshape(*x.shape[:2], 2, width)
        share = jax.nn.one_hot(chosen, experts).mean((0, 1, 2))
        balance = experts * (share * jax.nn.softmax(logits).mean((0, 1))).sum()
        return jnp.einsum("blk,blkd->bld", weights.astype(x.dtype), back), balance

    def loss(params: Params, batch: Params) -> jax.Array:
        x = nn.residual(params["embedding"][batch["inputs"]].astype(jnp.bfloat16))

        @jax.checkpoint
        def one(x: jax.Array, p: Params) -> tuple[jax.Array, jax.Array]:
            p = half_precision(p)
            x = nn.residual(x + grouped_attention(p, nn.rms_norm(p["attention_norm"], x), heads, kv_heads))
            y, balance = mixture(p, nn.rms_norm(p["mlp_norm"], x))
            return nn.residual(x + y), balance

        x, balance = jax.lax.scan(one, x, params["layers"])
        logits = nn.rms_norm(params["norm"], x) @ params["head"].astype(jnp.bfloat16)
        return nn.cross_entropy(logits, batch["labels"]) + 0.01 * balance.mean()

    return training_case(loss, params, token_data(devices, length))


def mamba(devices: int, layers: int = 4, width: int = 1024, state: int = 16, length: int = 1024) -> Case:
    """Selective state spaces (Gu and Dao, 2023), the recurrence a scan over time; layers in a scan with remat."""
    inner, rank, taps = 2 * width, width // 16, 4
    layer = {
        "norm": Leaf((width,), ("embed",)),
        "into": weight(width, inner, "embed", "mlp"),
        "gate": weight(width, inner, "embed", "mlp"),
        "taps": Leaf((taps, 1, inner), (None, None, "mlp")),
        "low": weight(inner, rank, "mlp", None),
        "delta": weight(rank, inner, None, "mlp"),
        "input": weight(inner, state, "mlp", None),
        "readout": weight(inner, state, "mlp", None),
        "decay": Leaf((inner, state), ("mlp", None)),
        "skip": Leaf((inner,), ("mlp",)),
        "out": weight(inner, width, "mlp", "embed"),
    }
    params = {
        "embedding": weight(VOCABULARY, width, "vocabulary", "embed"),
        "layers": stacked(layer, layers),
        "norm": Leaf((width,), ("embed",)),
    }

    def mixer(p: Params, x: jax.Array) -> jax.Array:
        hidden = constrain(x @ p["into"], "batch", None, "mlp")
        hidden = jax.lax.conv_general_dilated(
            hidden, p["taps"].astype(x.dtype), (1,), [(taps - 1, 0)],
            dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=inner,
        )  # fmt: skip
        hidden = jax.nn.silu(hidden)
        delta = jax.nn.softplus((hidden @ p["low"]) @ p["delta"]).astype(jnp.float32)
        into, readout = (hidden @ p["input"]).astype(jnp.float32), (hidden @ p["readout"]).astype(jnp.float32)
        rates = -jnp.exp(p["decay"])

        def one(h: jax.Array, now: Any) -> tuple[jax.Array, jax.Array]:
            d, u, b, c = now
            h = jnp.exp(d[..., None] * rates) * h + (d * u)[..., None] * b[:, None]
            return h, (h * c[:, None]).sum(-1)

        steps = jax.tree.map(lambda a: jnp.swapaxes(a, 0, 1), (delta, hidden.astype(jnp.float32), into, readout))
        start = constrain(jnp.zeros((x.shape[0], inner, state)), "batch", "mlp", None)
        _, mixed = jax.lax.scan(one, start, steps)
        mixed = (jnp.swapaxes(mixed, 0, 1) + hidden * p["skip"]).astype(x.dtype)
        return (mixed * jax.nn.silu(constrain(x @ p["gate"], "batch", None, "mlp"))) @ p["out"]

    def loss(params: Params, batch: Params) -> jax.Array:
        x = nn.residual(params["embedding"][batch["inputs"]].astype(jnp.bfloat16))

        @jax.checkpoint
        def one(x: jax.Array, p: Params) -> tuple[jax.Array, None]:
            half = {
                name: leaf.astype(jnp.bfloat16) if name not in ("decay", "norm") else leaf for name, leaf in p.items()
            }
            return nn.residual(x + mixer(half, nn.rms_norm(p["norm"], x))), None

        x, _ = jax.lax.scan(one, x, params["layers"])
        logits = nn.rms_norm(params["norm"], x) @ params["embedding"].T.astype(jnp.bfloat16)
        return nn.cross_entropy(logits, batch["labels"])

    return training_case(loss, params, token_data(2 * devices, length))
