"""Many clients at once, each with a program of its own: how long they wait, and what works for them.

`python -m benchmarks.bench_clients --clients 64 --steps 20`. One server of two CPU devices, embedded in this process's
child; the clients are threads of this process. Every step is read, and a counter in it says that each ran once.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil

import shardwright as sw
from shardwright.client.connection import Dialer
from shardwright.client.embedded import EmbeddedServer
from shardwright.client.session import Session
from shardwright.client.session_state import SessionState

_LOOK_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What was seen. first_s, step_s: of each client, the first step and the median of the others.

    planners, compilers: most at a time. peak_bytes, idle_bytes, after_bytes: resident memory of all processes of the
    server; master_bytes: of the master alone, before and after.
    """

    first_s: list[float]
    step_s: list[float]
    planners: int
    compilers: int
    peak_bytes: int
    idle_bytes: int
    after_bytes: int
    master_bytes: tuple[int, int]


class _Watch:
    """Looks at the server's processes again and again."""

    def __init__(self, pid: int) -> None:
        self._master = psutil.Process(pid)
        self._is_over = threading.Event()
        self._most: dict[str, int] = {"planner_child": 0, "compile_child": 0}
        self._peak_bytes = 0
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def now(self) -> tuple[int, int]:
        """(bytes of all processes, of the master)."""
        total = own = self._master.memory_info().rss
        for child in self._master.children(recursive=True):
            try:
                total += child.memory_info().rss
            except psutil.Error:
                continue
        return total, own

    def most(self, kind: str) -> int:
        return self._most[kind]

    @property
    def peak_bytes(self) -> int:
        return self._peak_bytes

    def _look(self) -> None:
        while not self._is_over.wait(_LOOK_S):
            self._peak_bytes = max(self._peak_bytes, self.now()[0])
            commands = []
            for child in self._master.children(recursive=True):
                try:
                    commands.append(" ".join(child.cmdline()))
                except psutil.Error:
                    continue
            for kind in self._most:
                self._most[kind] = max(self._most[kind], sum(kind in command for command in commands))


def _client(server: EmbeddedServer, number: int, steps: int, all_there: threading.Barrier) -> tuple[float, float]:
    """(seconds of the first step, median of the others) of one client, with its own program."""
    session = Session(SessionState(server.address, Dialer(server.token, None), None))

    def train(state: dict[str, jax.Array], x: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
        def loss_of(w: jax.Array) -> Any:
            return jnp.mean((jnp.tanh(x @ w) - number) ** 2)

        loss, gradient = jax.value_and_grad(loss_of)(state["w"])
        return {"n": state["n"] + 1, "w": state["w"] - 0.1 * gradient}, loss

    with session:
        step = session.parallelize(train, donate_argnums=0)
        state: Any = {"n": np.int32(0), "w": np.full((16, 16), 0.1, np.float32)}
        x = np.ones((8, 16), np.float32)
        times = []
        all_there.wait()
        for _ in range(steps):
            began_s = time.perf_counter()
            state, loss = step(state, x)
            float(loss)
            times.append(time.perf_counter() - began_s)
        if int(state["n"]) != steps:
            raise AssertionError(f"client {number}: {int(state['n'])} steps ran of {steps}")
    return times[0], statistics.median(times[1:])


def measure(clients: int, steps: int) -> Load:
    """Start a server, have all clients plan, compile and run at once, and end it."""
    server = EmbeddedServer(2)
    try:
        with sw.connect(server.address, token=server.token) as session:
            session.parallelize(lambda x: x + 1)(np.ones(4, np.float32)).block_until_ready()
        with _Watch(server.pid) as watch, ThreadPoolExecutor(clients) as pool:
            idle = watch.now()
            barrier = threading.Barrier(clients)
            runs = [pool.submit(_client, server, number, steps, barrier) for number in range(clients)]
            times = [run.result() for run in runs]
            time.sleep(1.0)
            after = watch.now()
    finally:
        server.close()
    return Load(
        first_s=sorted(first for first, _ in times),
        step_s=sorted(step for _, step in times),
        planners=watch.most("planner_child"),
        compilers=watch.most("compile_child"),
        peak_bytes=watch.peak_bytes,
        idle_bytes=idle[0],
        after_bytes=after[0],
        master_bytes=(idle[1], after[1]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Many clients of one server at once.")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    load = measure(options.clients, options.steps)
    median_s = statistics.median(load.first_s)
    print(f"{options.clients} clients, {options.steps} steps each, all counted right")
    print(f"first step: {load.first_s[0]:.1f} / {median_s:.1f} / {load.first_s[-1]:.1f} s (min, median, max)")
    print(f"other steps: {1e3 * statistics.median(load.step_s):.1f} ms, slowest client {1e3 * load.step_s[-1]:.1f} ms")
    print(f"at most {load.planners} planners and {load.compilers} compilers at a time")
    print(
        f"memory of all: {load.idle_bytes / 1e6:.0f} MB before, {load.peak_bytes / 1e6:.0f} MB at most, "
        f"{load.after_bytes / 1e6:.0f} MB after; master {load.master_bytes[0] / 1e6:.0f} → "
        f"{load.master_bytes[1] / 1e6:.0f} MB"
    )


if __name__ == "__main__":
    main()
