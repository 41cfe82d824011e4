"""GPT with a mixture of experts in every other block, in plain JAX, written for one device.

Top-2 gates and dispatch by einsum as in GShard (Lepikhin et al., 2020). Capacity counts per sequence: a sequence's
dispatch is independent of the others, and a batch may be split along its sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from examples.gpt2.model import Params, attention, init_block, init_norm, mlp, norm


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of the model and of its batch; layers come in pairs, an ordinary block and one with experts.

    dtype: of the activations; parameters are float32.
    scan: pairs of layers in a `lax.scan` with rematerialized activations.
    """

    experts: int = 8
    vocabulary: int = 256
    context: int = 128
    layers: int = 4
    heads: int = 4
    width: int = 128
    mlp_factor: int = 4
    batch: int = 16
    capacity_factor: float = 2.0
    dtype: str = "float32"
    scan: bool = False

    def __post_init__(self) -> None:
        if self.width % self.heads or self.layers % 2 or self.capacity < 1:
            raise ValueError("width must be a multiple of heads, layers even, and an expert take a token or more")

    @property
    def hidden(self) -> int:
        return self.mlp_factor * self.width

    @property
    def capacity(self) -> int:
        """Maximum tokens of one sequence for one expert; later ones skip the block."""
        return int(self.context * self.capacity_factor / self.experts)


def _make_preset(experts: int, layers: int, width: int) -> Config:
    return Config(
        experts=experts, vocabulary=32000, context=1024, layers=layers, heads=16, width=width, mlp_factor=8, batch=1024,
        dtype="bfloat16", scan=True,
    )  # fmt: skip


#: "tiny" and "small" train anywhere; the others are the GShard-MoE models of Alpa's evaluation (Zheng et al., 2022).
PRESETS = {
    "tiny": Config(experts=4, layers=2, heads=2, width=32, context=32),
    "small": Config(),
    "380M": _make_preset(8, 8, 768),
    "690M": _make_preset(16, 8, 768),
    "1.3B": _make_preset(16, 16, 768),
    "2.4B": _make_preset(16, 16, 1024),
    "10B": _make_preset(32, 16, 1536),
    "27B": _make_preset(48, 16, 2048),
    "70B": _make_preset(64, 32, 2048),
}


