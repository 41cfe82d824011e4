"""A model like DeepSeek's in plain JAX: latent attention, shared and routed experts, written for one device.

Attention goes through a latent vector for keys and values (multi-head latent attention; DeepSeek-AI, "DeepSeek-V2",
2024, arXiv 2405.04434). A token has the shared experts, and `active` routed ones by the sigmoid of its scores; a bias
on the scores, which selects and does not weigh, is moved after each step toward experts that had few tokens, in the
place of a balance loss ("DeepSeek-V3 Technical Report", 2024, arXiv 2412.19437, section 2.1). Left out: limits on the
nodes of a token's experts, and prediction of several tokens.

Routed experts come in two forms of the same sizes: `ragged`, rows sorted by expert and multiplied by `ragged_dot`, no
token left out; `onehot`, dispatch by einsum into experts of a fixed capacity (GShard), later tokens left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from examples.gpt2.model import Params
from examples.llama.model import REMAT, norm, rotate

FORMS = ("ragged", "onehot")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of the model and of its batch.

    dense_layers: how many of `layers`, from the first on, have one MLP of `dense_hidden` units in the place of experts.
    experts, active, shared: routed experts, those of a token, and experts that every token has, of `hidden` units each.
    query_rank, latent: width of the vector that queries go through (0: none), and of the one of keys and values.
    head, rotary: components of a head without positions, which values have as many of, and with rotary ones.
    weight_scale: what the weights of a token's experts add up to. bias_step: of the routing bias, after each step.
    form: `ragged` or `onehot`; capacity_factor: of one-hot experts, among `group` tokens (0: of a sequence).
    scan: layers with experts in a `lax.scan`. remat: as in examples/llama.
    """

    vocabulary: int = 256
    context: int = 128
    layers: int = 4
    dense_layers: int = 1
    width: int = 128
    heads: int = 4
    head: int = 32
    rotary: int = 16
    query_rank: int = 0
    latent: int = 64
    dense_hidden: int = 344
    hidden: int = 96
    experts: int = 8
    active: int = 2
    shared: int = 1
    weight_scale: float = 1.0
    bias_step: float = 0.001
    form: str = "ragged"
    capacity_factor: float = 1.25
    group: int = 0
    batch: int = 16
    rope_base: float = 10_000.0
    dtype: str = "float32"
    scan: bool = False
    remat: str = "full"

    def __post_init__(self) -> None:
        if not 0 <= self.dense_layers < self.layers or self.active > self.experts or self.rotary % 2:
            raise ValueError("a layer with experts, active ones among them, and pairs of rotary components are needed")
        if self.context % self.tokens_of_group or self.form not in FORMS or self.remat not in REMAT:
            raise ValueError(f"groups divide the context, form is one of {FORMS}, remat of {', '.join(REMAT)}")

    @property
    def sparse_layers(self) -> int:
        return self.layers - self.dense_layers

    @property
    def tokens_of_group(self) -> int:
        """Tokens that share the capacity of one-hot experts."""
        return self.group or self.context

    @property
    def capacity(self) -> int:
        """Tokens of a group that one-hot experts take each, at least one."""
        return max(1, int(self.tokens_of_group * self.active * self.capacity_factor / self.experts))


#: "tiny" and "small" train anywhere. 16B: DeepSeek-V2-Lite; 671B: DeepSeek-V3 without its second predicted token
#: (sizes: tables and text of both reports), in batches of 4 M tokens.
PRESETS = {
    "tiny": Config(layers=2, width=32, heads=2, head=16, rotary=8, latent=16, dense_hidden=88, hidden=24, experts=4,
                   context=32),
    "small": Config(),
    "16B": Config(vocabulary=102_400, context=4096, layers=27, width=2048, heads=16, head=128, rotary=64, latent=512,
                  dense_hidden=10_944, hidden=1408, experts=64, active=6, shared=2, batch=1024, group=512,
                  dtype="bfloat16", scan=True),
    "671B": Config(vocabulary=129_280, context=4096, layers=61, dense_layers=3, width=7168, heads=128, head=128,
                   rotary=64, query_rank=1536, latent=512, dense_hidden=18_432, hidden=2048, experts=256, active=8,
                   weight_scale=2.5, batch=1024, group=512, dtype="bfloat16", scan=True),
}  # fmt: skip


