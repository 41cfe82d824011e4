"""Overhead of the task runner: of an empty task, and of a step of twelve sleeping tasks (100 ms).

The first: seconds from one task to the next in a long list of identity programs; median of several steps. The second:
a step of two stages and three micro-batches with sleeping programs, beyond its simulation; minimum of several steps,
because other load only slows a step.

    python -m benchmarks.runtime.overhead --json build/overhead.json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

import jax

from benchmarks.runtime.pipelines import WIDTH, Case, Pipeline, build_graph, build_sleeping
from shardwright.plans.shardings import Mesh, TensorSharding
from shardwright.server.runtime.tasks import TaskProgram
from shardwright.tasks import Task, simulate
from shardwright.xla.runtime import BoundaryArray, LoadedProgram, load_program

#: Maximum of the median seconds of an empty task.
TASK_LIMIT_S = 100e-6
#: Maximum of the step's seconds beyond its simulation, as a part of it.
STEP_LIMIT = 0.05
#: Simulated seconds of the step.
STEP_S = 0.1

MICRO_BATCHES = 500
STEPS = 10

_HANDS_ON = f"""
module @hands_on attributes {{mhlo.num_partitions = 1 : i32}} {{
  sdy.mesh @shardwright_mesh = <["x"=1]>
  func.func public @main(%arg0: tensor<{WIDTH}xf32>) -> tensor<{WIDTH}xf32> {{
    return %arg0 : tensor<{WIDTH}xf32>
  }}
}}
"""


class TimestampedProgram:
    """A program with a record of the times of its calls."""

    def __init__(self, program: LoadedProgram, outputs: int, stamps: list[float]) -> None:
        self._program = program
        self._outputs = outputs
        self._stamps = stamps

    def run(self, arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
        self._stamps.append(time.perf_counter())
        return self._program.run(arrays[:1]) * self._outputs


def measure_tasks_s() -> list[float]:
    """Measure the seconds from each task to the next, over some steps of a thousand tasks."""
    array = BoundaryArray(
        element_type="f32", shape=(WIDTH,), stored_shape=(WIDTH,), sharding=TensorSharding.replicated(1)
    )
    loaded = load_program(
        _HANDS_ON.encode(), is_serialized=False, mesh=Mesh.of({"x": 1}), arguments=[array], outputs=[array]
    )
    stamps: list[float] = []

    def program_of(task: Task, array_on_device: jax.Array) -> TaskProgram:
        del array_on_device
        return TimestampedProgram(loaded, len(task.writes), stamps)

    graph = build_graph(Case(stages=1, micro_batches=MICRO_BATCHES, schedule="1f1b"), 1.0)
    pipeline = Pipeline(graph, program_of)
    pipeline.step_s()
    gaps_s = []
    for _ in range(STEPS):
        stamps.clear()
        pipeline.step_s()
        gaps_s += [after - before for before, after in pairwise(stamps)]
    pipeline.close()
    return gaps_s


def measure_step_s() -> tuple[float, float]:
    """Simulate and measure the step of twelve tasks: (simulated, measured) seconds."""
    case = Case(stages=2, micro_batches=3, schedule="1f1b")
    graph, pipeline = build_sleeping(case, STEP_S / simulate(build_graph(case, 1.0)).step_s)
    measured_s = min(pipeline.step_s() for _ in range(STEPS))
    pipeline.close()
    return simulate(graph).step_s, measured_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write all figures")
    arguments = parser.parse_args()
    tasks_s = measure_tasks_s()
    simulated_s, measured_s = measure_step_s()
    middle_s, overhead = median(tasks_s), measured_s / simulated_s - 1
    print(f"a task that does nothing: {middle_s * 1e6:.0f} µs (median of {len(tasks_s)}, at most {TASK_LIMIT_S:.0e} s)")
    print(
        f"a step of twelve tasks: {measured_s * 1e3:.1f} ms, simulated {simulated_s * 1e3:.1f} ms: "
        f"{overhead:+.1%} (at most {STEP_LIMIT:.0%})"
    )
    if arguments.json:
        figures = {"task_s": middle_s, "simulated_s": simulated_s, "measured_s": measured_s, "over": overhead}
        Path(arguments.json).write_text(json.dumps(figures, indent=1), encoding="utf-8")
    return 0 if middle_s <= TASK_LIMIT_S and overhead <= STEP_LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
