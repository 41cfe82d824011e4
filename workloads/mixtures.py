"""A mixture of experts of today's sizes for planning: DeepSeek's layers, 16 or 64 experts, ragged or one-hot.

Width, hidden units and active experts are DeepSeek-V2-Lite's (arXiv 2405.04434); layers and vocabulary are few, so that
the mixtures are most of a step. The batch grows with the devices: eight sequences of 4,096 tokens each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from examples.moe.deepseek import PRESETS, Config, make_steps

#: Experts → sizes, one layer of them: 16 experts, and 64, of which a token has six in either case.
SIZES = {
    experts: replace(
        PRESETS["16B"],
        layers=2,
        dense_layers=0,
        vocabulary=16_384,
        experts=experts,
        scan=False,
    )
    for experts in (16, 64)
}
SEQUENCES_PER_DEVICE = 8


def config_of(experts: int, devices: int, form: str, **changes: Any) -> Config:
    """The model on the batch of so many devices. form: `ragged` or `onehot`; changes: any field."""
    return replace(SIZES[experts], batch=SEQUENCES_PER_DEVICE * devices, form=form, **changes)


def build(config: Config) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """(training step, types of its arguments): AdamW, its first two arguments donated."""
    init, train_step, _ = make_steps(config, optax.adamw(1e-4))
    state = jax.eval_shape(init, jax.random.key(0))
    return train_step, (*state, jax.ShapeDtypeStruct((config.batch, config.context + 1), "int32"))


def build_layer(experts: int, devices: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """(step, types of its arguments) of one ragged layer with these sizes in bfloat16: its parameters and tokens."""
    sizes = SIZES[experts]
    tokens, width, hidden = SEQUENCES_PER_DEVICE * sizes.context * devices, sizes.width, sizes.hidden

    def layer(p: Any, x: Any) -> Any:
        weights, chosen = jax.lax.top_k(jax.nn.softmax((x @ p["router"]).astype("float32")), sizes.active)
        of_pair = chosen.reshape(-1)
        order = jnp.argsort(of_pair)
        counts = jnp.bincount(of_pair, length=experts)
        rows = jnp.take(x, order // sizes.active, axis=0)
        gate, up = (jax.lax.ragged_dot(rows, p[name], counts) for name in ("gate", "up"))
        y = jax.lax.ragged_dot(jax.nn.silu(gate) * up, p["down"], counts)
        y = jnp.take(y, jnp.argsort(order), axis=0).reshape(tokens, sizes.active, width)
        return x + jnp.einsum("tkd,tk->td", y, weights.astype(x.dtype))

    def step(p: Any, x: Any) -> Any:
        loss, gradients = jax.value_and_grad(lambda p, x: (layer(p, x).astype("float32") ** 2).mean(), (0, 1))(p, x)
        return jax.tree.map(lambda old, each: (old - 1e-3 * each).astype(old.dtype), (p, x), gradients), loss

    shapes = {
        "router": (width, experts),
        "gate": (experts, width, hidden),
        "up": (experts, width, hidden),
        "down": (experts, hidden, width),
    }
    types = {name: jax.ShapeDtypeStruct(dims, "bfloat16") for name, dims in shapes.items()}
    return step, (types, jax.ShapeDtypeStruct((tokens, width), "bfloat16"))


def sent_rows(config: Config) -> int:
    """Rows that one layer sends to experts: a token's for each of its experts."""
    return config.batch * config.context * config.active


def row_bytes(config: Config) -> int:
    """Bytes of the rows that a step sends and returns: out and back; forward, again where made again, backward."""
    passes = 2 if config.remat == "none" else 3
    return (
        config.sparse_layers * 2 * passes * sent_rows(config) * config.width * (2 if config.dtype != "float32" else 4)
    )