# ---- parameters -------------------------------------------------------------------


def init_params(config: Config, key: jax.Array) -> Params:
    """Parameters, normal(0.02), and the routing bias; with `scan`, layers with experts have a leading dimension."""
    keys = jax.random.split(key, config.layers + 2)
    blocks: Any = [_init_block(config, each, is_sparse=True) for each in keys[config.dense_layers : config.layers]]
    if config.scan:
        blocks = jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)
    shape = (config.vocabulary, config.width)
    return {
        "token_embedding": _normal(keys[-2], shape),
        "dense_blocks": [_init_block(config, each, is_sparse=False) for each in keys[: config.dense_layers]],
        "blocks": blocks,
        "final_norm": jnp.ones(config.width),
        "output": _normal(keys[-1], shape[::-1]),
        "routing_bias": jnp.zeros((config.sparse_layers, config.experts)),
    }


def _normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return 0.02 * jax.random.normal(key, shape)


def _init_block(config: Config, key: jax.Array, *, is_sparse: bool) -> Params:
    width, heads, latent = config.width, config.heads, config.latent
    query_width = config.query_rank or width
    shapes: dict[str, tuple[int, ...]] = {
        "query_up": (query_width, heads, config.head + config.rotary),
        "latent_down": (width, latent + config.rotary),
        "key_up": (latent, heads, config.head),
        "value_up": (latent, heads, config.head),
        "attention_out": (heads, config.head, width),
    }
    if config.query_rank:
        shapes["query_down"] = (width, config.query_rank)
    if is_sparse:
        shapes |= {
            "router": (width, config.experts),
            "gate": (config.experts, width, config.hidden),
            "up": (config.experts, width, config.hidden),
            "down": (config.experts, config.hidden, width),
        }
    hidden = config.shared * config.hidden if is_sparse else config.dense_hidden
    if hidden:
        shapes |= {"mlp_gate": (width, hidden), "mlp_up": (width, hidden), "mlp_down": (hidden, width)}
    keys = jax.random.split(key, len(shapes))
    weights = {name: _normal(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=True)}
    norms = {"attention_norm": width, "mlp_norm": width, "latent_norm": latent}
    norms |= {"query_norm": config.query_rank} if config.query_rank else {}
    return weights | {name: jnp.ones(size) for name, size in norms.items()}


# ---- attention --------------------------------------------------------------------


def attention(p: Params, x: jax.Array, config: Config) -> jax.Array:
    """Causal attention through a latent vector of keys and values, [batch, time, width] to the same.

    Rotary components of keys are one head's, shared by all.
    """
    time = x.shape[1]
    query_from = norm(p["query_norm"], x @ p["query_down"].astype(x.dtype)) if config.query_rank else x
    queries = jnp.einsum("btc,cnd->btnd", query_from, p["query_up"].astype(x.dtype))
    queries, turned = jnp.split(queries, [config.head], axis=-1)
    latent, key = jnp.split(x @ p["latent_down"].astype(x.dtype), [config.latent], axis=-1)
    latent = norm(p["latent_norm"], latent)
    keys = jnp.einsum("btc,cnd->btnd", latent, p["key_up"].astype(x.dtype))
    values = jnp.einsum("btc,cnd->btnd", latent, p["value_up"].astype(x.dtype))
    key = jnp.broadcast_to(rotate(key[:, :, None], config.rope_base), turned.shape)
    queries = jnp.concatenate([queries, rotate(turned, config.rope_base)], axis=-1)
    keys = jnp.concatenate([keys, key], axis=-1)
    scores = jnp.einsum("btnd,bsnd->bnts", queries, keys).astype(jnp.float32)
    scores /= (config.head + config.rotary) ** 0.5
    causal = jnp.tril(jnp.ones((time, time), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e9), axis=-1).astype(x.dtype)
    mixed = jnp.einsum("bnts,bsnd->btnd", weights, values)
    return jnp.einsum("btnd,ndm->btm", mixed, p["attention_out"].astype(x.dtype))


