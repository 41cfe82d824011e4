"""What the task runner adds to a step: a task that does nothing, and twelve tasks that take 100 ms.

The first is a long list of loaded programs that hand their argument on, dispatched one after the other: the time from
one to the next. The second is a step of two stages and three micro-batches whose programs sleep: what it takes beyond
its simulation. Of several steps the median counts for the first, the fastest for the second, since whatever else the
machine does makes a step slower only.

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

from benchmarks.runtime.pipelines import WIDTH, Case, Pipeline, graph_of, sleeping
from shardwright.plans.shardings import Mesh, TensorSharding
from shardwright.server.runtime.tasks import TaskProgram
from shardwright.tasks import Task, simulate
from shardwright.xla.runtime import BoundaryArray, LoadedProgram, load_program

#: Seconds that a task which does nothing may take, by the median.
TASK_LIMIT_S = 100e-6
#: What the step of twelve tasks may take beyond its simulation, …
STEP_LIMIT = 0.05
#: … which says so many seconds.
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


class Stamped:
    """A program that keeps when it was called."""

    def __init__(self, program: LoadedProgram, outputs: int, stamps: list[float]) -> None:
        self._program = program
        self._outputs = outputs
        self._stamps = stamps

    def run(self, arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
        self._stamps.append(time.perf_counter())
        return self._program.run(arrays[:1]) * self._outputs


def task_s() -> list[float]:
    """Seconds from each task to the next, over some steps of a thousand tasks."""
    array = BoundaryArray(
        element_type="f32", shape=(WIDTH,), stored_shape=(WIDTH,), sharding=TensorSharding.replicated(1)
    )
    loaded = load_program(
        _HANDS_ON.encode(), is_serialized=False, mesh=Mesh.of({"x": 1}), arguments=[array], outputs=[array]
    )
    stamps: list[float] = []

    def program_of(task: Task, given: jax.Array) -> TaskProgram:
        del given
        return Stamped(loaded, len(task.writes), stamps)

    graph = graph_of(Case(stages=1, micro_batches=MICRO_BATCHES, schedule="1f1b"), 1.0)
    pipeline = Pipeline(graph, program_of)
    pipeline.step_s()
    results = []
    for _ in range(STEPS):
        stamps.clear()
        pipeline.step_s()
        results += [after - before for before, after in pairwise(stamps)]
    pipeline.close()
    return results


def step_s() -> tuple[float, float]:
    """Simulated and measured seconds of the step of twelve tasks."""
    case = Case(stages=2, micro_batches=3, schedule="1f1b")
    graph, pipeline = sleeping(case, STEP_S / simulate(graph_of(case, 1.0)).step_s)
    measured_s = min(pipeline.step_s() for _ in range(STEPS))
    pipeline.close()
    return simulate(graph).step_s, measured_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write all figures")
    arguments = parser.parse_args()
    tasks_s = task_s()
    simulated_s, measured_s = step_s()
    middle_s, over = median(tasks_s), measured_s / simulated_s - 1
    print(f"a task that does nothing: {middle_s * 1e6:.0f} µs (median of {len(tasks_s)}, at most {TASK_LIMIT_S:.0e} s)")
    print(
        f"a step of twelve tasks: {measured_s * 1e3:.1f} ms, simulated {simulated_s * 1e3:.1f} ms: "
        f"{over:+.1%} (at most {STEP_LIMIT:.0%})"
    )
    if arguments.json:
        figures = {"task_s": middle_s, "simulated_s": simulated_s, "measured_s": measured_s, "over": over}
        Path(arguments.json).write_text(json.dumps(figures, indent=1), encoding="utf-8")
    return 0 if middle_s <= TASK_LIMIT_S and over <= STEP_LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
