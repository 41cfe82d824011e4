"""The master is killed with -9 and started again over its state directory; clients see a pause."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import psutil
import pytest

import shardwright as sw
from tests.recovery.node_network import NodeNetwork
from tests.recovery.small_disk import full_disk, small_disk
from tests.recovery.training import Outcome, assert_same, batches, initial, later, run, slow_train, train
from tests.server.raw_client import ROOT, Server, all_gone, command_of, wait_until
from tests.server.test_processes import free_port

pytestmark = pytest.mark.cluster

STEPS = 16
GRACE_S = 40.0


class Cluster:
    """Nodes of two devices; the master keeps its state, and may be killed and started again.

    network: where the nodes are; else all are on loopback. sizes: more keys of the cluster file.
    """

    def __init__(
        self, folder: Path, nodes: int, *options: str, network: NodeNetwork | None = None, **sizes: int
    ) -> None:
        self._network = network
        hosts = [network.address_of(node) if network else "127.0.0.1" for node in range(nodes)]
        entries = [{"ip": host, "port": free_port(), "devices": 2} for host in hosts]
        self._file = folder / "cluster.json"
        protection = {"insecure": True} if network else {}
        self._file.write_text(json.dumps({"master": entries[0], "workers": entries[1:], **protection, **sizes}))
        self._options = ("--state-dir", str(folder / "state"), "--grace", str(GRACE_S), *options)
        self.address = f"{hosts[0]}:{entries[0]['port']}"
        self.servers = [self._make_server(task) for task in range(nodes)]
        self.session = self.connect()

    def _make_server(self, task: int) -> Server:
        prefix = self._network.command(task) if self._network else ()
        return Server(str(self._file), str(task), *self._options, prefix=prefix)

    def connect(self, **options: object) -> sw.Session:
        opened: list[sw.Session] = []

        def is_open() -> bool:
            try:
                opened.append(sw.connect(self.address, **options))  # type: ignore[arg-type]
            except sw.ServerUnavailableError:
                return False
            return True

        wait_until(is_open, timeout_s=90)
        return opened[0]

    def processes(self) -> list[psutil.Process]:
        """All servers of the cluster: the daemon of the master's node is a child of nobody after a restart."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            if str(self._file) in (process.info["cmdline"] or ()):
                found += [process, *process.children(recursive=True)]
        return list({process.pid: process for process in found}.values())

    def executors(self) -> list[psutil.Process]:
        return [each for each in self.processes() if "shardwright.server.worker.executor" in command_of(each)]

    def kill_executors(self) -> None:
        for process in self.executors():
            process.kill()

    def kill_server(self, task: int) -> None:
        self.servers[task].process.kill()
        self.servers[task].end()

    def start_server(self, task: int) -> None:
        self.servers[task] = self._make_server(task)

    def kill_master(self) -> None:
        self.kill_server(0)

    def restart_master(self) -> None:
        self.kill_master()
        self.start_server(0)

    def stop(self) -> None:
        self.session._state.close_quietly()
        processes = self.processes()
        for server in self.servers:
            server.stop()
        for process in processes:
            if process.is_running():
                process.kill()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("restarts"), 2)
    yield cluster
    cluster.stop()


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> Outcome:
    return run(cluster.session, STEPS)


@pytest.fixture
def session(cluster: Cluster) -> Iterator[sw.Session]:
    session = cluster.connect()
    yield session
    session._state.close_quietly()
    wait_until(lambda: cluster.session.status().state == "ready", 90)


def test_between_steps_and_twice_in_a_row(cluster: Cluster, session: sw.Session, undisturbed: Outcome) -> None:
    def disturb(number: int) -> None:
        if number == 8:
            cluster.restart_master()
            cluster.restart_master()
        if number == 12:
            cluster.restart_master()

    assert_same(run(session, STEPS, snapshot_every=3, after_call=disturb), undisturbed)
    assert session.status().recovered_sessions >= 2


def test_in_a_step(cluster: Cluster, session: sw.Session) -> None:
    expected = run(cluster.session, 8, function=slow_train)

    def disturb(number: int) -> None:
        if number == 5:
            later(0.1, cluster.restart_master)

    assert_same(run(session, 8, function=slow_train, snapshot_every=3, after_call=disturb), expected)


def test_executors_are_taken_up(cluster: Cluster, session: sw.Session, undisturbed: Outcome) -> None:
    """No snapshot is asked for: arrays are where they were."""
    generation = session.status().nodes[0].generation

    def disturb(number: int) -> None:
        if number in (5, 9, 10):
            cluster.restart_master()

    assert_same(run(session, STEPS, after_call=disturb), undisturbed)
    status = session.status()
    assert status.has_adopted
    assert {node.generation for node in status.nodes} == {generation}
    assert not session.recoveries


