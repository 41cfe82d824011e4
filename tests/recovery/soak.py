"""Training on three nodes under seeded schedules of faults: losses and final state stay what they were, bit for bit.

    python -m tests.recovery.soak --schedules 200 --seed 0

One cluster serves all schedules; each is a session of its own, whose connections go through proxies. Victims are
executors, servers, the master, its planner and compiler, and the network; they are met while a program is planned or
compiled, arrays are sent, steps run, and checkpoints are written. Afterwards every node is ready again, and the newest
checkpoint is of the step that its number says.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import psutil

import shardwright as sw
from shardwright.client.session import Session
from shardwright.client.session_state import SessionState
from shardwright.clusters.local_token import read_or_make_token
from tests.faults.test_outages import ProxiedDialer
from tests.recovery.test_restarted_master import Cluster
from tests.recovery.training import Outcome, assert_same, batches, initial, run, slow_train, train
from tests.server.raw_client import command_of, wait_until

STEPS = 16
NODES = 3
#: Of a program, in order: what is undisturbed is run once.
FUNCTIONS = {"train": train, "slow train": slow_train}


class Schedule:
    """What is done to one training: actions after calls, or before the first, some of them a moment later."""

    def __init__(self, seed: int, cluster: Cluster, folder: Path) -> None:
        self.random = random.Random(seed)
        self.cluster = cluster
        self.folder = folder / f"checkpoints-{seed}"
        self.function = self.random.choice(list(FUNCTIONS))
        self.actions: list[str] = []
        self._threads: list[threading.Thread] = []
        self._dialer = ProxiedDialer(read_or_make_token(int(cluster.address.rpartition(":")[2])))
        self._has_lost_server = False
        kinds = [self._kill_executor, self._freeze_executor, self._kill_server, self._kill_master, self._kill_child,
                 self._cut_network]  # fmt: skip
        count = self.random.randint(1, 3)
        self._due = {self.random.randrange(0, STEPS - 1): self.random.choice(kinds) for _ in range(count)}
        self._saves = {self.random.randrange(1, STEPS) for _ in range(self.random.randint(0, 2))}

    def run(self, undisturbed: Outcome) -> None:
        with Session(SessionState(self.cluster.address, self._dialer, None)) as session:
            outcome = self._train(session)
            for thread in self._threads:
                thread.join()
            assert_same(outcome, undisturbed)
            self._check_checkpoints(session)
        for proxy in self._dialer.proxies.values():
            proxy.close()
        wait_until(lambda: self.cluster.session.status().state == "ready", 90)

    def _train(self, session: sw.Session) -> Outcome:
        options = {"snapshot_every": self.random.randint(2, 5)}
        step = session.parallelize(FUNCTIONS[self.function], donate_argnums=0, **options)
        state, losses = step.init(initial, jax.random.key(0)), []
        self._act(0)
        for number, x in enumerate(batches(STEPS), start=1):
            state, loss = step(state, x)
            losses.append(loss)
            if number in self._saves:
                self.actions.append(f"save {number}")
                step.save(state, self.folder, step=number)
            self._act(number)
        weights, momentum, count = (np.asarray(leaf) for leaf in state)
        return Outcome([float(loss) for loss in losses], weights, momentum, int(count))

    def _check_checkpoints(self, session: sw.Session) -> None:
        with contextlib.suppress(sw.WorkerLostError):  # of a save that was lost with a worker
            for number in session.checkpoints(self.folder) if self.folder.exists() else ():
                *_, count = session.restore(self.folder, step=number)
                assert int(count) == number

    # ---- actions ----
    def _act(self, call: int) -> None:
        act = self._due.get(call)
        if act is None:
            return
        delay_s = self.random.choice([0.0, 0.0, self.random.uniform(0.0, 0.3), self.random.uniform(0.3, 1.5)])
        thread = threading.Thread(target=self._act_later, args=(act, delay_s), daemon=True)
        self._threads.append(thread)
        thread.start()
        if not delay_s:
            thread.join()

    def _act_later(self, act: Callable[[], str], delay_s: float) -> None:
        time.sleep(delay_s)
        self.actions.append(act())

    def _kill_executor(self) -> str:
        return self._signal(self.cluster.executors(), signal.SIGKILL, "executor killed")

    def _freeze_executor(self) -> str:
        return self._signal(self.cluster.executors(), signal.SIGSTOP, "executor frozen")

    def _kill_child(self) -> str:
        modules = ("planner_child", "compile_child")
        children = [each for each in self.cluster.processes() if any(name in command_of(each) for name in modules)]
        return self._signal(children, signal.SIGKILL, "planner or compiler killed")

    def _kill_server(self) -> str:
        """One of a worker, once: two neighbours that die take a snapshot along."""
        if self._has_lost_server:
            return "no server killed"
        self._has_lost_server = True
        task = self.random.randrange(1, NODES)
        self.cluster.kill_server(task)
        time.sleep(self.random.uniform(0.0, 2.0))
        self.cluster.start_server(task)
        return f"server {task} killed"

    def _kill_master(self) -> str:
        self.cluster.kill_master()
        time.sleep(self.random.uniform(0.0, 2.0))
        self.cluster.start_server(0)
        return "master killed"

    def _cut_network(self) -> str:
        proxies = list(self._dialer.proxies.values())
        for proxy in proxies:
            proxy.cut()
        seconds = self.random.uniform(0.2, 3.0)
        time.sleep(seconds)
        for proxy in proxies:
            proxy.mend()
        return f"network cut for {seconds:.1f} s"

    def _signal(self, processes: list[psutil.Process], number: signal.Signals, text: str) -> str:
        if not processes:
            return f"no {text}"
        victim = self.random.choice(processes)
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim.pid, number)
        return text


def run_schedules(seeds: range, folder: Path, tell: Callable[[str], None]) -> None:
    """Raises AssertionError, with the seed and what was done, at the first difference."""
    cluster = Cluster(folder, NODES, "--silence", "5")
    try:
        undisturbed = {name: run(cluster.session, STEPS, function=each) for name, each in FUNCTIONS.items()}
        for seed in seeds:
            start_s = time.monotonic()
            schedule = Schedule(seed, cluster, folder)
            try:
                schedule.run(undisturbed[schedule.function])
            except Exception as error:
                raise AssertionError(f"seed {seed}, {schedule.function} ({', '.join(schedule.actions)})") from error
            done = ", ".join(schedule.actions)
            tell(f"seed {seed}: {time.monotonic() - start_s:.0f} s, {schedule.function}: {done}")
        processes = cluster.processes()
    finally:
        cluster.stop()
    wait_until(lambda: not any(process.is_running() for process in processes), 30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--schedules", type=int, default=200, help="how many (200)")
    parser.add_argument("--seed", type=int, default=0, help="the first one's seed (0)")
    arguments = parser.parse_args()
    seeds = range(arguments.seed, arguments.seed + arguments.schedules)
    with tempfile.TemporaryDirectory() as folder:
        run_schedules(seeds, Path(folder), lambda text: print(text, flush=True))


if __name__ == "__main__":
    main()
