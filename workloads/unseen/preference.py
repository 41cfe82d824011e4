"""A step of two models: policy and frozen reference."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from workloads.cases import Case, Leaf, training_case
from workloads.hooks import constrain
from workloads.models import layers as nn
from workloads.unseen.blocks import (
    VOCABULARY,
    Params,
    attention_leaves,
    block,
    gated_leaves,
    half_precision,
    weight,
)


def preference(devices: int, layers: int = 2, width: int = 2048, length: int = 1024) -> Case:
    """Proximal policy optimization of a language model: policy with a value head, a frozen reference for the KL
    penalty, advantages by a reverse scan over time (GAE), clipped ratios (Schulman et al., 2017)."""
    heads, kv_heads, hidden = width // 128, 8, 4 * width

    def model() -> Params:
        layer = attention_leaves(width, kv_heads * 128) | gated_leaves(width, hidden)
        return {
            "embedding": weight(VOCABULARY, width, "vocabulary", "embed"),
            "layers": [layer] * layers,
            "norm": Leaf((width,), ("embed",)),
            "head": weight(width, VOCABULARY, "embed", "vocabulary"),
        }

    def hiddens(p: Params, tokens: jax.Array) -> jax.Array:
        x = nn.residual(p["embedding"][tokens].astype(jnp.bfloat16))
        for layer in p["layers"]:
            x = block(half_precision(layer), x, heads, kv_heads)
        return nn.rms_norm(p["norm"], x)

    def log_probabilities(p: Params, x: jax.Array, actions: jax.Array) -> jax.Array:
        logits = constrain((x @ p["head"].astype(x.dtype)).astype(jnp.float32), "batch", "length", "vocabulary")
        return -optax.softmax_cross_entropy_with_integer_labels(logits, actions)

    def advantages(values: jax.Array, rewards: jax.Array) -> jax.Array:
        deltas = rewards + 0.99 * jnp.pad(values[:, 1:], ((0, 0), (0, 1))) - values

        def back(carry: jax.Array, delta: jax.Array) -> tuple[jax.Array, jax.Array]:
            carry = delta + 0.99 * 0.95 * carry
            return carry, carry

        return jax.lax.scan(back, jnp.zeros_like(deltas[:, 0]), deltas.T, reverse=True)[1].T

    def loss(policy: Params, reference: Params, batch: Params) -> jax.Array:
        x = hiddens(policy["model"], batch["tokens"])
        log_p = log_probabilities(policy["model"], x, batch["actions"])
        values = (x.astype(jnp.float32) @ policy["value"])[..., 0]
        reference_log_p = log_probabilities(reference, hiddens(reference, batch["tokens"]), batch["actions"])
        rewards = batch["rewards"] - 0.1 * jax.lax.stop_gradient(log_p - reference_log_p)
        gains = advantages(batch["old_values"], rewards)
        ratio = jnp.exp(log_p - batch["old_log_p"])
        scaled = (gains - gains.mean()) / (gains.std() + 1e-8)
        surrogate = jnp.minimum(ratio * scaled, jnp.clip(ratio, 0.8, 1.2) * scaled)
        return -surrogate.mean() + 0.5 * jnp.square(values - batch["old_values"] - gains).mean()

    policy = {"model": model(), "value": weight(width, 1, "embed", None)}
    trained = training_case(lambda p, b: jnp.float32(0), policy, {})
    optimizer = optax.adamw(1e-4, weight_decay=0.01)

    def train_step(params: Params, opt_state: Params, batch: Params) -> Any:
        value, gradients = jax.value_and_grad(loss)(params["policy"], params["reference"], batch)
        updates, opt_state = optimizer.update(gradients, opt_state, params["policy"])
        return {**params, "policy": optax.apply_updates(params["policy"], updates)}, opt_state, value

    batch = devices
    axes = ("batch", "length")
    data = {name: Leaf((batch, length), axes) for name in ("rewards", "old_values", "old_log_p")}
    data |= {name: Leaf((batch, length), axes, jnp.int32) for name in ("tokens", "actions")}
    return Case(
        step=train_step, params={"policy": policy, "reference": model()}, opt_state=trained.opt_state, batch=data
    )
