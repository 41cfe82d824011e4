"""Whether `effort="measured"` keeps the fastest: all plans that it tried are timed again, in turn.

    python -m benchmarks.runtime.measured [--models tiny small] [--rounds 10] [--json build/measured.json]

Trains a GPT-2 of `examples/gpt2` on four CPU devices until its plan is settled (`small` is the quickstart's), then
makes a step of each plan in the record of the trials, with its own state, and runs them in turn: a round is some steps
of each, of which the first is not counted. Prints each plan's median of the trials and of the rounds, and what the kept
plan takes over the fastest one: round by round, because a machine is busy with other things now and then, the median of
the rounds. Exit code 1 where that is above 1.1.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
import optax

import shardwright as sw
from examples.gpt2.model import PRESETS, make_steps
from shardwright.client.tuning_record import TuningRow, read_record

#: What the kept plan may take over the fastest.
LIMIT = 1.1
STEPS_A_ROUND = 6
_PATIENCE_S = 900.0


class _Run:
    """A step with its own state."""

    def __init__(self, session: Any, model: str, **options: Any) -> None:
        config = PRESETS[model]
        init, train_step, _ = make_steps(config, optax.adamw(1e-3))
        shape = (config.batch, config.context + 1)
        self._tokens = np.random.default_rng(0).integers(0, config.vocabulary, shape, dtype=np.int32)
        self.step = session.parallelize(train_step, donate_argnums=(0, 1), **options)
        self._state = self.step.init(init, jax.random.key(0))

    def time_step(self) -> float:
        """Seconds of one step, to its loss."""
        start_s = time.perf_counter()
        *state, loss = self.step(*self._state, self._tokens)
        float(loss)
        seconds = time.perf_counter() - start_s
        self._state = tuple(state)
        return seconds


def settle(model: str) -> tuple[tuple[TuningRow, ...], float]:
    """Train until the plan is settled: the record of the trials, and the seconds that it took."""
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["SHARDWRIGHT_CACHE"] = cache
        try:
            with sw.connect(devices=4) as session:
                run = _Run(session, model, effort="measured")
                run.time_step()
                run.step.wait_for_plans(_PATIENCE_S)
                while not run.step.is_settled:
                    run.time_step()
                    if time.monotonic() > begun_s + _PATIENCE_S:
                        raise SystemExit(f"not settled: {run.step.plan_changes}")
            (record,) = Path(cache, "tuned").iterdir()
            return read_record(record), time.monotonic() - begun_s
        finally:
            del os.environ["SHARDWRIGHT_CACHE"]


def time_in_turn(model: str, rows: Sequence[TuningRow], rounds: int) -> np.ndarray:
    """Median seconds of a step, [plan, round]."""
    os.environ["SHARDWRIGHT_CACHE"] = "off"
    with sw.connect(devices=4) as session:
        runs = [_Run(session, model, **row.changes) for row in rows]
        times = np.zeros((len(runs), rounds))
        for run in runs:
            run.time_step()
        for number in range(rounds):
            order = range(len(runs)) if number % 2 == 0 else reversed(range(len(runs)))
            for index in order:
                seconds = [runs[index].time_step() for _ in range(STEPS_A_ROUND)]
                times[index, number] = median(seconds[1:])
    return times


def measure(model: str, rounds: int) -> dict[str, Any]:
    """The figures of one model, and a line for each plan."""
    rows, settled_s = settle(model)
    times = time_in_turn(model, rows, rounds)
    again_s = np.median(times, axis=1).tolist()
    (kept,) = (index for index, row in enumerate(rows) if row.is_kept)
    ratios = np.median(times[kept] / times, axis=1)
    over, over_default = float(ratios.max()), float(ratios[0])
    print(f"{model}: settled after {settled_s:.0f} s, kept / fastest {over:.3f}, kept / default {over_default:.3f}")
    print(f"  {'plan':32} {'predicted':>12} {'tried':>12} {'again':>12}")
    for row, seconds in zip(rows, again_s, strict=True):
        mark = "*" if row.is_kept else " "
        each_ms = [1e3 * value for value in (row.predicted_s, row.measured_s, seconds)]
        print(f"{mark} {row.plan:32} " + " ".join(f"{value:9.2f} ms" for value in each_ms), flush=True)
    plans = [
        {
            "plan": row.plan, "changes": dict(row.changes), "predicted_s": row.predicted_s, "tried_s": row.measured_s,
            "again_s": seconds, "kept": row.is_kept,
        }
        for row, seconds in zip(rows, again_s, strict=True)
    ]  # fmt: skip
    return {"model": model, "settled_s": settled_s, "over": over, "plans": plans}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints; 1 where a kept plan is too slow."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["tiny", "small"], choices=("tiny", "small"))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args(arguments)
    figures = [measure(model, options.rounds) for model in options.models]
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))
    return int(any(each["over"] > LIMIT for each in figures))


if __name__ == "__main__":
    raise SystemExit(main())
