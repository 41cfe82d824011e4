"""Rows looked up and summed: a graph network, and a wide and deep recommender with unequal tables."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from workloads.cases import Case, Leaf, training_case
from workloads.hooks import constrain
from workloads.models import layers as nn

Params = Any


def gnn(devices: int, layers: int = 3, width: int = 256, nodes: int = 8192, edges: int = 65536) -> Case:
    """Message passing with attention over edges; messages summed by segment. Nodes and edges grow with the devices."""
    nodes, edges = nodes * devices, edges * devices

    def linear(inputs: int, outputs: int) -> Leaf:
        return Leaf((inputs, outputs), ("embed", "mlp"))

    one = {
        "sent": linear(width, width), "received": linear(width, width), "edge": linear(16, width),
        "score": Leaf((width, 1), ("mlp", None)), "update": linear(2 * width, width),
    }  # fmt: skip
    params = {"into": linear(128, width), "layers": [one] * layers, "head": Leaf((width, 40), ("embed", None))}

    def layer(p: Params, x: jax.Array, batch: Params) -> jax.Array:
        senders, receivers = batch["senders"], batch["receivers"]
        message = jax.nn.relu((x @ p["sent"])[senders] + (x @ p["received"])[receivers] + batch["features"] @ p["edge"])
        message = constrain(message, "batch", "messages")
        score = (message @ p["score"])[:, 0]
        score = jnp.exp(score - jax.lax.stop_gradient(jax.ops.segment_max(score, receivers, nodes))[receivers])
        weight = score / (jax.ops.segment_sum(score, receivers, nodes)[receivers] + 1e-6)
        gathered = constrain(jax.ops.segment_sum(message * weight[:, None], receivers, nodes), "nodes", "messages")
        return x + jax.nn.relu(jnp.concatenate([x, gathered], -1) @ p["update"])

    def loss(params: Params, batch: Params) -> jax.Array:
        x = batch["nodes"] @ params["into"]
        for p in params["layers"]:
            x = layer(p, x, batch)
        return nn.cross_entropy(x @ params["head"], batch["labels"])

    data = {
        "nodes": Leaf((nodes, 128), ("nodes", None)),
        "senders": Leaf((edges,), ("batch",), jnp.int32),
        "receivers": Leaf((edges,), ("batch",), jnp.int32),
        "features": Leaf((edges, 16), ("batch", None)),
        "labels": Leaf((nodes,), ("nodes",), jnp.int32),
    }
    return training_case(loss, params, data)


def wide_deep(devices: int, per_device: int = 4096) -> Case:
    """Wide and deep (Cheng et al., 2016): tables of unequal sizes, bags of values summed, a linear part; Adagrad."""
    rows = (4_000_000, 2_000_000, 1_000_000, 200_000, 50_000, 5_000, 500, 30)
    widths = (64, 64, 64, 32, 32, 16, 16, 8)
    bag = 8
    inputs = sum(widths) + 13
    params = {
        "tables": [Leaf((r, w), ("rows", "columns")) for r, w in zip(rows, widths, strict=True)],
        "wide": [Leaf((r,), ("rows",)) for r in rows],
        "deep": [nn.linear_params(a, b, (None, "mlp")) for a, b in itertools.pairwise((inputs, 1024, 512, 256, 1))],
    }

    def loss(params: Params, batch: Params) -> jax.Array:
        bags = [batch["values"][:, number] for number in range(len(rows))]
        looked_up = [
            constrain(table[values].sum(1), "batch", "looked_up")
            for table, values in zip(params["tables"], bags, strict=True)
        ]
        x = constrain(jnp.concatenate([batch["dense"], *looked_up], -1), "batch", None)
        for number, layer in enumerate(params["deep"]):
            x = nn.linear(layer, x)
            x = jax.nn.relu(x) if number < 3 else x
        wide = sum(weights[values].sum(1) for weights, values in zip(params["wide"], bags, strict=True))
        return optax.sigmoid_binary_cross_entropy(x[:, 0] + wide, batch["clicks"]).mean()

    count = devices * per_device
    data = {
        "values": Leaf((count, len(rows), bag), ("batch", None, None), jnp.int32),
        "dense": Leaf((count, 13), ("batch", None)),
        "clicks": Leaf((count,), ("batch",)),
    }
    return training_case(loss, params, data, optax.adagrad(0.05))
