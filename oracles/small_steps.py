"""Small training steps on 8 CPU devices: each plan's gap, its proof, and its numbers beside `jax.jit`'s.

    python -m oracles.small_steps                     # all 26 (4 minutes)
    python -m oracles.small_steps --steps policy,ctc --devices 6
    python -m oracles.small_steps --memory 0.5        # in half of what data parallelism takes
    python -m oracles.small_steps --on a100           # compiled for eight of them, or of tpu-v5e, without a device

With --on, each step is lowered and planned for those devices, and compiled by their compiler (`make gpu-packages`,
`make tpu-packages`); exit code 1 where it refuses one. Whether collectives and memory are as predicted is shown, and no
bar: `oracles.memory` and `benchmarks` hold those of larger steps.

Else exit code 1 on a gap of more than 1 %, a broken proof, or a result further from single-device JAX's than a
hundredth of its norm (two steps compute in half precision).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import shardwright as sw
from shardwright.clusters.cluster import Cluster
from shardwright.errors import MemoryBudgetError
from shardwright.xla.compilers import COMPILERS
from workloads.small_steps import SMALL_STEPS
from workloads.small_steps.made import Step

GAP_BAR = 0.01
NUMBERS_BAR = 0.01


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", default=",".join(SMALL_STEPS), help="(default: all)")
    parser.add_argument("--devices", type=int, default=8, help="CPU devices (default: %(default)s)")
    parser.add_argument(
        "--memory", type=float, metavar="PART", help="of what data parallelism takes (default: no limit)"
    )
    parser.add_argument("--on", choices=sorted(COMPILERS), help="compile for these devices, and run nothing")
    arguments = parser.parse_args()
    if arguments.on:
        return compile_steps(arguments.steps.split(","), arguments.on, arguments.devices)
    table = Table("step", "mesh", "gap", "planned in CPU s", "proof", "numbers apart")
    missed = 0
    with sw.connect(devices=arguments.devices) as session:
        for name in arguments.steps.split(","):
            row, is_met = check_step(SMALL_STEPS[name](), session, arguments.devices, arguments.memory)
            table.add_row(name, *row)
            missed += not is_met
    Console(width=100).print(table)
    return int(missed > 0)


def check_step(step: Step, session: sw.Session, devices: int, memory: float | None) -> tuple[list[str], bool]:
    """A row of the table, and whether every bar is met.

    memory: limit as a part of data parallelism's peak memory; None: no limit.
    """
    text = sw.lower(step.function, *step.arguments).as_text()
    memory_options = {} if memory is None else make_memory_options(text, devices, memory)
    began = time.process_time()
    try:
        plan = sw.plan(text, devices, cache=False, **memory_options)
    except MemoryBudgetError:
        return ["nothing fits", "", f"{time.process_time() - began:.1f}", "", ""], True
    planned_s = time.process_time() - began
    result = session.parallelize(step.function, **memory_options)(*step.arguments)
    proof, error = plan.prove(), max_relative_distance(jax.jit(step.function)(*step.arguments), result)
    row = [
        str(plan.mesh),
        f"{plan.cost.gap:.2%}",
        f"{planned_s:.1f}",
        "holds" if proof.holds else "differs",
        f"{error:.1e}",
    ]
    return row, plan.cost.gap <= GAP_BAR and proof.holds and error <= NUMBERS_BAR


def compile_steps(names: Sequence[str], on: str, devices: int) -> int:
    """Print what the compiler of `on` makes of each step's plan. Returns 1 where it refuses one."""
    platform = COMPILERS[on].platform
    cluster = Cluster(name=on, platform=platform, hardware=on, nodes=Cluster.local(devices).nodes)
    table = Table("step", "mesh", "compiler", "collectives", "temporaries")
    refused = 0
    for name in names:
        step = SMALL_STEPS[name]()
        text = sw.lower(step.function, *step.arguments, platform=platform).hlo_text
        plan = sw.plan(text, cluster, cache=False, stages=1)
        assert isinstance(plan, sw.Plan)
        row = [name, str(plan.mesh)]
        try:
            proof = plan.prove(on=on)
        except sw.CompilationError as error:
            refused += 1
            row += [f"refuses: {error.message[:200]}", "", ""]
        else:
            assert proof.memory is not None
            memory = proof.memory
            row += ["compiles", "as planned" if proof.holds else f"{proof.difference:.0%} apart"]
            row += [f"{memory.predicted_temporaries_bytes}, {memory.compiled_temporaries_bytes}"]
        table.add_row(*row)
        print(*row, sep=" | ", flush=True)
    Console(width=110).print(table)
    return int(refused > 0)


def make_memory_options(text: str, devices: int, part: float) -> dict[str, Any]:
    """Options of a plan: one program, in this part of data parallelism's peak memory."""
    data = sw.plan(text, devices, cache=False, force="data", mesh=str(devices), stages=1)
    return {"memory_budget": round(part * data.memory.peak_bytes), "stages": 1}


def max_relative_distance(expected: Any, result: Any) -> float:
    """Distance of two trees of arrays: the largest ||a - b|| / ||a|| of a floating-point tensor."""
    pairs = zip(map(np.asarray, jax.tree.leaves(expected)), map(np.asarray, jax.tree.leaves(result)), strict=True)
    return max(_relative_distance(a.astype(np.float64), b.astype(np.float64)) for a, b in pairs if a.dtype.kind == "f")


def _relative_distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / (np.linalg.norm(a) or 1.0))


if __name__ == "__main__":
    sys.exit(main())
