"""Plain JAX steps of the published models, for one device: GPT, MPT, Llama, mixtures of experts, vision transformers.

One transformer, by `Model`: layers in a `lax.scan`, attention written out (the planner puts a device's fused kernel in
its place), a loss, AdamW. Shapes: batch b, positions t, width m, heads n (keys k), head width d, units of the MLP f.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

Params = dict[str, Any]

#: What a layer keeps for the backward pass: a policy of `jax.checkpoint`; None: all of it. Selective recomputation
#: keeps the results of products with weights, and computes attention again (Korthikanti et al., 2022).
_POLICIES: dict[str, Callable[..., bool] | None] = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "selective": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "none": None,
}

#: Values of a patch of a vision transformer: 14 by 14 pixels of three colours.
_PATCH = 14 * 14 * 3
_CLASSES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A transformer and its batch.

    gated: Llama's layers (root mean square norms, rotary positions, gated MLP, no biases, a head of its own); else
        GPT's (layer norms, learned positions, biases, a tied head). patches: a vision transformer: patches in, a class
        out. experts: of each layer's MLP, 0: none; each token goes to `top`.
    state: type of parameters and optimizer state. compute: of products: `bf16`, `fp16`, `fp8` or `fp32`.
    recompute: `full`, `selective` or `none`.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int
    positions: int
    batch: int
    gated: bool = False
    patches: bool = False
    experts: int = 0
    top: int = 2
    state: str = "float32"
    compute: str = "bf16"
    recompute: str = "none"

    @property
    def activations(self) -> jnp.dtype:
        """Their type: products in 8 bits are of activations in bfloat16."""
        return jnp.dtype({"fp16": "float16", "fp32": "float32"}.get(self.compute, "bfloat16"))


def make_step(model: Model) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The training step and the types of its arguments: parameters, optimizer state, inputs, targets."""
    optimizer = optax.adamw(1e-4)

    def train_step(
        params: Params, state: Any, inputs: jax.Array, targets: jax.Array
    ) -> tuple[Params, optax.OptState, jax.Array]:
        loss, gradients = jax.value_and_grad(partial(_loss_of, model))(params, inputs, targets)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape, model.state), _shapes(model), is_leaf=_is_shape)
    state = jax.eval_shape(optimizer.init, params)
    tokens = jax.ShapeDtypeStruct((model.batch, model.positions), jnp.int32)
    if not model.patches:
        return train_step, (params, state, tokens, tokens)
    images = jax.ShapeDtypeStruct((*tokens.shape, _PATCH), model.activations)
    return train_step, (params, state, images, jax.ShapeDtypeStruct((model.batch,), jnp.int32))


# ---- parameters -------------------------------------------------------------------


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple)


def _shapes(model: Model) -> Params:
    """Of the parameters; those of the layers have a row for each."""
    width, hidden, head = model.width, model.hidden, model.width // model.heads
    weights = {
        "q": (width, model.heads, head),
        "k": (width, model.kv_heads, head),
        "v": (width, model.kv_heads, head),
        "o": (model.heads, head, width),
        "up": (width, hidden),
        "down": (hidden, width),
        **({"gate": (width, hidden)} if model.gated else {}),
    }
    if model.experts:
        weights |= {name: (model.experts, *weights[name]) for name in ("up", "down", "gate") if name in weights}
        weights["router"] = (width, model.experts)
    vectors = {"attention_norm": (width,), "mlp_norm": (width,)}
    if not model.gated:
        vectors |= {f"{name}_bias": (width,) for name in ("attention_norm", "mlp_norm", "o", "down")}
        vectors |= {f"{name}_bias": weights[name][1:] for name in ("q", "k", "v", "up")}
    layers = {name: (model.layers, *shape) for name, shape in (weights | vectors).items()}
    ends: Params = {"layers": layers, "norm": (width,)}
    if model.patches:
        return ends | {"input": (_PATCH, width), "positions": (model.positions, width), "head": (width, _CLASSES)}
    ends["input"] = (model.vocabulary, width)
    return ends | ({"head": (width, model.vocabulary)} if model.gated else {"positions": (model.positions, width)})


# ---- layers -----------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product_in_8_bits(equation: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """`jnp.einsum` on 8-bit floats; gradients take 5 bits of exponent (Micikevicius et al., 2022)."""
    x8, weight8 = x.astype(jnp.float8_e4m3fn), weight.astype(jnp.float8_e4m3fn)
    return jnp.einsum(equation, x8, weight8, preferred_element_type=x.dtype)