def init_params(config: Config, key: jax.Array) -> Params:
    """Parameters; with `scan`, those of the pairs have a leading dimension of `layers / 2`."""
    token_key, position_key, pair_key = jax.random.split(key, 3)
    pair_keys = jax.random.split(pair_key, config.layers // 2)
    if config.scan:
        pairs = jax.vmap(lambda pair_key: _init_pair(config, pair_key))(pair_keys)
    else:
        pairs = [_init_pair(config, pair_key) for pair_key in pair_keys]
    return {
        "token_embedding": 0.02 * jax.random.normal(token_key, (config.vocabulary, config.width)),
        "position_embedding": 0.01 * jax.random.normal(position_key, (config.context, config.width)),
        "pairs": pairs,
        "final_norm": init_norm(config.width),
    }


def _init_pair(config: Config, key: jax.Array) -> Params:
    dense_key, sparse_key, gate_key, up_key, down_key = jax.random.split(key, 5)
    width, hidden, experts = config.width, config.hidden, config.experts
    residual_std = 0.02 / (2 * config.layers) ** 0.5
    sparse = init_block(config, sparse_key)
    del sparse["mlp"]
    sparse["experts"] = {
        "gate": 0.02 * jax.random.normal(gate_key, (width, experts)),
        "up": 0.02 * jax.random.normal(up_key, (experts, width, hidden)),
        "down": residual_std * jax.random.normal(down_key, (experts, hidden, width)),
    }
    return {"dense": init_block(config, dense_key), "sparse": sparse}


def mixture(p: Params, x: jax.Array, config: Config) -> tuple[jax.Array, jax.Array]:
    """(each token of x [batch, time, width] through its two experts, load-balancing loss)."""
    gates = jax.nn.softmax(x.astype(jnp.float32) @ p["gate"], axis=-1)
    combine, balance = top_two(gates, config.capacity)
    dispatch = (combine > 0).astype(x.dtype)
    inputs = jnp.einsum("btec,btd->ebcd", dispatch, x)
    hidden = jax.nn.gelu(jnp.einsum("ebcd,edh->ebch", inputs, p["up"].astype(x.dtype)))
    outputs = jnp.einsum("ebch,ehd->ebcd", hidden, p["down"].astype(x.dtype))
    return jnp.einsum("btec,ebcd->btd", combine.astype(x.dtype), outputs), balance


def top_two(gates: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Weights [batch, time, experts, capacity] of each token's two experts, and the balance loss.

    gates: [batch, time, experts], with sum one over the experts.
    """
    experts = gates.shape[-1]
    first = jax.nn.one_hot(jnp.argmax(gates, axis=-1), experts)
    second = jax.nn.one_hot(jnp.argmax(gates * (1 - first), axis=-1), experts)
    first_place = (jnp.cumsum(first, axis=1) - 1) * first
    second_place = (jnp.cumsum(second, axis=1) - 1 + first.sum(1, keepdims=True)) * second
    total = (gates * (first + second)).sum(-1, keepdims=True) + 1e-9
    combine = jnp.zeros((*gates.shape, capacity))
    for chosen, place in ((first, first_place), (second, second_place)):
        within_capacity = chosen * (place < capacity)
        slot = jax.nn.one_hot(place.sum(-1).astype(jnp.int32), capacity)
        combine += (gates / total * within_capacity)[..., None] * slot[:, :, None]
    balance = experts**2 * jnp.mean(first.mean(1) * gates.mean(1))
    return combine, balance


def apply_pair(p: Params, x: jax.Array, config: Config) -> tuple[jax.Array, jax.Array]:
    """Apply a dense block and one with experts; the second result is its load-balancing loss."""
    dense, sparse = p["dense"], p["sparse"]
    x = x + attention(dense["attention"], norm(dense["attention_norm"], x), config.heads)
    x = x + mlp(dense["mlp"], norm(dense["mlp_norm"], x))
    x = x + attention(sparse["attention"], norm(sparse["attention_norm"], x), config.heads)
    mixed, balance = mixture(sparse["experts"], norm(sparse["mlp_norm"], x), config)
    return x + mixed, balance


def logits_of(params: Params, tokens: jax.Array, config: Config) -> tuple[jax.Array, jax.Array]:
    """(next-token logits [batch, time, vocabulary], mean balance loss of the blocks with experts)."""
    x = params["token_embedding"][tokens] + params["position_embedding"][: tokens.shape[1]]
    x = x.astype(config.dtype)
    if config.scan:
        pair = jax.checkpoint(lambda x, p: apply_pair(p, x, config))
        x, balances = jax.lax.scan(pair, x, params["pairs"])
        balance = balances.mean()
    else:
        balance = jnp.float32(0)
        for p in params["pairs"]:
            x, extra = apply_pair(p, x, config)
            balance += extra / len(params["pairs"])
    return norm(params["final_norm"], x) @ params["token_embedding"].T.astype(x.dtype), balance


def losses_of(params: Params, tokens: jax.Array, config: Config) -> tuple[jax.Array, jax.Array]:
    """(loss to train by, mean cross entropy in nats of predicting tokens[:, 1:] from tokens[:, :-1])."""
    logits, balance = logits_of(params, tokens[:, :-1], config)
    logits = logits.astype(jnp.float32)
    entropy = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
    return entropy + 0.01 * balance, entropy


def make_steps(config: Config, optimizer: optax.GradientTransformation) -> tuple[Any, Any, Any]:
    """(init, train_step, eval_step), ready for `jax.jit` on one device."""

    def init(key: jax.Array) -> tuple[Params, Any]:
        params = init_params(config, key)
        return params, optimizer.init(params)

    def train_step(params: Params, opt_state: Any, tokens: jax.Array) -> tuple[Params, Any, jax.Array]:
        gradients, entropy = jax.grad(losses_of, has_aux=True)(params, tokens, config)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, entropy

    def eval_step(params: Params, tokens: jax.Array) -> jax.Array:
        return losses_of(params, tokens, config)[1]

    return init, train_step, eval_step
