"""A training step through the embedded server beside the same step under plain `jax.jit`.

    make bench            (or: python -m benchmarks.bench_step --rounds 20)

Both run on eight CPU devices with the shardings of the same plan; the batch starts as a numpy
array and the step ends when the loss is a Python float. Rounds alternate between the two: other
load on the machine hits both. Prints JSON; exit code 1 if the server takes max(5 %, 2 ms) longer.
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax

import shardwright as sw
from examples.common import text
from examples.gpt2.model import Config, make_steps
from examples.mlp import train as mlp

ALLOWED_RATIO = 0.05
ALLOWED_S = 2e-3


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step `(params, opt_state, *batch) -> (params, opt_state, loss)`, its initializer and its batches."""

    name: str
    init: Callable[[jax.Array], Any]
    train_step: Callable[..., Any]
    batches: Iterator[tuple[np.ndarray, ...]]


def make_gpt2_case() -> Case:
    config = Config()
    init, train_step, _ = make_steps(config, optax.adamw(1e-3))
    values, _ = text.split(text.standard_library_text())
    batches = text.batches(values, batch=16, context=config.context)
    return Case(name="gpt2", init=init, train_step=train_step, batches=batches)


def make_mlp_case() -> Case:
    random = np.random.default_rng(0)
    batches = iter(lambda: mlp.spirals(random), None)
    return Case(name="mlp", init=mlp.init, train_step=mlp.train_step, batches=batches)


class ServerRunner:
    """Steps through an embedded server."""

    def __init__(self, case: Case, session: Any) -> None:
        self.step = session.parallelize(case.train_step, donate_argnums=(0, 1))
        self.state = self.step.init(case.init, jax.random.key(0))
        self.run(next(case.batches))

    def run(self, batch: tuple[np.ndarray, ...]) -> float:
        *self.state, loss = self.step(*self.state, *batch)
        return float(loss)


def jit_with_plan(plan: Any, init: Any, train_step: Any, donate_argnums: tuple[int, ...] = ()) -> tuple[Any, Any]:
    """(`jax.jit` of the step with the plan's shardings, the shardings of `init`'s state)."""
    shardings = plan.shardings()
    count = len(jax.eval_shape(init, jax.random.key(0)))
    step = jax.jit(
        train_step,
        in_shardings=shardings.arguments,
        out_shardings=shardings.results,
        donate_argnums=donate_argnums,
    )
    return step, shardings.arguments[:count]


class StockRunner:
    """The same step under `jax.jit`, arguments and results with the plan's shardings."""

    def __init__(self, case: Case, plan: Any) -> None:
        self.step, state_shardings = jit_with_plan(plan, case.init, case.train_step, donate_argnums=(0, 1))
        self.state = jax.jit(case.init, out_shardings=state_shardings)(jax.random.key(0))
        self.run(next(case.batches))

    def run(self, batch: tuple[np.ndarray, ...]) -> float:
        *self.state, loss = self.step(*self.state, *batch)
        return float(loss)


def time_steps(runner: ServerRunner | StockRunner, batches: list[tuple[np.ndarray, ...]]) -> list[float]:
    """Seconds of each step, from the numpy batch to the loss as a float."""
    times = []
    for batch in batches:
        started_s = time.perf_counter()
        runner.run(batch)
        times.append(time.perf_counter() - started_s)
    return times


def measure(case: Case, rounds: int, steps: int) -> dict[str, Any]:
    """Medians of both over `rounds` alternating rounds of `steps` steps each."""
    with sw.connect(devices=8) as session:
        server = ServerRunner(case, session)
        stock = StockRunner(case, server.step.plan)
        runners: dict[str, ServerRunner | StockRunner] = {"server": server, "jit": stock}
        times: dict[str, list[float]] = {"server": [], "jit": []}
        for number in range(rounds):
            batches = [next(case.batches) for _ in range(steps)]
            order = list(runners) if number % 2 else list(runners)[::-1]
            for name in order:
                runners[name].run(batches[0])  # the other one's caches are cold now
                times[name] += time_steps(runners[name], batches)
    return summarize(case.name, times, str(server.step.plan.mesh))


def summarize(name: str, times: dict[str, list[float]], mesh: str) -> dict[str, Any]:
    server_s, jit_s = (statistics.median(times[key]) for key in ("server", "jit"))
    difference_s = server_s - jit_s
    return {
        "model": name,
        "mesh": mesh,
        "steps_each": len(times["jit"]),
        "server_ms": round(server_s * 1e3, 3),
        "jit_ms": round(jit_s * 1e3, 3),
        "difference_ms": round(difference_s * 1e3, 3),
        "difference_percent": round(100 * difference_s / jit_s, 2),
        "passed": difference_s <= max(ALLOWED_RATIO * jit_s, ALLOWED_S),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each in a round")
    parser.add_argument("--only", choices=("gpt2", "mlp"))
    arguments = parser.parse_args()
    makers = {"gpt2": make_gpt2_case, "mlp": make_mlp_case}
    chosen = [arguments.only] if arguments.only else list(makers)
    results = [measure(makers[name](), arguments.rounds, arguments.steps) for name in chosen]
    print(json.dumps({"cpus": os.cpu_count(), "jax": jax.__version__, "results": results}, indent=2))
    return 0 if all(result["passed"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
