"""Ten thousand steps with killed executors: no step lost or doubled, and memory that does not grow.

Two nodes of one CPU device train a small step whose counter says how often it ran. After every thousand steps the
executor of a node drawn by a seed is killed, and the memory of the master, the daemons and the client is written down.

    python -m benchmarks.runtime.endurance [--steps 10000] [--json FILE]

Exit code 1 where the counter is wrong, or the servers or the client hold a tenth more at the end than after the first
three thousand steps.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
import psutil

from benchmarks.runtime.recovery import cluster, connect, kill_executor

NODES = 2
EVERY = 1000
#: How much more memory may be held at the end.
GROWTH_LIMIT = 0.1


def train(state: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    weights, count = state
    loss, gradient = jax.value_and_grad(lambda w: ((x @ w - 1.0) ** 2).mean())(weights)
    return (weights - 0.01 * gradient, count + 1), loss


def initial() -> tuple[jax.Array, jax.Array]:
    return jax.numpy.zeros((64, 32)), jax.numpy.zeros((), jax.numpy.int32)


def read_memory(servers: list[subprocess.Popen[bytes]]) -> dict[str, int]:
    """Resident bytes of the servers (executors begin anew after each kill, and are left out) and of this process."""
    return {
        "servers": sum(psutil.Process(server.pid).memory_info().rss for server in servers),
        "client": psutil.Process().memory_info().rss,
    }


def measure(steps: int, seed: int) -> dict[str, Any]:
    drawn = random.Random(seed)
    x = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)
    memory = []
    with cluster(NODES) as (servers, address), connect(address) as session:
        step = session.parallelize(train, donate_argnums=0, snapshot_every=50)
        state = step.init(initial)
        for number in range(1, steps + 1):
            state, loss = step(state, x)
            if number % EVERY == 0:
                float(loss)
                memory.append(read_memory(servers))
                print(
                    f"{number} steps: " + ", ".join(f"{n} {b / 2**20:.0f} MiB" for n, b in memory[-1].items()),
                    flush=True,
                )
                if number < steps:
                    kill_executor(drawn.choice(servers))
        count = int(state[1])
        recoveries = len(session.recoveries)
    return {"steps": steps, "count": count, "recoveries": recoveries, "memory": memory}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    arguments = parser.parse_args()
    figures = measure(arguments.steps, arguments.seed)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))
    before, after = figures["memory"][min(2, len(figures["memory"]) - 1)], figures["memory"][-1]
    growth = {name: after[name] / before[name] - 1.0 for name in after}
    print(
        f"{figures['count']} of {figures['steps']} steps, {figures['recoveries']} recoveries; since the first "
        f"{3 * EVERY} steps " + ", ".join(f"{name} {100 * each:+.1f} %" for name, each in growth.items())
    )
    is_good = figures["count"] == figures["steps"] and max(growth.values()) <= GROWTH_LIMIT
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
