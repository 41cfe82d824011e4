"""An LSTM language model (Jozefowicz et al., 2016): layers scanned over time, input projections ahead of the scan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from workloads.cases import Case, Leaf, training_case
from workloads.hooks import constrain
from workloads.models import layers as nn


@dataclass(frozen=True, kw_only=True)
class Config:
    layers: int
    width: int
    vocabulary: int = 32768
    length: int = 64
    batch_per_device: int = 32
    fused: bool = True


SIZES = {"1024": Config(layers=2, width=1024), "2048": Config(layers=2, width=2048)}


def build(size: str, devices: int, **changes: Any) -> Case:
    """A step on `devices` devices' batch; changes: any field of Config."""
    config = replace(SIZES[size], **changes)
    batch = config.batch_per_device * devices
    data = {"inputs": nn.tokens(batch, config.length), "labels": nn.tokens(batch, config.length)}

    def loss(params: nn.Params, batch: nn.Params) -> jax.Array:
        x = nn.residual(params["embedding"][batch["inputs"]])
        for layer in params["layers"]:
            x = nn.residual(_lstm(layer, x))
        return nn.cross_entropy(nn.linear(params["head"], x), batch["labels"])

    return training_case(loss, parameters(config), data)


def parameters(config: Config) -> nn.Params:
    width = config.width
    gates = (4 * width,) if config.fused else (4, width)
    axes = (None,) if config.fused else (None, "gates")
    layer = {
        "input": Leaf((width, *gates), ("embed", *axes)),
        "bias": Leaf(gates, axes),
        "hidden": Leaf((width, *gates), ("embed", *axes)),
    }
    return {
        "embedding": Leaf((config.vocabulary, width), ("vocabulary", "embed")),
        "layers": [layer for _ in range(config.layers)],
        "head": nn.linear_params(width, config.vocabulary, ("embed", "vocabulary")),
    }


def _lstm(p: nn.Params, x: jax.Array) -> jax.Array:
    """Hidden states [batch, length, width] of inputs of that shape; gates lie in one dimension, or [4, width]."""
    projected = jnp.tensordot(x, p["input"], 1) + p["bias"]
    zeros = jnp.zeros((x.shape[0], x.shape[-1]), x.dtype)

    def cell(state: tuple[jax.Array, jax.Array], inputs: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        hidden, memory = state
        gates = inputs + jnp.tensordot(hidden, p["hidden"], 1)
        into, forget, new, out = jnp.split(gates, 4, axis=-1) if gates.ndim == 2 else jnp.unstack(gates, axis=1)
        memory = jax.nn.sigmoid(forget + 1) * memory + jax.nn.sigmoid(into) * jnp.tanh(new)
        memory = constrain(memory, "batch", "gates")
        hidden = constrain(jax.nn.sigmoid(out) * jnp.tanh(memory), "batch", None)
        return (hidden, memory), hidden

    _, states = jax.lax.scan(cell, (zeros, zeros), jnp.swapaxes(projected, 0, 1))
    return jnp.swapaxes(states, 0, 1)
