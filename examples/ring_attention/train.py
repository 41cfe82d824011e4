"""Train a byte-level language model whose attention goes round a ring, on the sources of Python's standard library.

    python examples/ring_attention/train.py

Sequences are split over the axis `context`: in a `jax.shard_map` each device keeps its queries, and keys and values go
from device to device. The region is kept as it is written; all around it, and the devices beside that axis, is planned.

Uses the server at SERVER_IP/SERVER_PORT, or starts an embedded one with eight CPU devices.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that a script finds the other examples

import shardwright as sw
from examples.common import text

CONTEXT = 4  # devices of a ring: it needs as many, or a multiple
LAYERS, WIDTH, HEADS = 2, 64, 4
BATCH, LENGTH = 8, 128
OPTIMIZER = optax.adam(3e-3)

Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def ring_attention(mesh: Mesh | AbstractMesh, axis: str) -> Attention:
    """Causal attention of arrays [batch, length, heads, size], with the length split over an axis of the mesh."""
    devices = mesh.shape[axis]

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        batch, length, heads, size = q.shape  # one device's part
        here, places = jax.lax.axis_index(axis), jnp.arange(length)

        def hop(carry: Any, step: jax.Array) -> tuple[Any, None]:
            largest, total, out, k, v = carry
            there = (here - step) % devices  # where these keys come from
            is_seen = (here * length + places)[:, None] >= there * length + places
            scores = jnp.where(is_seen, jnp.einsum("bqhd,bkhd->bhqk", q, k) / size**0.5, -1e30)
            new = jnp.maximum(largest, scores.max(-1))
            weights, kept = jnp.exp(scores - new[..., None]) * is_seen, jnp.exp(largest - new)
            out = out * kept[..., None] + jnp.einsum("bhqk,bkhd->bhqd", weights, v)
            k, v = (jax.lax.ppermute(x, axis, [(i, (i + 1) % devices) for i in range(devices)]) for x in (k, v))
            return (new, total * kept + weights.sum(-1), out, k, v), None

        def start(value: float, *more: int) -> jax.Array:
            return jax.lax.pcast(jnp.full((batch, heads, length, *more), value), (axis,), to="varying")

        first = (start(-1e30), start(0.0), start(0.0, size), k, v)
        (_, total, out, _, _), _ = jax.lax.scan(hop, first, jnp.arange(devices))
        return (out / total[..., None]).swapaxes(1, 2)

    parts = P(None, axis)
    return jax.shard_map(attend, mesh=mesh, in_specs=(parts, parts, parts), out_specs=parts)


#: A mesh without devices: those are the servers'.
ATTENTION = ring_attention(AbstractMesh((CONTEXT,), ("context",), axis_types=(AxisType.Auto,)), "context")


def init(key: jax.Array) -> tuple[Any, Any]:
    """Parameters and optimizer state."""
    keys = iter(jax.random.split(key, 2 + 4 * LAYERS))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) * 0.7 * shape[0] ** -0.5

    layers = [
        {
            "qkv": normal(WIDTH, 3, HEADS, WIDTH // HEADS), "out": normal(WIDTH, WIDTH),
            "up": normal(WIDTH, 4 * WIDTH), "down": normal(4 * WIDTH, WIDTH),
        }
        for _ in range(LAYERS)
    ]  # fmt: skip
    params = {"bytes": normal(256, WIDTH), "places": normal(LENGTH, WIDTH), "layers": layers}
    return params, OPTIMIZER.init(params)


def loss_of(params: Any, batch: jax.Array) -> jax.Array:
    tokens, targets = batch[:, :-1], batch[:, 1:]
    x = params["bytes"][tokens] + params["places"]
    for layer in params["layers"]:
        q, k, v = jnp.einsum("bte,ephd->pbthd", normalize(x), layer["qkv"])
        x = x + ATTENTION(q, k, v).reshape(x.shape) @ layer["out"]
        x = x + jax.nn.gelu(normalize(x) @ layer["up"]) @ layer["down"]
    logits = normalize(x) @ params["bytes"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def normalize(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6)


def train_step(params: Any, opt_state: Any, batch: jax.Array) -> tuple[Any, Any, jax.Array]:
    """batch: bytes [BATCH, LENGTH + 1]; each predicts the next one."""
    loss, gradients = jax.value_and_grad(loss_of)(params, batch)
    updates, opt_state = OPTIMIZER.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def example_arguments() -> tuple[Any, ...]:
    """Argument types of `train_step`, for `shardwright lower`."""
    return *jax.eval_shape(init, jax.random.key(0)), jax.ShapeDtypeStruct((BATCH, LENGTH + 1), "int32")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    training, _ = text.split(text.standard_library_text())
    batches = text.batches(training, BATCH, LENGTH)
    with sw.connect() as session:
        step = session.parallelize(train_step, donate_argnums=(0, 1))
        params, opt_state = step.init(init, jax.random.key(0))
        for number in range(1, steps + 1):
            params, opt_state, loss = step(params, opt_state, *next(batches))
            if number == 1 or number % 20 == 0:
                print(f"step {number:>4}/{steps}  loss {float(loss):.4f}", flush=True)
        print(step.plan.explain())


if __name__ == "__main__":
    main()
