"""Training on three nodes under seeded schedules of faults: losses and final state stay what they were, bit for bit.

    python -m tests.recovery.soak --schedules 200 --seed 0

One cluster serves all schedules; each is a session of its own, whose connections go through proxies. Victims are
executors, servers, the master, its planner and compiler (killed as the kernel does for want of memory, too), the
client's network and, where this process may make namespaces and mounts, a node's network and the disk of checkpoints;
they are met while a program is planned or compiled, arrays are sent, steps and pipelines run, and checkpoints are
written. Afterwards every node is ready again, and the newest checkpoint is of the step that its number says.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import psutil

import shardwright as sw
from shardwright.client.checkpoints import Save
from shardwright.client.session import Session
from shardwright.client.session_state import SessionState
from shardwright.clusters.local_token import read_or_make_token
from tests.faults.test_outages import ProxiedDialer
from tests.recovery.node_network import NodeNetwork
from tests.recovery.small_disk import full_disk, small_disk
from tests.recovery.test_restarted_master import Cluster
from tests.recovery.training import batches, deep_initial, deep_train, initial, slow_train, train
from tests.server.raw_client import command_of, wait_until

STEPS = 16
NODES = 3
#: Bytes of the disk that checkpoints are written to, where this process may mount one.
DISK_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class Training:
    """A step of (state, batch), what makes its state from a key, and options of `parallelize`."""

    step: Callable[..., Any]
    initial: Callable[[jax.Array], Any]
    options: dict[str, Any] = field(default_factory=dict)


TRAININGS = {
    "program": Training(train, initial),
    "slow program": Training(slow_train, initial),
    "pipeline": Training(deep_train, deep_initial, {"stages": 2, "micro_batches": 4}),
}

#: Losses of all steps, and the leaves of the state after the last.
Outcome = tuple[list[float], list[np.ndarray]]


def run_training(
    session: sw.Session,
    training: Training,
    after_call: Callable[[int, sw.Step, Any], None] = lambda number, step, state: None,
    **options: Any,
) -> Outcome:
    """A user's loop. after_call: is told of each call when it has been sent; of 0 before the first."""
    step = session.parallelize(training.step, donate_argnums=0, **training.options, **options)
    state, losses = step.init(training.initial, jax.random.key(0)), []
    after_call(0, step, state)
    for number, x in enumerate(batches(STEPS), start=1):
        state, loss = step(state, x)
        losses.append(loss)
        after_call(number, step, state)
    return [float(loss) for loss in losses], [np.asarray(leaf) for leaf in jax.tree.leaves(state)]


class Schedule:
    """What is done to one training: actions after calls, or before the first, some of them a moment later."""

    def __init__(self, seed: int, cluster: Cluster, disk: Path, network: NodeNetwork | None) -> None:
        self.random = random.Random(seed)
        self.cluster = cluster
        self.network = network
        self.disk = disk
        self.training = self.random.choice(list(TRAININGS))
        self.actions: list[str] = []
        self._folder = disk / str(seed)
        self._threads: list[threading.Thread] = []
        self._dialer = ProxiedDialer(read_or_make_token(int(cluster.address.rpartition(":")[2])))
        self._has_lost_server = False
        kinds = [self._kill_executor, self._freeze_executor, self._kill_server, self._kill_master, self._kill_child,
                 self._cut_network]  # fmt: skip
        kinds += [self._cut_node] if network else []
        kinds += [self._fill_disk] if disk.is_mount() else []
        count = self.random.randint(1, 3)
        self._due = {self.random.randrange(0, STEPS - 1): self.random.choice(kinds) for _ in range(count)}
        self._due_saves = {self.random.randrange(1, STEPS) for _ in range(self.random.randint(0, 2))}
        self._saves: list[Save] = []

    def run(self, undisturbed: Outcome) -> None:
        with Session(SessionState(self.cluster.address, self._dialer, None)) as session:
            snapshot_every = self.random.randint(2, 5)
            training = TRAININGS[self.training]
            outcome = run_training(session, training, self._after_call, snapshot_every=snapshot_every)
            for thread in self._threads:
                thread.join()
            assert outcome[0] == undisturbed[0]
            for leaf, expected in zip(outcome[1], undisturbed[1], strict=True):
                np.testing.assert_array_equal(leaf, expected)
            self._check_checkpoints(session)
        for proxy in self._dialer.proxies.values():
            proxy.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        wait_until(lambda: self.cluster.session.status().state == "ready", 90)

    def _after_call(self, number: int, step: sw.Step, state: Any) -> None:
        if number in self._due_saves:
            self.actions.append(f"save {number}")
            with contextlib.suppress(sw.CheckpointError):  # of the save before it, on a full disk
                self._saves.append(step.save(state, self._folder, step=number))
        self._act(number)

    def _check_checkpoints(self, session: sw.Session) -> None:
        for save in self._saves:
            with contextlib.suppress(sw.CheckpointError, sw.WorkerLostError):  # a full disk, or lost with a worker
                save.wait()
        with contextlib.suppress(sw.WorkerLostError):  # of a save that was lost with a worker
            for number in session.checkpoints(self._folder) if self._folder.exists() else ():
                *_, count = session.restore(self._folder, step=number)
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

    def _cut_node(self) -> str:
        """From all others, for less or more than the silence after which it counts as lost."""
        assert self.network is not None
        node = self.random.randrange(NODES)
        seconds = self.random.choice([self.random.uniform(0.2, 3.0), self.random.uniform(6.0, 9.0)])
        self.network.cut(node)
        time.sleep(seconds)
        self.network.mend(node)
        return f"node {node} cut off for {seconds:.1f} s"

    def _fill_disk(self) -> str:
        with full_disk(self.disk):
            time.sleep(self.random.uniform(0.0, 2.0))
        return "disk full"

    def _signal(self, processes: list[psutil.Process], number: signal.Signals, text: str) -> str:
        if not processes:
            return f"no {text}"
        victim = self.random.choice(processes)
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim.pid, number)
        return text


@contextmanager
def node_network() -> Iterator[NodeNetwork | None]:
    """A network of the cluster's own, or None where this process may not make one."""
    network = NodeNetwork(NODES) if NodeNetwork.is_possible() else None
    try:
        yield network
    finally:
        if network:
            network.close()


def run_schedules(seeds: range, folder: Path, tell: Callable[[str], None]) -> None:
    """Raises AssertionError, with the seed and what was done, at the first difference."""
    with small_disk(folder, DISK_BYTES) as disk, node_network() as network:
        cluster = Cluster(folder, NODES, "--silence", "5", network=network)
        try:
            undisturbed = {name: run_training(cluster.session, each) for name, each in TRAININGS.items()}
            for seed in seeds:
                start_s = time.monotonic()
                schedule = Schedule(seed, cluster, disk, network)
                try:
                    schedule.run(undisturbed[schedule.training])
                except Exception as error:
                    raise AssertionError(f"seed {seed}, {schedule.training} ({', '.join(schedule.actions)})") from error
                done = ", ".join(schedule.actions)
                tell(f"seed {seed}: {time.monotonic() - start_s:.0f} s, {schedule.training}: {done}")
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
