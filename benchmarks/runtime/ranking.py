"""Does the planner rank pipelines of a real model as this machine does?

A small GPT-2 on an embedded server, for every number of stages, micro-batches and schedule of a grid: the step that the
plan predicts from the hardware profile beside the step as measured, and Spearman's rank correlation of the two.
The profile is one of separate devices, while here the devices of all stages share the machine's cores.

    python -m benchmarks.runtime.ranking --json build/ranking.json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
import optax

import shardwright as sw
from benchmarks.runtime.prediction import rank_correlation
from examples.gpt2.model import Config, init_params, make_steps
from shardwright.pipelines import PipelinePlan

CONFIG = Config(layers=4, width=128, context=64, batch=32)
DEVICES = 4

#: Steps of each plan that are measured, one of every plan in turn; the fastest counts.
ROUNDS = 8

STAGES = (2, 4)
MICRO_BATCHES = (2, 4, 8)
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")


def grid(counts: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Keywords of `parallelize`. One stage first: plain, and with gradients accumulated. counts: of micro-batches."""
    for micro_batches in (1, *counts):
        yield {"stages": 1, "micro_batches": micro_batches}
    for stages in STAGES:
        for micro_batches in counts:
            for schedule in SCHEDULES:
                if schedule != "interleaved" or 2 * stages <= CONFIG.layers:
                    yield {"stages": stages, "micro_batches": micro_batches, "schedule": schedule}


class Trained:
    """The model in training under one plan."""

    def __init__(self, session: sw.Session, how: dict[str, Any]) -> None:
        optimizer = optax.sgd(0.1)
        _, train_step, _ = make_steps(CONFIG, optimizer)
        params = init_params(CONFIG, jax.random.key(0))
        self.how = how
        self.seconds: list[float] = []
        self._step = session.parallelize(train_step, donate_argnums=(0, 1), **how)
        self._state = (params, optimizer.init(params))
        self.train()
        self.seconds.clear()

    def train(self) -> None:
        """One step, timed from the call to the loss."""
        shape = (CONFIG.batch, CONFIG.context + 1)
        tokens = np.random.default_rng(0).integers(0, CONFIG.vocabulary, shape, np.int32)
        begin_s = time.perf_counter()
        *state, loss = self._step(*self._state, tokens)
        float(loss)
        self.seconds.append(time.perf_counter() - begin_s)
        self._state = (state[0], state[1])

    @property
    def row(self) -> dict[str, Any]:
        plan = self._step.plan
        predicted_s = plan.step_s if isinstance(plan, PipelinePlan) else plan.cost.step_s
        return self.how | {"predicted_s": predicted_s, "measured_s": min(self.seconds)}


def trained(counts: Sequence[int]) -> Iterator[Trained]:
    """Every point of the grid after its rounds, which alternate between the points."""
    with sw.connect(devices=DEVICES) as session:
        points = []
        for how in grid(counts):
            print(f"compiling: {_named(how)}", file=sys.stderr, flush=True)
            try:
                points.append(Trained(session, how))
            except sw.ShardwrightError as error:
                print(f"{_named(how)}: left out: {str(error).splitlines()[0]}", flush=True)
        for _ in range(ROUNDS):
            for point in points:
                point.train()
        yield from points


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write all figures")
    parser.add_argument(
        "--micro-batches", metavar="M", type=int, nargs="+", default=MICRO_BATCHES, help="numbers that are tried"
    )
    arguments = parser.parse_args()
    rows = [point.row for point in trained(arguments.micro_batches)]
    for row in rows:
        how = _named(row)
        print(f"{how:52} predicted {row['predicted_s'] * 1e3:7.1f} ms, measured {row['measured_s'] * 1e3:7.1f} ms")
    correlation = rank_correlation(rows)
    print(f"rank correlation {correlation:.3f} over {len(rows)} plans on {os.cpu_count()} cores")
    if arguments.json:
        figures = {"rows": rows, "rank_correlation": correlation, "cores": os.cpu_count()}
        Path(arguments.json).write_text(json.dumps(figures, indent=1), encoding="utf-8")
    return 0


def _named(how: dict[str, Any]) -> str:
    stages = "one program" if how["stages"] == 1 else f"{how['stages']} stages"
    return f"{stages}, {how['micro_batches']} micro-batches{', ' + how['schedule'] if 'schedule' in how else ''}"


if __name__ == "__main__":
    sys.exit(main())
