"""Layers that several models share: a function for the parameters' shapes, and one that applies them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from workloads.cases import Leaf, stacked
from workloads.hooks import constrain

Params = Any
NEGATIVE = -1e9


def linear_params(inputs: int, outputs: int, axes: tuple[str | None, str | None], *, bias: bool = True) -> Params:
    """Weight [inputs, outputs] and bias [outputs]."""
    weight = {"weight": Leaf((inputs, outputs), axes)}
    return {**weight, "bias": Leaf((outputs,), axes[1:])} if bias else weight


def linear(p: Params, x: jax.Array) -> jax.Array:
    y = x @ p["weight"].astype(x.dtype)
    return y + p["bias"].astype(x.dtype) if "bias" in p else y


def norm_params(width: int) -> Params:
    return {"scale": Leaf((width,), ("embed",)), "bias": Leaf((width,), ("embed",))}


def layer_norm(p: Params, x: jax.Array) -> jax.Array:
    """Layer norm over the last dimension, in float32."""
    y = x.astype(jnp.float32)
    mean = y.mean(-1, keepdims=True)
    variance = jnp.square(y - mean).mean(-1, keepdims=True)
    return (p["scale"] * (y - mean) * jax.lax.rsqrt(variance + 1e-5) + p["bias"]).astype(x.dtype)


def rms_norm(scale: jax.Array, x: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    return (scale * y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)


def attention_params(width: int, inner: int, *, bias: bool = True) -> Params:
    """Separate query, key, value and output projections; `inner` = heads × head size."""
    into = {name: linear_params(width, inner, ("embed", "heads"), bias=bias) for name in ("query", "key", "value")}
    output = {"weight": Leaf((inner, width), ("heads", "embed"))}
    return {**into, "output": {**output, "bias": Leaf((width,), ("embed",))} if bias else output}


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool = False, bias: jax.Array | None = None
) -> jax.Array:
    """Softmax attention of q [batch, length, heads, size] over k, v of the same heads; scaled, softmax in float32."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) / q.shape[-1] ** 0.5
    if bias is not None:
        scores = scores + bias
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, NEGATIVE)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1).astype(q.dtype), v)


def attention(
    p: Params,
    x: jax.Array,
    heads: int,
    *,
    memory: jax.Array | None = None,
    causal: bool = False,
    bias: jax.Array | None = None,
) -> jax.Array:
    """Multi-head attention of x [batch, length, width] over `memory` (default x itself)."""
    memory = x if memory is None else memory
    q, k, v = (
        constrain(split_heads(linear(p[name], source), heads), "batch", "length", "heads", None)
        for name, source in (("query", x), ("key", memory), ("value", memory))
    )
    return linear(p["output"], merge_heads(attend(q, k, v, causal=causal, bias=bias)))


def split_heads(x: jax.Array, heads: int) -> jax.Array:
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)


def merge_heads(x: jax.Array) -> jax.Array:
    return constrain(x.reshape(*x.shape[:2], -1), "batch", "length", "heads")


def mlp_params(width: int, hidden: int) -> Params:
    return {
        "up": linear_params(width, hidden, ("embed", "mlp")),
        "down": {"weight": Leaf((hidden, width), ("mlp", "embed")), "bias": Leaf((width,), ("embed",))},
    }


def mlp(p: Params, x: jax.Array) -> jax.Array:
    hidden = constrain(jax.nn.gelu(linear(p["up"], x)), "batch", "length", "mlp")
    return linear(p["down"], hidden)


def blocks_params(block: Params, layers: int, *, scanned: bool) -> Params:
    """Equal layers: a list, or each array with a leading dimension of `layers`, as `through` scans over them."""
    return stacked(block, layers) if scanned else [block] * layers


def through(blocks: Params, layer: Callable[[jax.Array, Params], jax.Array], x: jax.Array, *, remat: bool) -> jax.Array:
    """x behind every block of `blocks_params`; remat: each computed again in the backward pass."""
    body = jax.checkpoint(layer) if remat else layer
    if not isinstance(blocks, list):
        return jax.lax.scan(lambda x, block: (body(x, block), None), x, blocks)[0]
    for block in blocks:
        x = body(x, block)
    return x


def residual(x: jax.Array) -> jax.Array:
    """The residual stream [batch, length, width] between layers."""
    return constrain(x, "batch", "residual_length", None)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross entropy of logits [..., vocabulary] in nats."""
    logits = constrain(logits, "batch", *("length",) * (logits.ndim - 2), "vocabulary")
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def tokens(batch: int, length: int) -> Leaf:
    return Leaf((batch, length), ("batch", "length"), jnp.int32)
