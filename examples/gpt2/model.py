"""GPT-2 in plain JAX: pure functions over a pytree of parameters, written for one device.

Nothing here knows about Shardwright, meshes or shardings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

Params = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of the model; `width` must be a multiple of `heads`."""

    vocabulary: int = 256
    context: int = 128
    layers: int = 4
    heads: int = 4
    width: int = 128

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of {self.heads} heads")


def init_params(config: Config, key: jax.Array) -> Params:
    """Parameters as GPT-2 initializes them: normal(0.02), projections into the residual stream scaled down."""
    width, hidden = config.width, 4 * config.width
    keys = iter(jax.random.split(key, 2 + 4 * config.layers))
    residual_std = 0.02 / (2 * config.layers) ** 0.5

    def linear(inputs: int, outputs: int, std: float = 0.02) -> Params:
        weight = std * jax.random.normal(next(keys), (inputs, outputs))
        return {"weight": weight, "bias": jnp.zeros(outputs)}

    def norm() -> Params:
        return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}

    def block() -> Params:
        return {
            "attention_norm": norm(),
            "attention": {"qkv": linear(width, 3 * width), "output": linear(width, width, residual_std)},
            "mlp_norm": norm(),
            "mlp": {"up": linear(width, hidden), "down": linear(hidden, width, residual_std)},
        }

    return {
        "token_embedding": 0.02 * jax.random.normal(next(keys), (config.vocabulary, width)),
        "position_embedding": 0.01 * jax.random.normal(next(keys), (config.context, width)),
        "blocks": [block() for _ in range(config.layers)],
        "final_norm": norm(),
    }


def apply_linear(p: Params, x: jax.Array) -> jax.Array:
    return x @ p["weight"] + p["bias"]


def apply_norm(p: Params, x: jax.Array) -> jax.Array:
    mean = x.mean(-1, keepdims=True)
    variance = jnp.square(x - mean).mean(-1, keepdims=True)
    return p["scale"] * (x - mean) * jax.lax.rsqrt(variance + 1e-5) + p["bias"]


def attention(p: Params, x: jax.Array, heads: int) -> jax.Array:
    """Causal self-attention, [batch, time, width] to the same."""
    batch, time, width = x.shape
    q, k, v = jnp.split(apply_linear(p["qkv"], x), 3, axis=-1)
    q, k, v = (t.reshape(batch, time, heads, width // heads) for t in (q, k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (width // heads) ** 0.5
    causal = jnp.tril(jnp.ones((time, time), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e9), axis=-1)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(batch, time, width)
    return apply_linear(p["output"], mixed)


def logits_of(params: Params, tokens: jax.Array, config: Config) -> jax.Array:
    """Next-token logits [batch, time, vocabulary] of tokens [batch, time]; the embedding is tied."""
    x = params["token_embedding"][tokens] + params["position_embedding"][: tokens.shape[1]]
    for block in params["blocks"]:
        x = x + attention(block["attention"], apply_norm(block["attention_norm"], x), config.heads)
        hidden = jax.nn.gelu(apply_linear(block["mlp"]["up"], apply_norm(block["mlp_norm"], x)))
        x = x + apply_linear(block["mlp"]["down"], hidden)
    return apply_norm(params["final_norm"], x) @ params["token_embedding"].T


def loss_of(params: Params, tokens: jax.Array, config: Config) -> jax.Array:
    """Mean cross entropy in nats of predicting tokens[:, 1:] from tokens[:, :-1]."""
    logits = logits_of(params, tokens[:, :-1], config)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def make_steps(config: Config, optimizer: optax.GradientTransformation) -> tuple[Any, Any, Any]:
    """(init, train_step, eval_step): what a training loop on one device would hand to `jax.jit`."""

    def init(key: jax.Array) -> tuple[Params, Any]:
        params = init_params(config, key)
        return params, optimizer.init(params)

    def train_step(params: Params, opt_state: Any, tokens: jax.Array) -> tuple[Params, Any, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(params, tokens, config)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    def eval_step(params: Params, tokens: jax.Array) -> jax.Array:
        return loss_of(params, tokens, config)

    return init, train_step, eval_step
