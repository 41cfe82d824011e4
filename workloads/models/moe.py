"""GPT with a mixture of experts in every other layer: top-2 gates, capacity, dispatch by einsum (GShard, 2020)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from workloads.cases import Case, Leaf, training_case
from workloads.hooks import constrain
from workloads.models import layers as nn


@dataclass(frozen=True, kw_only=True)
class Config:
    experts: int
    layers: int = 12
    width: int = 1024
    heads: int = 16
    vocabulary: int = 32000
    context: int = 1024
    batch_per_device: int = 1
    capacity_factor: float = 2.0

    @property
    def capacity(self) -> int:
        """Tokens of one sequence that one expert takes."""
        return int(self.context * self.capacity_factor / self.experts)


SIZES = {"8e": Config(experts=8), "64e": Config(experts=64)}


def build(size: str, devices: int, optimizer: optax.GradientTransformation | None = None, **changes: Any) -> Case:
    """A step on `devices` devices' batch; optimizer: AdamW by default; changes: any field of Config."""
    config = replace(SIZES[size], **changes)
    batch = config.batch_per_device * devices
    data = {"inputs": nn.tokens(batch, config.context), "labels": nn.tokens(batch, config.context)}

    def loss(params: nn.Params, batch: nn.Params) -> jax.Array:
        logits, balance = logits_of(params, batch["inputs"], config)
        return nn.cross_entropy(logits, batch["labels"]) + 0.01 * balance

    return training_case(loss, parameters(config), data, optimizer)


def parameters(config: Config) -> nn.Params:
    width, hidden = config.width, 4 * config.width
    mixture = {
        "gate": Leaf((width, config.experts), ("embed", None)),
        "up": Leaf((config.experts, width, hidden), ("experts", "embed", "mlp")),
        "down": Leaf((config.experts, hidden, width), ("experts", "mlp", "embed")),
    }
    return {
        "token_embedding": Leaf((config.vocabulary, width), ("vocabulary", "embed")),
        "position_embedding": Leaf((config.context, width), (None, "embed")),
        "blocks": [
            {
                "attention_norm": nn.norm_params(width),
                "attention": nn.attention_params(width, width),
                "mlp_norm": nn.norm_params(width),
                "mlp": mixture if number % 2 else nn.mlp_params(width, hidden),
            }
            for number in range(config.layers)
        ],
        "final_norm": nn.norm_params(width),
    }


def logits_of(params: nn.Params, tokens: jax.Array, config: Config) -> tuple[jax.Array, jax.Array]:
    """(next-token logits [batch, length, vocabulary], sum of the layers' balance losses)."""
    x = nn.residual(params["token_embedding"][tokens] + params["position_embedding"][: tokens.shape[1]])
    balance = jnp.float32(0)
    for number, block in enumerate(params["blocks"]):
        x = nn.residual(
            x + nn.attention(block["attention"], nn.layer_norm(block["attention_norm"], x), config.heads, causal=True)
        )
        y = nn.layer_norm(block["mlp_norm"], x)
        if number % 2:
            y, extra = _mixture(block["mlp"], y, config)
            balance = balance + extra
        else:
            y = nn.mlp(block["mlp"], y)
        x = nn.residual(x + y)
    return nn.layer_norm(params["final_norm"], x) @ params["token_embedding"].T, balance


def _mixture(p: nn.Params, x: jax.Array, config: Config) -> tuple[jax.Array, jax.Array]:
    """Two experts for each token of x [batch, length, width], and the balance loss."""
    gates = jax.nn.softmax((x @ p["gate"]).astype(jnp.float32), axis=-1)
    combine, balance = _top_two(gates, config)
    dispatch = (combine > 0).astype(x.dtype)
    inputs = jnp.einsum("blec,bld->ebcd", dispatch, x)
    inputs = constrain(inputs, None, "batch", None, None)  # then to the experts: an all-to-all
    inputs = constrain(inputs, "experts", "expert_batch", None, None)
    hidden = constrain(
        jax.nn.gelu(jnp.einsum("ebcd,edh->ebch", inputs, p["up"])), "experts", "expert_batch", None, "mlp"
    )
    outputs = constrain(jnp.einsum("ebch,ehd->ebcd", hidden, p["down"]), "experts", "expert_batch", None, None)
    outputs = constrain(outputs, None, "batch", None, None)
    return jnp.einsum("blec,ebcd->bld", combine.astype(x.dtype), outputs), balance


def _top_two(gates: jax.Array, config: Config) -> tuple[jax.Array, jax.Array]:
    """Weights [batch, length, experts, capacity] of each token's two experts, and the balance loss."""
    experts = config.experts
    first = jax.nn.one_hot(jnp.argmax(gates, axis=-1), experts)
    rest = gates * (1 - first)
    second = jax.nn.one_hot(jnp.argmax(rest, axis=-1), experts)
    balance = experts * jnp.mean(first.mean(1) * gates.mean(1))
    first_place = (jnp.cumsum(first, axis=1) - 1) * first
    taken = first.sum(1, keepdims=True)
    second_place = (jnp.cumsum(second, axis=1) - 1 + taken) * second
    total = (gates * (first + second)).sum(-1, keepdims=True) + 1e-9
    parts = []
    for mask, place in ((first, first_place), (second, second_place)):
        result = mask * (place < config.capacity)
        slots = jax.nn.one_hot(place.sum(-1).astype(jnp.int32), config.capacity)
        weight = (gates / total * result).sum(-1)
        parts.append(weight[..., None, None] * result[..., None] * slots[:, :, None])
    return parts[0] + parts[1], balance
