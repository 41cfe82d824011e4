"""What optimizer state on the host leaves on the devices, planned and as XLA:GPU compiles it without a GPU.

The step is a stack of feed-forward layers in bfloat16 with AdamW on eight H100, fully sharded. It is planned and
compiled without moments (plain gradient descent), with them on the devices and on the host; of each: the predicted step
and its transfers, the predicted peak, and the peak as compiled, both a device.

    python -m benchmarks.planner.offload [--layers 24] [--width 2048] [--json FILE]    # make gpu-packages first
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # programs are lowered here, for GPUs that are not

import jax
import jax.numpy as jnp
import optax

import shardwright as sw
from shardwright.clusters.cluster import Cluster
from shardwright.xla import CompileService
from shardwright.xla.compilers import find_compiler

DEVICES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One way to keep the state. Bytes are a device's."""

    state: str
    step_s: float
    compute_s: float
    communication_s: float
    transfers_s: float
    peak_bytes: int
    host_bytes: int
    compiled_peak_bytes: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=2048, help="of the batch, a device")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    ways = {
        "none": (optax.sgd(1e-3), "none"),
        "on the devices": (optax.adamw(1e-3), "none"),
        "on the host": (optax.adamw(1e-3), "optimizer"),
    }
    rows = [measure(state, *way, arguments) for state, way in ways.items()]
    for row in rows:
        print(_describe(row))
    without, _, offloaded = rows
    ratio = offloaded.compiled_peak_bytes / without.compiled_peak_bytes
    print(f"moments on the host: {ratio:.3f} of the compiled peak without moments")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


def measure(state: str, optimizer: optax.GradientTransformation, offload: str, arguments: argparse.Namespace) -> Row:
    """Plan the step with this optimizer, and compile it."""
    text = _lower(optimizer, arguments)
    plan: Any = sw.plan(text, _cluster(), cache=False, mesh=str(DEVICES), force="fsdp", offload=offload, remat="none")
    compiler = find_compiler("h100", DEVICES)
    with CompileService(DEVICES, children=1, compiler=compiler) as service:
        program = service.compile(plan.require_hlo(), plan, want_executable=False)
    return Row(
        state=state,
        step_s=plan.cost.step_s,
        compute_s=plan.cost.compute_s,
        communication_s=plan.cost.communication_s,
        transfers_s=plan.cost.transfers_s,
        peak_bytes=plan.memory.peak_bytes,
        host_bytes=plan.memory.host_arguments_bytes,
        compiled_peak_bytes=program.memory.peak_bytes,
    )


def _lower(optimizer: optax.GradientTransformation, arguments: argparse.Namespace) -> str:
    width, shape = arguments.width, jax.ShapeDtypeStruct

    @jax.checkpoint
    def layer(hidden: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return hidden + jax.nn.gelu(hidden @ up.astype(hidden.dtype)) @ down.astype(hidden.dtype)

    def loss_of(params: Any, batch: jax.Array) -> jax.Array:
        hidden = batch.astype(jnp.bfloat16)
        for up, down in params:
            hidden = layer(hidden, up, down)
        return (hidden.astype(jnp.float32) ** 2).mean()

    def step(params: Any, state: Any, batch: jax.Array) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = [
        (shape((width, 4 * width), jnp.float32), shape((4 * width, width), jnp.float32))
        for _ in range(arguments.layers)
    ]
    batch = shape((DEVICES * arguments.rows, width), jnp.float32)
    state = jax.eval_shape(optimizer.init, params)
    return sw.lower(step, params, state, batch, platform="cuda", donate_argnums=(0, 1)).hlo_text


def _cluster() -> Cluster:
    """A node of H100 on NVLink."""
    node = {"ip": "127.0.0.1", "port": 2222, "gpu_ids": [*range(DEVICES)]}
    description = {"hardware": "h100", "insecure": True, "links": {"intra_node": "nvlink-4"}, "master": node}
    return Cluster.from_json(json.dumps(description), for_planning=True)


def _describe(row: Row) -> str:
    parts = f"{row.compute_s * 1e3:.1f} compute + {row.communication_s * 1e3:.1f} communication"
    return (
        f"moments {row.state:14}: step {row.step_s * 1e3:.1f} ms = {parts} + {row.transfers_s * 1e3:.1f} transfers; "
        f"peak {row.peak_bytes / 1e9:.3f} GB, host {row.host_bytes / 1e9:.3f} GB; "
        f"compiled {row.compiled_peak_bytes / 1e9:.3f} GB"
    )


if __name__ == "__main__":
    main()