def test_while_clients_wait(cluster: Cluster, session: sw.Session) -> None:
    """For a step, for one behind it, for a plan, for an array."""
    x = np.ones((8, 16), np.float32)
    slow = session.parallelize(slow_train)
    state = slow.init(initial, jax.random.key(0))
    expected = float(slow(state, x)[1])
    with cluster.connect() as second, cluster.connect(name="waits") as third:
        double = second.parallelize(lambda x: x * 2)
        doubled = double(x)
        waits: dict[str, Callable[[], object]] = {
            "step": lambda: float(slow(state, x)[1]) == expected,
            "behind": lambda: bool((np.asarray(double(x + 1)) == x * 2 + 2).all()),
            "array": lambda: bool((np.asarray(doubled) == x * 2).all()),
            "plan": lambda: bool((np.asarray(third.parallelize(lambda x: x - 3)(x)) == x - 3).all()),
        }
        with ThreadPoolExecutor(len(waits)) as threads:
            results = {what: threads.submit(wait) for what, wait in waits.items()}
            time.sleep(0.1)
            cluster.restart_master()
            assert {what: result.result(90) for what, result in results.items()} == dict.fromkeys(waits, True)
        assert session.status().has_adopted


def test_in_a_save(cluster: Cluster, session: sw.Session, tmp_path: Path) -> None:
    step = session.parallelize(train, donate_argnums=0)
    state = step.init(lambda key: initial(key, 1 << 18), jax.random.key(0))
    state, _ = step(state, np.ones((8, 16), np.float32))
    expected = np.asarray(state[0])
    save = session.save(state, tmp_path / "checkpoints", step=1)
    time.sleep(0.05)
    cluster.restart_master()
    state, _ = step(state, np.ones((8, 16), np.float32))
    save.wait()
    assert session.checkpoints(tmp_path / "checkpoints") == (1,)
    restored = session.restore(tmp_path / "checkpoints", step=1)
    np.testing.assert_array_equal(restored[0], expected)


