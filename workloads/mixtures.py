"""A mixture of experts of today's sizes for planning: DeepSeek's layers, 16 or 64 experts, ragged or one-hot.

Width, hidden units and active experts are DeepSeek-V2-Lite's (arXiv 2405.04434); layers and vocabulary are few, so that
the mixtures are most of a step. The batch grows with the devices: eight sequences of 4,096 tokens each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
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


def sent_rows(config: Config) -> int:
    """Rows that one layer sends to experts: a token's for each of its experts."""
    return config.batch * config.context * config.active


def row_bytes(config: Config) -> int:
    """Bytes of the rows that a step sends and returns: out and back; forward, again where made again, backward."""
    passes = 2 if config.remat == "none" else 3
    return (
        config.sparse_layers * 2 * passes * sent_rows(config) * config.width * (2 if config.dtype != "float32" else 4)
    )
