"""Ten GPT-2 steps on servers beside the same ten under single-device JAX, under several plans.

    make numbers          (or: python -m oracles.numerics --only processes --layers 4)

Servers: the embedded one (one process, 8 devices) and two processes of 4 devices each. Plans: the planner's own and the
forced ones. Optimizers: SGD and AdamW. Parameters under SGD must agree within 1e-5 of each tensor's norm. Under AdamW
the distance may be twice that of stock `jax.jit` with the same shardings: Adam divides by the root of a second moment,
and rounding noise of a zero gradient becomes a step of full size. Prints JSON; exit code 1 if a bar is missed.
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import argparse
import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import shardwright as sw
from benchmarks.bench_step import jit_with_plan
from examples.common import text
from examples.gpt2.model import Config, make_steps

ROOT = Path(__file__).resolve().parents[1]
LOSS_BAR = 1e-5
NORM_BAR = 1e-5
#: Floor of a stock distance in the ratio: below it, single roundings decide.
NOISE = 1e-6
FORCES: dict[str, dict[str, Any]] = {
    "planner": {},
    "data": {"force": "data"},
    "tensor": {"force": "tensor"},
    "mixed 2x4": {"force": "mixed", "mesh": "2x4"},
    "fsdp": {"force": "fsdp"},
}
OPTIMIZERS = {"sgd": lambda: optax.sgd(0.1), "adamw": lambda: optax.adamw(1e-3)}


@contextlib.contextmanager
def start_two_processes() -> Iterator[str]:
    """Address of a cluster of two server processes with four CPU devices each."""
    ports = []
    for _ in range(2):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            ports.append(probe.getsockname()[1])
    nodes = [{"ip": "127.0.0.1", "port": port, "devices": 4} for port in ports]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.json"
        path.write_text(json.dumps({"master": nodes[0], "workers": nodes[1:]}))
        command = [sys.executable, "-m", "shardwright.server", str(path)]
        servers = [subprocess.Popen([*command, str(index)], cwd=ROOT, stderr=subprocess.DEVNULL) for index in range(2)]
        try:
            wait_for_listener(ports[0])
            yield f"127.0.0.1:{ports[0]}"
        finally:
            for server in servers:
                server.terminate()
            for server in servers:
                server.wait()


def wait_for_listener(port: int, patience_s: float = 60.0) -> None:
    """Wait until the master listens. Sessions then wait at the master for its workers."""
    deadline_s = time.monotonic() + patience_s
    while time.monotonic() < deadline_s:
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.1)
    raise TimeoutError(f"no master on port {port} after {patience_s:.0f} s")


def relative_distances(ours: Any, theirs: Any) -> list[float]:
    """Per tensor, the norm of the difference over the norm of the second."""
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    arrays = ((np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs)
    return [float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-12)) for a, b in arrays]


def train(step: Any, state: Any, batches: list[np.ndarray]) -> tuple[Any, list[float]]:
    """Parameters after the batches, and the loss of each step."""
    losses = []
    for batch in batches:
        *state, loss = step(*state, batch)
        losses.append(float(loss))
    return jax.tree.map(np.asarray, state[0]), losses


def build_stock_step(plan: Any, init: Any, train_step: Any) -> tuple[Any, Any]:
    """`jax.jit` of the step, and its initial state, with the plan's shardings."""
    step, state = jit_with_plan(plan, init, train_step)
    # The initializer itself runs on one device: only the steps are compared.
    return step, jax.device_put(jax.jit(init)(jax.random.key(0)), state)


def compare(session: Any, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row per optimizer and plan."""
    config = Config(layers=arguments.layers)
    values, _ = text.split(text.standard_library_text())
    source = text.batches(values, batch=16, context=config.context)
    batches = [tokens for (tokens,) in islice(source, arguments.steps)]
    for optimizer, make in OPTIMIZERS.items():
        init, train_step, _ = make_steps(config, make())
        expected, expected_losses = train(jax.jit(train_step), jax.jit(init)(jax.random.key(0)), batches)
        for force, options in FORCES.items():
            step = session.parallelize(train_step, donate_argnums=(0, 1), **options)
            params, losses = train(step, step.init(init, jax.random.key(0)), batches)
            loss_distance = max(abs(a - b) for a, b in zip(losses, expected_losses, strict=True))
            errors = relative_distances(params, expected)
            row = {"optimizer": optimizer, "plan": force, "mesh": str(step.plan.mesh)}
            row |= {"loss": loss_distance, "parameters": max(errors)}
            passed = loss_distance <= LOSS_BAR
            if optimizer == "adamw":
                stock_params, _ = train(*build_stock_step(step.plan, init, train_step), batches)
                stock_errors = relative_distances(stock_params, expected)
                row["stock_parameters"] = max(stock_errors)
                row["worst_ratio"] = max(a / max(b, NOISE) for a, b in zip(errors, stock_errors, strict=True))
                passed = passed and row["worst_ratio"] <= 2
            else:
                passed = passed and max(errors) <= NORM_BAR
            yield row | {"passed": passed}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--only", choices=("embedded", "processes"))
    arguments = parser.parse_args()
    rows = []
    for server in [arguments.only] if arguments.only else ["embedded", "processes"]:
        with contextlib.ExitStack() as stack:
            address = stack.enter_context(start_two_processes()) if server == "processes" else None
            session = stack.enter_context(sw.connect(address, devices=8))
            for row in compare(session, arguments):
                rows.append({"server": server} | row)
                print(json.dumps(rows[-1]), flush=True)
    return 0 if all(row["passed"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
