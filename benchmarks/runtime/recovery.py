"""What a loss of a worker costs, and what snapshots cost while nothing is lost.

Four nodes of one CPU device train the quickstart's GPT-2. Two sessions take turns, one with snapshots every ten steps
and one without, in blocks of ten steps; the sums of both are compared, of seconds and of all processes' CPU seconds,
which do not count what else the machine does. Then an executor is killed: the time to the next loss is held against a
cold start of the same cluster, from its processes to its first loss. With `--master`, the master of a cluster with a
state directory is killed with -9 between steps instead, and started again: to the next loss.

    python -m benchmarks.runtime.recovery --json build/recovery.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
import psutil

import shardwright as sw
from examples.gpt2.model import PRESETS, make_steps
from examples.gpt2.train import adamw
from shardwright.server.security import free_port

NODES = 4
EVERY = 10
STEPS = 200
#: What snapshots may cost of the steps' time, …
SNAPSHOT_LIMIT = 0.05
#: … and a loss, as a multiple of a cold start and in seconds.
COLD_START_LIMIT = 1.3
LOSS_LIMIT_S = 10.0
#: What a restart of the master may cost, in seconds.
MASTER_LIMIT_S = 5.0


@contextmanager
def cluster(
    nodes: int, *, has_state: bool = False, gpu: str | None = None
) -> Iterator[tuple[list[subprocess.Popen[bytes]], str]]:
    """Servers of that many nodes, and the address of their master.

    has_state: whether it keeps its state. gpu: the hardware profile of this machine's first GPU, which is the one
    device of the one node; else a node is a CPU device.
    """
    device: dict[str, Any] = {"gpu_ids": [0]} if gpu else {"devices": 1}
    entries = [{"ip": "127.0.0.1", "port": free_port("127.0.0.1"), **device} for _ in range(nodes)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.json"
        path.write_text(json.dumps({"master": entries[0], "workers": entries[1:]} | ({"hardware": gpu} if gpu else {})))
        options = ["--state-dir", f"{folder}/state"] if has_state else []
        servers = [
            subprocess.Popen(
                [sys.executable, "-m", "shardwright.server", str(path), str(task), *options], stderr=subprocess.DEVNULL
            )
            for task in range(nodes)
        ]
        try:
            yield servers, f"127.0.0.1:{entries[0]['port']}"
        finally:
            for server in servers:
                server.terminate()
            for server in servers:
                server.wait(timeout=30)


def connect(address: str) -> sw.Session:
    while True:
        try:
            return sw.connect(address)
        except sw.ServerUnavailableError:
            time.sleep(0.1)


class Training:
    """The quickstart's loop, in a session of its own."""

    def __init__(self, address: str, snapshot_every: int | None, preset: str = "small") -> None:
        self._config = replace(PRESETS[preset], **({} if preset == "small" else {"batch": 8}))
        init, train_step, _ = make_steps(self._config, adamw(2e-3, STEPS))
        self.session = connect(address)
        self._step = self.session.parallelize(train_step, donate_argnums=(0, 1), snapshot_every=snapshot_every)
        self._state = self._step.init(init, jax.random.key(0))
        self._random = np.random.default_rng(0)

    def step(self) -> Any:
        shape = (self._config.batch, self._config.context + 1)
        tokens = self._random.integers(0, self._config.vocabulary, shape, np.int32)
        params, state, loss = self._step(*self._state, tokens)
        self._state = params, state
        return loss

    def run(self, steps: int) -> None:
        losses = [self.step() for _ in range(steps)]
        float(losses[-1])


def kill_executor(server: subprocess.Popen[bytes]) -> None:
    for child in psutil.Process(server.pid).children(recursive=True):
        if "worker.executor" in " ".join(child.cmdline()):
            child.kill()


class Stopwatch:
    """Seconds, and CPU seconds of this process and all servers."""

    def __init__(self, servers: list[subprocess.Popen[bytes]]) -> None:
        roots = [psutil.Process(), *(psutil.Process(server.pid) for server in servers)]
        self._processes = {each for root in roots for each in (root, *root.children(recursive=True))}

    def of(self, act: Callable[[], object]) -> tuple[float, float]:
        before = self._cpu_s(), time.perf_counter()
        act()
        return time.perf_counter() - before[1], self._cpu_s() - before[0]

    def _cpu_s(self) -> float:
        times = [process.cpu_times() for process in self._processes if process.is_running()]
        return sum(each.user + each.system for each in times)