def test_in_a_plan_and_in_an_upload(cluster: Cluster, session: sw.Session) -> None:
    factor = np.random.default_rng().random()
    timer = later(0.5, cluster.restart_master)
    step = session.parallelize(lambda x: (x * factor).sum() / factor)
    large = np.ones((64 << 20) // 4, np.float32)
    assert float(step(large)) == pytest.approx(large.size, rel=1e-3)
    timer.join()
    for moment_s in (0.02, 0.1):
        timer = later(moment_s, cluster.restart_master)
        for _ in range(4):
            assert float(step(large)) == pytest.approx(large.size, rel=1e-3)
        timer.join()


def test_executors_that_died_with_the_master(cluster: Cluster, session: sw.Session, undisturbed: Outcome) -> None:
    def disturb(number: int) -> None:
        if number == 9:
            wait_until(lambda: any(each.snapshot for each in session.status().sessions))
            cluster.kill_executors()
            cluster.restart_master()

    assert_same(run(session, STEPS, snapshot_every=3, after_call=disturb), undisturbed)
    assert len(session.recoveries) == 1


def test_without_snapshots_their_loss_is_told_in_the_same_session(cluster: Cluster, session: sw.Session) -> None:
    step = session.parallelize(train, donate_argnums=0)
    x = np.ones((8, 16), np.float32)
    state, loss = step(step.init(initial, jax.random.key(0)), x)
    first = float(loss)
    cluster.kill_master()
    cluster.kill_executors()
    cluster.start_server(0)
    with pytest.raises(sw.WorkerLostError):
        float(step(state, x)[1])
    _, loss = step(step.init(initial, jax.random.key(0)), x)
    assert float(loss) == first


@pytest.fixture
def cluster_on_small_disk(tmp_path: Path) -> Iterator[tuple[Cluster, Path]]:
    with small_disk(tmp_path, 16 << 20) as disk:
        if not disk.is_mount():  # only root may mount one
            pytest.skip("this process may not mount a disk")
        cluster = Cluster(disk, 2)
        yield cluster, disk
        cluster.stop()


def test_a_full_disk_of_its_state_costs_nothing_that_runs(cluster_on_small_disk: tuple[Cluster, Path]) -> None:
    """New programs are refused meanwhile; what was decided meanwhile is written as soon as there is room."""
    cluster, disk = cluster_on_small_disk
    expected = run(cluster.session, STEPS)
    with cluster.connect() as session:
        step = session.parallelize(train, donate_argnums=0)
        state, losses, inputs = step.init(initial, jax.random.key(0)), [], list(batches(STEPS))

        def go_on(count: int) -> None:
            nonlocal state
            for x in inputs[len(losses) : len(losses) + count]:
                state, loss = step(state, x)
                losses.append(float(loss))

        go_on(4)
        with full_disk(disk):
            go_on(4)
            large = np.random.default_rng(1).random(1 << 20, np.float32)
            shift = session.parallelize(lambda x: x + large)
            with pytest.raises(sw.StateStoreError, match=r"disk is full.*\n.*free space"):
                shift(large)
            go_on(2)
        np.testing.assert_array_equal(shift(large), large + large)
        cluster.restart_master()
        go_on(6)
        np.testing.assert_array_equal(shift(large), large + large)
        assert losses == expected.losses
        assert not session.recoveries


CLIENT = """
import itertools, sys
import jax, numpy as np
import shardwright as sw
from tests.recovery.training import batches, initial, train

address, name, steps, die_after, every = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])
session = sw.connect(address, name=name, snapshot_every=every or None)
step = session.parallelize(train, donate_argnums=0)
resumed = session.resume()
state, done = (step.init(initial, jax.random.key(0)), 0) if resumed is None else (resumed.state, resumed.updates)
session.keep(state)
print("resumed", done, resumed is not None and resumed.is_live, flush=True)
for number, x in enumerate(itertools.islice(batches(steps), done, None), start=done + 1):
    state, loss = step(state, x)
    if number == die_after:
        float(loss)
        print("ready", flush=True)
        sys.stdin.readline()
weights, momentum, count = (np.asarray(leaf) for leaf in state)
print("end", int(count), float(loss), weights.sum().item().hex(), momentum.sum().item().hex(), flush=True)
session.close()
"""


def client(cluster: Cluster, name: str, steps: int, die_after: int, every: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CLIENT, cluster.address, name, *map(str, (steps, die_after, every))],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip


def lines(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stdout is not None
    return iter(process.stdout.readline, "")


def test_a_new_process_takes_the_session_up(cluster: Cluster) -> None:
    """Once with live arrays, once from the newest snapshot; the master is restarted in between as well."""
    whole = list(lines(client(cluster, "whole", STEPS, 0, 0)))
    assert whole[0] == "resumed 0 False\n"
    first = client(cluster, "run-7", STEPS, 6, 3)
    assert [next(lines(first)), next(lines(first))] == ["resumed 0 False\n", "ready\n"]
    first.kill()
    cluster.restart_master()
    second = client(cluster, "run-7", STEPS, 11, 3)
    assert [next(lines(second)), next(lines(second))] == ["resumed 6 True\n", "ready\n"]
    wait_until(lambda: any(each.name == "run-7" and each.snapshot > 6 for each in cluster.session.status().sessions))
    second.kill()
    cluster.kill_executors()
    third = client(cluster, "run-7", STEPS, 0, 3)
    said = list(lines(third))
    resumed, done, is_live = said[0].split()
    assert (resumed, is_live) == ("resumed", "False")
    assert 6 <= int(done) <= 11
    assert said[-1] == whole[-1], "the end is that of one undisturbed program, bit for bit"
    assert "run-7" not in {each.name for each in cluster.session.status().sessions}, "it was closed"


@pytest.mark.parametrize(
    ("options", "sizes"), [((), {}), (("--rejoin-grace", "1"), {"min_nodes": 1})], ids=["fixed", "elastic"]
)
def test_without_a_master_everything_ends_after_the_grace(
    tmp_path: Path, options: tuple[str, ...], sizes: dict[str, int]
) -> None:
    cluster = Cluster(tmp_path, 2, "--grace", "6", "--wait", "6", *options, **sizes)
    wait_until(lambda: len(cluster.executors()) == 2, timeout_s=60)  # an elastic one begins with one node
    wait_until(lambda: cluster.session.status().state == "ready", timeout_s=60)
    x = np.ones(4, np.float32)
    np.testing.assert_array_equal(cluster.session.parallelize(lambda x: x + 1)(x), x + 1)
    processes = cluster.processes()
    assert len(processes) >= 5
    cluster.kill_master()
    time.sleep(1)
    assert len(cluster.executors()) == 2, "they wait for a master"
    wait_until(lambda: all_gone(processes), timeout_s=60)
    cluster.session._state.close_quietly()
    cluster.stop()
