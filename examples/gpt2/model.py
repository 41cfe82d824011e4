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
    """Sizes of the model and of its batch; `width` must be a multiple of `heads`.

    dtype: of the activations; parameters are float32.
    scan: layers in a `lax.scan` with rematerialized activations: size of the program and activations do not grow with
        the layers; else unrolled.
    """

    vocabulary: int = 256
    context: int = 128
    layers: int = 4
    heads: int = 4
    width: int = 128
    batch: int = 16
    dtype: str = "float32"
    scan: bool = False

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of {self.heads} heads")

    @property
    def hidden(self) -> int:
        return 4 * self.width


def _make_preset(layers: int, width: int, heads: int, *, batch: int = 512, context: int = 1024) -> Config:
    return Config(
        vocabulary=50257, context=context, layers=layers, heads=heads, width=width, batch=batch, dtype="bfloat16",
        scan=True,
    )  # fmt: skip


#: "tiny" and "small" train anywhere in a minute or two. To 1.5B: GPT-2 (Radford et al., 2019, table 2);
#: from there: GPT-3 (Brown et al., 2020, table 2.1), heads as there, batches of as many tokens.
PRESETS = {
    "tiny": Config(layers=2, heads=2, width=32, context=32),
    "small": Config(),
    "117M": _make_preset(12, 768, 12),
    "345M": _make_preset(24, 1024, 16),
    "762M": _make_preset(36, 1280, 20),
    "1.5B": _make_preset(48, 1600, 25),
    "2.7B": _make_preset(32, 2560, 32, context=2048),
    "6.7B": _make_preset(32, 4096, 32, context=2048, batch=1024),
    "13B": _make_preset(40, 5120, 40, context=2048, batch=1024),
    "175B": _make_preset(96, 12288, 96, context=2048, batch=1536),
}


# ---- parameters -------------------------------------------------------------------


def init_params(config: Config, key: jax.Array) -> Params:
    """Parameters as GPT-2 initializes them: normal(0.02), projections into the residual stream scaled down.

    With `scan`, each parameter of the blocks has a leading dimension of `layers`.
    """
    token_key, position_key, block_key = jax.random.split(key, 3)
    block_keys = jax.random.split(block_key, config.layers)
    if config.scan:
        blocks = jax.vmap(lambda block_key: init_block(config, block_key))(block_keys)
    else:
        blocks = [init_block(config, block_key) for block_key in block_keys]
    return {
        "token_embedding": 0.02 * jax.random.normal(token_key, (config.vocabulary, config.width)),
        "position_embedding": 0.01 * jax.random.normal(position_key, (config.context, config.width)),
        "blocks": blocks,
        "final_norm": init_norm(config.width),
    }


def init_block(config: Any, key: jax.Array) -> Params:
    """Parameters of one block; config: its `width`, `hidden` units of the MLP, and number of `layers`."""
    width, hidden = config.width, config.hidden
    keys = jax.random.split(key, 4)
    residual_std = 0.02 / (2 * config.layers) ** 0.5
    return {
        "attention_norm": init_norm(width),
        "attention": {
            "qkv": init_linear(keys[0], width, 3 * width),
            "output": init_linear(keys[1], width, width, residual_std),
        },
        "mlp_norm": init_norm(width),
        "mlp": {"up": init_linear(keys[2], width, hidden), "down": init_linear(keys[3], hidden, width, residual_std)},
    }


def init_linear(key: jax.Array, inputs: int, outputs: int, std: float = 0.02) -> Params:
    return {"weight": std * jax.random.normal(key, (inputs, outputs)), "bias": jnp.zeros(outputs)}


def init_norm(width: int) -> Params:
    return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}


# ---- layers -----------------------------------------------------------------------


def linear(p: Params, x: jax.Array) -> jax.Array:
    return x @ p["weight"].astype(x.dtype) + p["bias"].astype(x.dtype)


def norm(p: Params, x: jax.Array) -> jax.Array:
    """Layer norm over the last dimension, in float32."""
    y = x.astype(jnp.float32)
    mean = y.mean(-1, keepdims=True)
    variance = jnp.square(y - mean).mean(-1, keepdims=True)
    return (p["scale"] * (y - mean) * jax.lax.rsqrt(variance + 1e-5) + p["bias"]).astype(x.dtype)


def attention(p: Params, x: jax.Array, heads: int) -> jax.Array:
    """Causal self-attention, [batch, time, width] to the same; softmax in float32."""
    batch, time, width = x.shape
    q, k, v = jnp.split(linear(p["qkv"], x), 3, axis=-1)
    q, k, v = (t.reshape(batch, time, heads, width // heads) for t in (q, k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) / (width // heads) ** 0.5
    causal = jnp.tril(jnp.ones((time, time), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e9), axis=-1).astype(x.dtype)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(batch, time, width)
    return linear(p["output"], mixed)


def mlp(p: Params, x: jax.Array) -> jax.Array:
    return linear(p["down"], jax.nn.gelu(linear(p["up"], x)))


def apply_block(p: Params, x: jax.Array, config: Config) -> jax.Array:
    x = x + attention(p["attention"], norm(p["attention_norm"], x), config.heads)
    return x + mlp(p["mlp"], norm(p["mlp_norm"], x))


# ---- the model --------------------------------------------------------------------


def logits_of(params: Params, tokens: jax.Array, config: Config) -> jax.Array:
    """Next-token logits [batch, time, vocabulary] of tokens [batch, time]; the embedding is tied."""
    x = params["token_embedding"][tokens] + params["position_embedding"][: tokens.shape[1]]
    x = x.astype(config.dtype)
    if config.scan:
        block = jax.checkpoint(lambda x, p: (apply_block(p, x, config), None))
        x, _ = jax.lax.scan(block, x, params["blocks"])
    else:
        for p in params["blocks"]:
            x = apply_block(p, x, config)
    return norm(params["final_norm"], x) @ params["token_embedding"].T.astype(x.dtype)


def loss_of(params: Params, tokens: jax.Array, config: Config) -> jax.Array:
    """Mean cross entropy in nats of predicting tokens[:, 1:] from tokens[:, :-1]."""
    logits = logits_of(params, tokens[:, :-1], config).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def make_steps(config: Config, optimizer: optax.GradientTransformation) -> tuple[Any, Any, Any]:
    """(init, train_step, eval_step), ready for `jax.jit` on one device."""

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


def batch_types(config: Config) -> tuple[jax.ShapeDtypeStruct]:
    """Types of a batch of `train_step`: tokens [batch, context + 1], inputs and shifted targets."""
    return (jax.ShapeDtypeStruct((config.batch, config.context + 1), "int32"),)