def _forward_in_8_bits(equation: str, x: jax.Array, weight: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _product_in_8_bits(equation, x, weight), (x, weight)


def _backward_in_8_bits(equation: str, kept: tuple[jax.Array, ...], g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weight = kept
    operands, result = equation.split("->")
    left, right = operands.split(",")
    g8 = g.astype(jnp.float8_e5m2)
    x8, weight8 = x.astype(jnp.float8_e4m3fn), weight.astype(jnp.float8_e4m3fn)
    wide = partial(jnp.einsum, preferred_element_type=x.dtype)
    dx = wide(f"{result},{right}->{left}", g8, weight8)
    return dx, wide(f"{left},{result}->{right}", x8, g8)


_product_in_8_bits.defvjp(_forward_in_8_bits, _backward_in_8_bits)


def _product(model: Model, equation: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    weight = weight.astype(x.dtype)
    return _product_in_8_bits(equation, x, weight) if model.compute == "fp8" else jnp.einsum(equation, x, weight)


def _norm(x: jax.Array, scale: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Layer norm over the last dimension, statistics in float32; without a bias the root mean square norm."""
    y = x.astype(jnp.float32)
    if bias is not None:
        y = y - y.mean(-1, keepdims=True)
    y = (y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype) * scale.astype(x.dtype)
    return y if bias is None else y + bias.astype(x.dtype)


def _rotate(x: jax.Array) -> jax.Array:
    """Rotary positions (Su et al., 2021) on [b, t, n, d]."""
    positions, width = x.shape[1], x.shape[3]
    frequencies = 500_000.0 ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    angles = jnp.arange(positions, dtype=jnp.float32)[:, None, None] * frequencies
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = (first * jnp.cos(angles) - second * jnp.sin(angles), second * jnp.cos(angles) + first * jnp.sin(angles))
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def _attention(model: Model, p: Params, x: jax.Array) -> jax.Array:
    """Self-attention, [b, t, m] to the same, causal but for images; the softmax in float32."""
    batch, positions, _ = x.shape
    head = model.width // model.heads
    q, k, v = (_add_bias(p, name, _product(model, "btm,mnd->btnd", x, p[name])) for name in ("q", "k", "v"))
    if model.gated:
        q, k = _rotate(q), _rotate(k)
    q = q.reshape(batch, positions, model.kv_heads, -1, head)
    scores = jnp.einsum("btkgd,bskd->bkgts", q, k).astype(jnp.float32) / head**0.5
    if not model.patches:
        scores = jnp.where(jnp.tril(jnp.ones((positions, positions), bool)), scores, -1e9)
    weights = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
    mixed = jnp.einsum("bkgts,bskd->btkgd", weights, v).reshape(batch, positions, model.heads, head)
    return _add_bias(p, "o", _product(model, "btnd,ndm->btm", mixed, p["o"]))


def _add_bias(p: Params, name: str, x: jax.Array) -> jax.Array:
    return x + p[f"{name}_bias"].astype(x.dtype) if f"{name}_bias" in p else x


def _mlp(model: Model, p: Params, x: jax.Array) -> jax.Array:
    up = _add_bias(p, "up", _product(model, "btm,mf->btf", x, p["up"]))
    inner = jax.nn.silu(_product(model, "btm,mf->btf", x, p["gate"])) * up if model.gated else jax.nn.gelu(up)
    return _add_bias(p, "down", _product(model, "btf,fm->btm", inner, p["down"]))


def _mixture(model: Model, p: Params, x: jax.Array) -> jax.Array:
    """Experts with a capacity of their even share (GShard, Lepikhin et al., 2020): `top` for each token."""
    positions = x.shape[1]
    capacity = max(1, model.top * positions // model.experts)
    gates = jax.nn.softmax(jnp.einsum("btm,me->bte", x, p["router"].astype(x.dtype)).astype(jnp.float32))
    values, chosen = jax.lax.top_k(gates, model.top)
    wanted = jax.nn.one_hot(chosen, model.experts).sum(2)
    slot = (jnp.cumsum(wanted, axis=1) - wanted).astype(jnp.int32)
    send = wanted[..., None] * jax.nn.one_hot(slot, capacity)
    weight = jnp.where(wanted > 0, gates / values.sum(-1, keepdims=True), 0.0)
    inputs = jnp.einsum("btec,btm->becm", send.astype(x.dtype), x)
    up = jnp.einsum("becm,emf->becf", inputs, p["up"].astype(x.dtype))
    gate = jnp.einsum("becm,emf->becf", inputs, p["gate"].astype(x.dtype)) if model.gated else None
    inner = jax.nn.gelu(up) if gate is None else jax.nn.silu(gate) * up
    outputs = jnp.einsum("becf,efm->becm", inner, p["down"].astype(x.dtype))
    return jnp.einsum("btec,becm->btm", (send * weight[..., None]).astype(x.dtype), outputs)


def _apply_layer(model: Model, x: jax.Array, p: Params) -> jax.Array:
    x = x + _attention(model, p, _norm(x, p["attention_norm"], p.get("attention_norm_bias")))
    mlp = _mixture if model.experts else _mlp
    return x + mlp(model, p, _norm(x, p["mlp_norm"], p.get("mlp_norm_bias")))


# ---- the model --------------------------------------------------------------------


def _loss_of(model: Model, params: Params, inputs: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean cross entropy in nats of tokens [b, t] and the next ones, or of patches [b, t, p] and classes [b]."""

    def layer(x: jax.Array, p: Params) -> tuple[jax.Array, None]:
        return _apply_layer(model, x, p), None

    policy = _POLICIES[model.recompute]
    layer = layer if policy is None else jax.checkpoint(layer, policy=policy)
    kind = model.activations
    x = inputs @ params["input"].astype(kind) if model.patches else params["input"].astype(kind)[inputs]
    if "positions" in params:
        x = x + params["positions"].astype(kind)
    x, _ = jax.lax.scan(layer, x, params["layers"])
    x = _norm(x, params["norm"], None)
    x = x.mean(1) if model.patches else x
    head = params["head"] if "head" in params else params["input"].T
    logits = (x @ head.astype(kind)).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()
