"""Rank correlation of predicted and measured steps of a real model's pipelines on this machine.

A small GPT-2 on an embedded server, for every number of stages, micro-batches and schedule of a grid: predicted and
measured step, and Spearman's rank correlation of the two.

The hardware profile assumes eight busy devices, each with an eighth of two cores. Here fewer devices share the machine,
and a waiting one leaves its part to the others: a bubble costs nothing. "shared" predicts this: the work of all
devices, spread over all cores.

Measured steps run with this process and the server in a real-time class, if the system permits (as root). Devices of a
program wait for each other; without it other jobs delay them by far more than their share.

    python -m benchmarks.runtime.ranking --json build/ranking.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
import optax
import psutil

import shardwright as sw
from benchmarks.runtime.prediction import rank_correlation
from examples.gpt2.model import Config, init_params, make_steps
from shardwright.plans.pipeline_plan import PipelinePlan

CONFIG = Config(layers=4, width=128, context=64, batch=32)
DEVICES = 4

#: Cores of a device of the `cpu` profile: eight share two.
CORES_A_DEVICE = 2 / 8

#: Measured steps of each plan, one of every plan in turn; the minimum counts.
ROUNDS = 8

STAGES = (2, 4)
MICRO_BATCHES = (2, 4, 8)
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")


def list_options(counts: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Keywords of `parallelize`. One stage first: plain, and with gradients accumulated. counts: of micro-batches."""
    for micro_batches in (1, *counts):
        yield {"stages": 1, "micro_batches": micro_batches}
    for stages in STAGES:
        for micro_batches in counts:
            for schedule in SCHEDULES:
                if schedule != "interleaved" or 2 * stages <= CONFIG.layers:
                    yield {"stages": stages, "micro_batches": micro_batches, "schedule": schedule}


class TrainingRun:
    """The model in training under one plan."""

    def __init__(self, session: sw.Session, how: dict[str, Any]) -> None:
        optimizer = optax.sgd(0.1)
        _, train_step, _ = make_steps(CONFIG, optimizer)
        params = init_params(CONFIG, jax.random.key(0))
        self.how = how
        self.seconds: list[float] = []
        self._server = find_server(session)
        self.cpu_seconds: list[float] = []
        self._step = session.parallelize(train_step, donate_argnums=(0, 1), **how)
        self._state = (params, optimizer.init(params))
        self.train()
        self.seconds.clear()
        self.cpu_seconds.clear()

    def train(self) -> None:
        """Run one step; records seconds from the call to the loss, and the server's CPU seconds."""
        shape = (CONFIG.batch, CONFIG.context + 1)
        tokens = np.random.default_rng(0).integers(0, CONFIG.vocabulary, shape, np.int32)
        begin_s, begin_cpu_s = time.perf_counter(), _measure_cpu_s(self._server)
        *state, loss = self._step(*self._state, tokens)
        float(loss)
        self.seconds.append(time.perf_counter() - begin_s)
        self.cpu_seconds.append(_measure_cpu_s(self._server) - begin_cpu_s)
        self._state = (state[0], state[1])

    @property
    def row(self) -> dict[str, Any]:
        plan = self._step.plan
        if isinstance(plan, PipelinePlan):
            predicted_s = plan.step_s
            work_s = sum(stage.busy_s * stage.mesh.device_count for stage in plan.stages)
        else:
            predicted_s = plan.cost.step_s
            work_s = predicted_s * plan.mesh.device_count
        return self.how | {
            "predicted_s": predicted_s,
            "shared_s": work_s * CORES_A_DEVICE / (os.cpu_count() or 1),
            "measured_s": min(self.seconds),
            "cpu_s": statistics.median(self.cpu_seconds),
        }


def find_server(session: sw.Session) -> psutil.Process:
    assert session._state.server is not None
    return psutil.Process(session._state.server.pid)


def _list_family(process: psutil.Process) -> list[psutil.Process]:
    return [process, *process.children(recursive=True)]


def _measure_cpu_s(process: psutil.Process) -> float:
    """CPU seconds of a process and its children so far."""
    return sum(sum(relative.cpu_times()[:2]) for relative in _list_family(process))


@contextlib.contextmanager
def run_in_real_time(server: psutil.Process) -> Iterator[bool]:
    """Run client and server in a real-time class; yields whether the system permits it."""
    threads = [thread.id for process in (psutil.Process(), *_list_family(server)) for thread in process.threads()]
    try:
        for thread in threads:
            os.sched_setscheduler(thread, os.SCHED_FIFO, os.sched_param(1))
    except OSError:
        yield False
        return
    try:
        yield True
    finally:
        for thread in threads:
            with contextlib.suppress(OSError):  # ended meanwhile
                os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))


def train_grid(counts: Sequence[int]) -> Iterator[TrainingRun]:
    """Train every point of the grid, in alternating rounds."""
    with sw.connect(devices=DEVICES) as session:
        points = []
        for how in list_options(counts):
            print(f"compiling: {_describe(how)}", file=sys.stderr, flush=True)
            try:
                points.append(TrainingRun(session, how))
            except sw.ShardwrightError as error:
                print(f"{_describe(how)}: left out: {str(error).splitlines()[0]}", flush=True)
        with run_in_real_time(find_server(session)) as is_real_time:
            for _ in range(ROUNDS):
                for point in points:
                    point.train()
        if not is_real_time:
            print("other jobs of this machine count: not allowed to run before them", file=sys.stderr)
        yield from points


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write all figures")
    parser.add_argument(
        "--micro-batches", metavar="M", type=int, nargs="+", default=MICRO_BATCHES, help="numbers that are tried"
    )
    arguments = parser.parse_args()
    rows = [point.row for point in train_grid(arguments.micro_batches)]
    for row in rows:
        times = (f"{name} {row[f'{name}_s'] * 1e3:6.1f} ms" for name in ("predicted", "shared", "measured", "cpu"))
        print(f"{_describe(row):44} {', '.join(times)}")
    correlations = {name: rank_correlation(rows, f"{name}_s") for name in ("predicted", "shared", "cpu")}
    cores = os.cpu_count()
    text = ", ".join(f"{name} {value:.3f}" for name, value in correlations.items())
    print(f"rank correlation with the measured step: {text}; {len(rows)} plans on {cores} cores")
    if arguments.json:
        figures = {"rows": rows, "rank_correlations": correlations, "cores": cores}
        Path(arguments.json).write_text(json.dumps(figures, indent=1), encoding="utf-8")
    return 0


def _describe(how: dict[str, Any]) -> str:
    stages = "one program" if how["stages"] == 1 else f"{how['stages']} stages"
    return f"{stages}, {how['micro_batches']} micro-batches{', ' + how['schedule'] if 'schedule' in how else ''}"


if __name__ == "__main__":
    sys.exit(main())