def measure(steps: int, nodes: int, preset: str, gpu: str | None) -> dict[str, Any]:
    began_s = time.perf_counter()
    with cluster(nodes, gpu=gpu) as (servers, address):
        kept = Training(address, EVERY, preset)
        float(kept.step())
        cold_start_s = time.perf_counter() - began_s
        print(f"cold start {cold_start_s:.1f} s", flush=True)
        bare = Training(address, None, preset)
        for training in (kept, bare):
            training.run(EVERY)
        with_s, without_s = [], []
        stopwatch = Stopwatch(servers)
        for _ in range(steps // EVERY):
            with_s.append(stopwatch.of(lambda: kept.run(EVERY)))
            without_s.append(stopwatch.of(lambda: bare.run(EVERY)))
            print(
                f"{EVERY} steps: {with_s[-1][0]:.2f} s (CPU {with_s[-1][1]:.2f}) with, "
                f"{without_s[-1][0]:.2f} s (CPU {without_s[-1][1]:.2f}) without snapshots",
                flush=True,
            )
        snapshot_bytes = max(each.snapshot_bytes for each in kept.session.status().sessions)
        bare.session.close()
        kill_executor(servers[-1])
        began_s = time.perf_counter()
        float(kept.step())
        loss_s = time.perf_counter() - began_s
        while not kept.session.recoveries:  # it is written down after the steps were answered
            time.sleep(0.01)
        (report,) = kept.session.recoveries
        kept.session.close()
    return {
        "steps": steps,
        "with_s": with_s,
        "without_s": without_s,
        "overhead": _ratio(with_s, without_s, 0) - 1.0,
        "cpu_overhead": _ratio(with_s, without_s, 1) - 1.0,
        "snapshot_bytes": snapshot_bytes,
        "cold_start_s": cold_start_s,
        "loss_s": loss_s,
        "report": str(report),
    }


def measure_master(nodes: int, restarts: int) -> dict[str, Any]:
    """Seconds from a restart of the master to the next loss; nothing may be lost."""
    with cluster(nodes, has_state=True) as (servers, address):
        training = Training(address, None)
        training.run(EVERY)
        generation = training.session.status().nodes[0].generation
        restart_s = []
        for _ in range(restarts):
            servers[0].kill()
            servers[0].wait()
            began_s = time.perf_counter()
            servers[0] = subprocess.Popen(servers[0].args, stderr=subprocess.DEVNULL)
            float(training.step())
            restart_s.append(time.perf_counter() - began_s)
            training.run(EVERY)
            print(f"restart of the master to the next step: {restart_s[-1]:.2f} s", flush=True)
        is_same = training.session.status().nodes[0].generation == generation
        training.session.close()
    return {"restart_s": restart_s, "same_executors": is_same}


def _ratio(these: list[tuple[float, float]], those: list[tuple[float, float]], column: int) -> float:
    return sum(each[column] for each in these) / sum(each[column] for each in those)


def _report_master(arguments: argparse.Namespace) -> int:
    figures = measure_master(arguments.nodes, arguments.master)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))
    worst_s = max(figures["restart_s"])
    lost = "nothing was lost" if figures["same_executors"] else "executors were replaced"
    print(f"next step {worst_s:.1f} s after a restart of the master (limit {MASTER_LIMIT_S:.0f} s), {lost}")
    return 0 if worst_s <= MASTER_LIMIT_S and figures["same_executors"] else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--nodes", type=int, default=NODES)
    parser.add_argument("--preset", choices=list(PRESETS), default="small", help="of GPT-2; others than small: batch 8")
    parser.add_argument("--gpu", metavar="PROFILE", help="this machine's first GPU, of this hardware, instead of nodes")
    parser.add_argument("--master", type=int, metavar="TIMES", help="restart the master so many times instead")
    arguments = parser.parse_args()
    if arguments.master:
        return _report_master(arguments)
    nodes = 1 if arguments.gpu else arguments.nodes
    figures = measure(arguments.steps, nodes, arguments.preset, arguments.gpu)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))
    step_s = sum(seconds for seconds, _ in figures["without_s"]) / figures["steps"]
    costs = [
        f"{100 * figures[kind]:+.1f} % of {of}" for kind, of in (("overhead", "time"), ("cpu_overhead", "CPU time"))
    ]
    print(
        f"snapshots every {EVERY} of {figures['steps']} steps of {1000 * step_s:.0f} ms: {', '.join(costs)} "
        f"(limit {100 * SNAPSHOT_LIMIT:.0f} %), {figures['snapshot_bytes'] / 2**20:.1f} MiB in host memory"
    )
    ratio = figures["loss_s"] / figures["cold_start_s"]
    print(
        f"kill to next step {figures['loss_s']:.1f} s (limit {LOSS_LIMIT_S:.0f} s), {ratio:.2f} of a cold start of "
        f"{figures['cold_start_s']:.1f} s (limit {COLD_START_LIMIT})\n{figures['report']}"
    )
    is_good = figures["overhead"] <= SNAPSHOT_LIMIT and figures["loss_s"] <= LOSS_LIMIT_S and ratio <= COLD_START_LIMIT
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