# ---- experts ----------------------------------------------------------------------


def mlp(p: Params, x: jax.Array) -> jax.Array:
    """The gated MLP of a dense layer; of one with experts those that every token has."""
    gate, up, down = (p[name].astype(x.dtype) for name in ("mlp_gate", "mlp_up", "mlp_down"))
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def route(p: Params, bias: jax.Array, x: jax.Array, config: Config) -> tuple[jax.Array, jax.Array]:
    """(the experts of each token, int32, and their weights, float32), both [batch, time, active].

    bias: [experts], added for the selection alone.
    """
    scores = jax.nn.sigmoid(x.astype(jnp.float32) @ p["router"])
    _, chosen = jax.lax.top_k(jax.lax.stop_gradient(scores + bias), config.active)
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    return chosen, config.weight_scale * weights / weights.sum(-1, keepdims=True)


def ragged_experts(p: Params, x: jax.Array, chosen: jax.Array, weights: jax.Array, config: Config) -> jax.Array:
    """Each token of x [batch, time, width] through its experts: rows sorted by expert, one product for all."""
    tokens, active = x.reshape(-1, config.width), config.active
    of_pair = chosen.reshape(-1)  # the expert of each (token, expert) pair
    order = jnp.argsort(of_pair)
    sizes = jnp.bincount(of_pair, length=config.experts)
    rows = jnp.take(tokens, order // active, axis=0)
    gate, up, down = (p[name].astype(x.dtype) for name in ("gate", "up", "down"))
    hidden = jax.nn.silu(jax.lax.ragged_dot(rows, gate, sizes)) * jax.lax.ragged_dot(rows, up, sizes)
    outputs = jnp.take(jax.lax.ragged_dot(hidden, down, sizes), jnp.argsort(order), axis=0)
    pairs = outputs.reshape(*chosen.shape, config.width)
    return jnp.einsum("btkd,btk->btd", pairs, weights.astype(x.dtype))


def onehot_experts(p: Params, x: jax.Array, chosen: jax.Array, weights: jax.Array, config: Config) -> jax.Array:
    """The same into experts of a capacity; pairs over it add nothing."""
    shape = x.shape
    x, chosen, weights = (
        each.reshape(-1, config.tokens_of_group, each.shape[-1]) for each in (x, chosen, weights.astype(x.dtype))
    )
    combine = _combine_weights(chosen, weights, config)
    inputs = jnp.einsum("gtec,gtd->egcd", (combine > 0).astype(x.dtype), x)
    gate, up, down = (p[name].astype(x.dtype) for name in ("gate", "up", "down"))
    hidden = jax.nn.silu(jnp.einsum("egcd,edh->egch", inputs, gate)) * jnp.einsum("egcd,edh->egch", inputs, up)
    outputs = jnp.einsum("egch,ehd->egcd", hidden, down)
    return jnp.einsum("gtec,egcd->gtd", combine, outputs).reshape(shape)


def _combine_weights(chosen: jax.Array, weights: jax.Array, config: Config) -> jax.Array:
    """The weight of each token at each place of each expert, [groups, tokens, experts, capacity]."""
    groups, tokens, active = chosen.shape
    of_pair = jax.nn.one_hot(chosen.reshape(groups, -1), config.experts, dtype=jnp.int32)
    place = ((jnp.cumsum(of_pair, axis=1) - 1) * of_pair).sum(-1).reshape(groups, tokens, active)
    slots = jax.nn.one_hot(place, config.capacity, dtype=weights.dtype)  # zero from the capacity on
    experts = jax.nn.one_hot(chosen, config.experts, dtype=weights.dtype)
    return jnp.einsum("gtke,gtkc->gtec", experts * weights[..., None], slots)


_EXPERTS = {"ragged": ragged_experts, "onehot": onehot_experts}


def apply_sparse(p: Params, bias: jax.Array, x: jax.Array, config: Config) -> tuple[jax.Array, jax.Array]:
    """(x after a layer with experts, how many of the pairs each expert had, float32 [experts])."""
    x = x + attention(p, norm(p["attention_norm"], x), config)
    y = norm(p["mlp_norm"], x)
    chosen, weights = route(p, bias, y, config)
    x = x + _EXPERTS[config.form](p, y, chosen, weights, config)
    load = jnp.bincount(chosen.reshape(-1), length=config.experts).astype(jnp.float32)
    return (x + mlp(p, y) if config.shared else x), load


def apply_dense(p: Params, x: jax.Array, config: Config) -> jax.Array:
    x = x + attention(p, norm(p["attention_norm"], x), config)
    return x + mlp(p, norm(p["mlp_norm"], x))


# ---- the model --------------------------------------------------------------------


def logits_of(params: Params, tokens: jax.Array, config: Config) -> tuple[jax.Array, jax.Array]:
    """(next-token logits [batch, time, vocabulary], pairs of each expert [sparse layers, experts])."""

    def dense(x: jax.Array, p: Params) -> jax.Array:
        return apply_dense(p, x, config)

    def sparse(x: jax.Array, layer: tuple[Params, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return apply_sparse(*layer, x, config)

    if config.remat != "none":
        dense = jax.checkpoint(dense, policy=REMAT[config.remat])
        sparse = jax.checkpoint(sparse, policy=REMAT[config.remat])
    x = params["token_embedding"].astype(config.dtype)[tokens]
    for p in params["dense_blocks"]:
        x = dense(x, p)
    if config.scan:
        x, loads = jax.lax.scan(sparse, x, (params["blocks"], params["routing_bias"]))
    else:
        by_layer = []
        for number, p in enumerate(params["blocks"]):
            x, load = sparse(x, (p, params["routing_bias"][number]))
            by_layer.append(load)
        loads = jnp.stack(by_layer)
    return norm(params["final_norm"], x) @ params["output"].astype(x.dtype), loads


def losses_of(params: Params, tokens: jax.Array, config: Config) -> tuple[jax.Array, jax.Array]:
    """(mean cross entropy in nats of predicting tokens[:, 1:] from tokens[:, :-1], loads as of `logits_of`)."""
    logits, loads = logits_of(params, tokens[:, :-1], config)
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean(), loads


def make_steps(config: Config, optimizer: optax.GradientTransformation) -> tuple[Any, Any, Any]:
    """(init, train_step, eval_step), ready for `jax.jit` on one device."""

    def split(params: Params) -> tuple[Params, jax.Array]:
        return {name: each for name, each in params.items() if name != "routing_bias"}, params["routing_bias"]

    def init(key: jax.Array) -> tuple[Params, Any]:
        params = init_params(config, key)
        return params, optimizer.init(split(params)[0])

    def train_step(params: Params, opt_state: Any, tokens: jax.Array) -> tuple[Params, Any, jax.Array]:
        trained, bias = split(params)

        def loss_of(trained: Params) -> tuple[jax.Array, jax.Array]:
            return losses_of({**trained, "routing_bias": bias}, tokens, config)

        (loss, loads), gradients = jax.value_and_grad(loss_of, has_aux=True)(trained)
        updates, opt_state = optimizer.update(gradients, opt_state, trained)
        bias = bias + config.bias_step * jnp.sign(loads.mean(-1, keepdims=True) - loads)
        return {**optax.apply_updates(trained, updates), "routing_bias": bias}, opt_state, loss

    def eval_step(params: Params, tokens: jax.Array) -> jax.Array:
        return losses_of(params, tokens, config)[0]

    return init, train_step, eval_step
