"""A better plan while a step runs: when the first step was there, the switch, and what was measured.

    python -m benchmarks.runtime.background [--layers 6] [--width 512] [--batch 32] [--json build/background.json]
    python -m benchmarks.runtime.background --plan-layers 12 96

The step is a wide perceptron with a small batch on eight CPU devices: data parallelism, the first plan, sends all
gradients, which is most of its step. It is trained until the better plan is kept, or has gone again, beside
single-device JAX. The second form plans GPT-2 124M with so many layers on 8 A100: seconds from parsing to the first
plan, of which the planner's process has used the CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np

import shardwright as sw

#: What the losses may differ over the switch.
LOSS_LIMIT = 1e-5
#: The search for the benchmark's model takes seconds.
LIMIT_S = 600.0
_ENDS = ("kept", "went back", "no better plan", "search ended")


def measure(layers: int, width: int, batch: int) -> dict[str, Any]:
    """Trains until the plan is settled: seconds of the first step, changes of the plan, the largest loss difference."""

    def init(key: Any) -> list[jax.Array]:
        return [jax.random.normal(each, (width, width)) / width**0.5 for each in jax.random.split(key, layers)]

    def train(params: list[jax.Array], x: Any, y: Any) -> tuple[list[jax.Array], jax.Array]:
        def loss_of(weights: list[jax.Array]) -> jax.Array:
            values = x
            for weight in weights:
                values = jnp.tanh(values @ weight)
            return jnp.mean((values - y) ** 2)

        loss, gradients = jax.value_and_grad(loss_of)(params)
        return [weight - 0.1 * gradient for weight, gradient in zip(params, gradients, strict=True)], loss

    random = np.random.default_rng(0)
    x, y = (random.normal(size=(batch, width)).astype(np.float32) for _ in range(2))
    expected, alone = init(jax.random.key(0)), jax.jit(train)
    largest, first_step_s = 0.0, 0.0
    with sw.connect(devices=8) as session:
        step = session.parallelize(train, donate_argnums=0, background=True)
        params = step.init(init, jax.random.key(0))
        begun_s = time.monotonic()
        after = 0
        while after < 5 and time.monotonic() - begun_s < LIMIT_S:
            params, loss = step(params, x, y)
            expected, wanted = alone(expected, x, y)
            largest = max(largest, abs(float(loss) - float(wanted)))
            first_step_s = first_step_s or time.monotonic() - begun_s
            after += bool(step.plan_changes) and step.plan_changes[-1].kind in _ENDS
        changes = step.plan_changes
    return {
        "layers": layers, "width": width, "batch": batch, "first_step_s": first_step_s,
        "changes": [asdict(change) | {"text": str(change)} for change in changes], "loss_difference": largest,
    }  # fmt: skip


def time_first_plan(layers: int) -> dict[str, Any]:
    """Seconds from the end of parsing to the first plan of GPT-2, checked and ready to be compiled."""
    from benchmarks.planner.planned import lower
    from benchmarks.planner.suite import Entry, cluster_json
    from shardwright.clusters.cluster import Cluster
    from shardwright.planner.clock import Clock
    from shardwright.planner.graph.source import Source
    from shardwright.planner.planning import plan_step

    entry = Entry(model="gpt2", size="124M", devices=8, changes={"layers": layers})
    source = Source(lower(entry).hlo_text)
    assert source.module, "parsed ahead of what is timed"
    cluster = Cluster.from_json(cluster_json(entry.devices, entry.machine))
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    plan = plan_step(source, cluster, clock=Clock(takes_first=True))
    return {
        "layers": layers, "wall_s": time.perf_counter() - wall_s, "cpu_s": time.process_time() - cpu_s,
        "mesh": str(getattr(plan, "mesh", "a pipeline")),
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints; 1 where the losses differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--plan-layers", type=int, nargs="+", metavar="N", help="time first plans of GPT-2 instead")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args(arguments)
    figures: dict[str, Any]
    if options.plan_layers:
        figures = {"first_plans": [time_first_plan(layers) for layers in options.plan_layers]}
        for each in figures["first_plans"]:
            print(f"{each['layers']:4} layers: {each['wall_s']:.1f} s, {each['cpu_s']:.1f} s of CPU, {each['mesh']}")
    else:
        figures = measure(options.layers, options.width, options.batch)
        print(f"first step after {figures['first_step_s']:.1f} s")
        print("\n".join(change["text"] for change in figures["changes"]))
        print(f"losses differ by at most {figures['loss_difference']:.1e}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))
    return int(figures.get("loss_difference", 0.0) > LOSS_LIMIT)


if __name__ == "__main__":
    sys.exit(main())
