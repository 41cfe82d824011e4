"""Five steps of every kind of model under every schedule and number of stages, beside single-device JAX.

    make check-programs          (or: python -m oracles.pipeline_programs --only gpt2 --schedule 1f1b)

Programs, tasks and layouts run in this process, without servers: each stage has a mesh of CPU devices of its own.
The loss must agree within 1e-5, parameters within 1e-5 of each tensor's norm (SGD with momentum), and every program
must have exactly the collectives of its plan. Prints a line of JSON a case; exit code 1 if a bar is missed.
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from itertools import product

import jax
import numpy as np

from shardwright.plans.pipeline_plan import PipelinePlan
from shardwright.report.proof import prove
from shardwright.xla.compiling import compile_planned
from tests.planner.pipeline import cases
from tests.planner.pipeline.executor import Executor
from tests.planner.pipeline.planned import pipeline

BAR = 1e-5
STEPS = 5
MICRO_BATCHES = 4

#: Models by number of chunks.
MODELS: dict[str, Callable[[int], cases.Case]] = {
    "gpt2": lambda chunks: cases.gpt2(chunks, layers=chunks),
    "gpt2-dropout": lambda chunks: cases.gpt2(chunks, layers=chunks, dropout=0.2),
    "tied": cases.tied,
    "moe": lambda chunks: cases.moe(chunks, layers=chunks),
    "wide-resnet": lambda chunks: cases.wide_resnet(chunks, layers=chunks),
    "unet": cases.unet,
}

SCHEDULES = ("gpipe", "1f1b", "2f2b", "interleaved", "zero-bubble")


def measure_distances(case: cases.Case, plan: PipelinePlan) -> tuple[float, float]:
    """Train beside single-device JAX: (largest |a - b| of a loss, largest ||a - b|| / ||b|| of a tensor)."""
    step, arguments, donated = case
    reference = jax.jit(step)
    flat = jax.tree.leaves(arguments)
    state = len(jax.tree.leaves(arguments[: len(donated)]))
    executor, ours, theirs = Executor(plan), list(flat), arguments
    loss, tensor = 0.0, 0.0
    for _ in range(STEPS):
        result, expected = executor.step(ours), reference(*theirs)
        for a, b in zip(result, map(np.asarray, jax.tree.leaves(expected)), strict=True):
            if b.ndim:
                tensor = max(tensor, float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-6)))
            else:
                loss = max(loss, float(abs(a - b)))
        ours = result[:state] + flat[state:]
        theirs = (*expected[: len(donated)], *arguments[len(donated) :])
    return loss, tensor


def list_unproven(plan: PipelinePlan) -> list[str]:
    """Names of programs with other collectives than their plan's."""
    return [
        program.name
        for program in plan.programs
        if not prove(
            program.plan, compile_planned(program.plan.require_hlo(), program.plan, want_executable=False).collectives
        ).holds
    ]


def list_cases(only: str, schedule: str) -> Iterator[tuple[str, str, int]]:
    """(model, schedule, stages)."""
    for model, way, stages in product(MODELS, SCHEDULES, (2, 4)):
        if (only in model or not only) and schedule in ("", way):
            yield model, way, stages


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="models whose name has this in it")
    parser.add_argument("--schedule", default="", help="one schedule")
    parser.add_argument("--proof", action="store_true", help="hold every program's collectives against XLA's too")
    options = parser.parse_args()
    failed = 0
    for model, schedule, stages in list_cases(options.only, options.schedule):
        chunks = 2 if schedule == "interleaved" else 1
        start = time.perf_counter()
        case = MODELS[model](stages * chunks)
        plan = pipeline(
            case, stages=stages, chunks=chunks, micro_batches=MICRO_BATCHES, schedule=schedule, devices=8 // stages
        )
        loss, tensor = measure_distances(case, plan)
        wrong = list_unproven(plan) if options.proof else []
        holds = loss <= BAR and tensor <= BAR and not wrong
        failed += not holds
        row = {"model": model, "schedule": schedule, "stages": stages, "holds": holds, "loss": loss, "tensor": tensor}
        print(json.dumps({**row, "unproven": wrong, "seconds": round(time.perf_counter() - start, 1)}), flush=True)
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
