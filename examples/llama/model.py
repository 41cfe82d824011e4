"""Llama in plain JAX: grouped query heads, rotary positions, gated MLP, written for one device.

Sizes and layers as in Llama 3 (Grattafiori et al., "The Llama 3 Herd of Models", 2024, arXiv 2407.21783). Attention is
written out; on devices that have a kernel of fused attention the planner puts that in its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from examples.gpt2.model import Params


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of the model and of its batch; each key head serves `heads` / `kv_heads` query heads.

    hidden: units of the gated MLP. dtype: of the activations; parameters are float32.
    scan: layers in a `lax.scan`; else unrolled. remat: `full`, a layer's activations are computed again in the backward
        pass; `dots`, results of products with weights are stored; `none`.
    """

    vocabulary: int = 256
    context: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    width: int = 128
    hidden: int = 344
    batch: int = 16
    rope_base: float = 500_000.0
    dtype: str = "float32"
    scan: bool = False
    remat: str = "full"

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads) or self.heads % self.kv_heads:
            raise ValueError("width must be an even multiple of heads, and heads a multiple of kv_heads")
        if self.remat not in REMAT:
            raise ValueError(f"remat is one of {', '.join(REMAT)}, not {self.remat!r}")

    @property
    def head_width(self) -> int:
        return self.width // self.heads


#: What a layer stores for the backward pass, by name: a policy of `jax.checkpoint`, or no checkpoint.
REMAT = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "none": None,
}


def _make_preset(layers: int, width: int, heads: int, kv_heads: int, hidden: int, **sizes: Any) -> Config:
    return Config(
        layers=layers, width=width, heads=heads, kv_heads=kv_heads, hidden=hidden, dtype="bfloat16", scan=True,
        **{"vocabulary": 128_256, "context": 8192, "batch": 512, **sizes},
    )  # fmt: skip


#: "tiny" and "small" train anywhere in a minute or two. 1.3B: Sheared LLaMA's (Xia et al., 2023) with half the key
#: heads; the others: Llama 3's, table 3, with batches of 4 M tokens, of 405B of 16 M.
PRESETS = {
    "tiny": Config(layers=2, heads=4, width=32, hidden=88, context=32),
    "small": Config(),
    "1.3B": _make_preset(24, 2048, 16, 8, 5504, vocabulary=32_000, context=4096, batch=64),
    "8B": _make_preset(32, 4096, 32, 8, 14_336),
    "70B": _make_preset(80, 8192, 64, 8, 28_672),
    "405B": _make_preset(126, 16_384, 128, 8, 53_248, batch=2048),
}


# ---- parameters -------------------------------------------------------------------


def init_params(config: Config, key: jax.Array) -> Params:
    """Parameters, normal(0.02); with `scan`, each one of the blocks has a leading dimension of `layers`."""
    token_key, output_key, block_key = jax.random.split(key, 3)
    block_keys = jax.random.split(block_key, config.layers)
    if config.scan:
        blocks = jax.vmap(lambda block_key: init_block(config, block_key))(block_keys)
    else:
        blocks = [init_block(config, block_key) for block_key in block_keys]
    shape = (config.vocabulary, config.width)
    return {
        "token_embedding": 0.02 * jax.random.normal(token_key, shape),
        "blocks": blocks,
        "final_norm": jnp.ones(config.width),
        "output": 0.02 * jax.random.normal(output_key, shape[::-1]),
    }


def init_block(config: Config, key: jax.Array) -> Params:
    width, hidden, head = config.width, config.hidden, config.head_width
    shapes = {
        "q": (width, config.heads, head),
        "k": (width, config.kv_heads, head),
        "v": (width, config.kv_heads, head),
        "o": (config.heads, head, width),
        "gate": (width, hidden),
        "up": (width, hidden),
        "down": (hidden, width),
    }
    keys = jax.random.split(key, len(shapes))
    weights = {
        name: 0.02 * jax.random.normal(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    return {"attention_norm": jnp.ones(width), "mlp_norm": jnp.ones(width), **weights}


# ---- layers -----------------------------------------------------------------------


def norm(scale: jax.Array, x: jax.Array) -> jax.Array:
    """Root mean square norm over the last dimension, in float32."""
    y = x.astype(jnp.float32)
    return (scale * y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype)


def rotate(x: jax.Array, base: float) -> jax.Array:
    """Rotary positions (Su et al., 2021) on [batch, time, heads, width]: pairs of components turn with the position."""
    time, width = x.shape[1], x.shape[3]
    frequencies = base ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    angles = jnp.arange(time, dtype=jnp.float32)[:, None, None] * frequencies
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = (
        first * jnp.cos(angles) - second * jnp.sin(angles),
        second * jnp.cos(angles) + first * jnp.sin(angles),
    )
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def attention(p: Params, x: jax.Array, config: Config) -> jax.Array:
    """Causal self-attention, [batch, time, width] to the same; softmax in float32."""
    batch, time, _ = x.shape
    q, k, v = (jnp.einsum("btm,mnd->btnd", x, p[name].astype(x.dtype)) for name in ("q", "k", "v"))
    q, k = rotate(q, config.rope_base), rotate(k, config.rope_base)
    q = q.reshape(batch, time, config.kv_heads, -1, config.head_width)
    scores = jnp.einsum("btkgd,bskd->bkgts", q, k).astype(jnp.float32) / config.head_width**0.5
    causal = jnp.tril(jnp.ones((time, time), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e9), axis=-1).astype(x.dtype)
    mixed = jnp.einsum("bkgts,bskd->btkgd", weights, v).reshape(batch, time, config.heads, config.head_width)
    return jnp.einsum("btnd,ndm->btm", mixed, p["o"].astype(x.dtype))


def mlp(p: Params, x: jax.Array) -> jax.Array:
    gate, up, down = (p[name].astype(x.dtype) for name in ("gate", "up", "down"))
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def apply_block(p: Params, x: jax.Array, config: Config) -> jax.Array:
    x = x + attention(p, norm(p["attention_norm"], x), config)
    return x + mlp(p, norm(p["mlp_norm"], x))


# ---- the model --------------------------------------------------------------------


def logits_of(params: Params, tokens: jax.Array, config: Config) -> jax.Array:
    """Next-token logits [batch, time, vocabulary] of tokens [batch, time]."""

    def block(x: jax.Array, p: Params) -> tuple[jax.Array, None]:
        return apply_block(p, x, config), None

    if config.remat != "none":
        block = jax.checkpoint(block, policy=REMAT[config.remat])
    x = params["token_embedding"].astype(config.dtype)[tokens]
    if config.scan:
        x, _ = jax.lax.scan(block, x, params["blocks"])
    else:
        for p in params["blocks"]:
            x, _ = block(x, p)
    return norm(params["final_norm"], x) @ params["output"].astype(x.dtype)


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
