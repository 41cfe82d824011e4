"""DLRM (Naumov et al., 2019): large embedding tables, two MLPs, pairwise interactions; Adagrad as in MLPerf."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from workloads.cases import Case, Leaf, training_case
from workloads.hooks import constrain
from workloads.models import layers as nn


@dataclass(frozen=True, kw_only=True)
class Config:
    rows: int
    tables: int = 26
    width: int = 128
    dense: int = 13
    bottom: tuple[int, ...] = (512, 256, 128)
    top: tuple[int, ...] = (1024, 1024, 512, 256, 1)
    batch_per_device: int = 2048


SIZES = {"1M": Config(rows=1_000_000), "4M": Config(rows=4_000_000)}


def build(size: str, devices: int, **changes: Any) -> Case:
    """A step on `devices` devices' batch; changes: any field of Config."""
    config = replace(SIZES[size], **changes)
    batch = config.batch_per_device * devices
    data = {
        "dense": Leaf((batch, config.dense), ("batch", None)),
        "categories": Leaf((batch, config.tables), ("batch", None), jnp.int32),
        "clicks": Leaf((batch,), ("batch",)),
    }

    def loss(params: nn.Params, batch: nn.Params) -> jax.Array:
        return optax.sigmoid_binary_cross_entropy(_logits(params, batch), batch["clicks"]).mean()

    return training_case(loss, parameters(config), data, optax.adagrad(0.01))


def parameters(config: Config) -> nn.Params:
    pairs = (config.tables + 1) * config.tables // 2

    def perceptron(sizes: tuple[int, ...]) -> list[nn.Params]:
        return [nn.linear_params(inputs, outputs, (None, None)) for inputs, outputs in itertools.pairwise(sizes)]

    return {
        "tables": [Leaf((config.rows, config.width), ("rows", "columns")) for _ in range(config.tables)],
        "bottom": perceptron((config.dense, *config.bottom)),
        "top": perceptron((config.bottom[-1] + pairs, *config.top)),
    }


def _logits(params: nn.Params, batch: nn.Params) -> jax.Array:
    """Logit of a click for each row of the batch."""
    dense = _perceptron(params["bottom"], batch["dense"])
    looked_up = [
        constrain(table[batch["categories"][:, number]], "batch", "looked_up")
        for number, table in enumerate(params["tables"])
    ]
    vectors = constrain(jnp.stack([dense, *looked_up], axis=1), "batch", None, None)
    products = jnp.einsum("bid,bjd->bij", vectors, vectors)
    rows, columns = jnp.tril_indices(vectors.shape[1], -1)
    return _perceptron(params["top"], jnp.concatenate([dense, products[:, rows, columns]], axis=1))[:, 0]


def _perceptron(layers: list[nn.Params], x: jax.Array) -> jax.Array:
    for number, layer in enumerate(layers):
        x = nn.linear(layer, x)
        x = jax.nn.relu(x) if number < len(layers) - 1 else x
    return x
