"""Executors and daemons of a real cluster are killed; the loss curve is that of the undisturbed run, bit for bit."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import shardwright as sw
from tests.client.clusters import start_nodes
from tests.recovery.training import Outcome, assert_same, batches, initial, later, run, slow_train, train
from tests.server.raw_client import Server, all_gone, wait_until

pytestmark = pytest.mark.cluster

STEPS = 24
SLOW_STEPS = 12


class Cluster:
    """Two nodes of two devices; a worker may be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.servers, self.session = start_nodes(folder, [2, 2])
        self._file = str(folder / "cluster.json")

    def kill_executor(self, node: int = 1) -> None:
        for executor in self.servers[node].executors():
            executor.kill()

    def restart_worker(self) -> None:
        """The daemon of node 1 is killed, its executor ends with it, and it is started again."""
        family = self.servers[1].family()
        self.servers[1].process.kill()
        self.servers[1].end()
        wait_until(lambda: all_gone(family))
        self.servers[1] = Server(self._file, "1")

    def connect(self) -> sw.Session:
        return sw.connect(self.session._state.master.address)

    def run_undisturbed(self, steps: int, **options: Any) -> Outcome:
        """In a session of its own: one that stays open has its programs loaded again after each loss."""
        with self.connect() as session:
            return run(session, steps, **options)

    @property
    def generation(self) -> int:
        return self.session.status().nodes[1].generation

    def stop(self) -> None:
        self.session._state.close_quietly()
        for server in self.servers:
            server.stop()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("recovery"))
    yield cluster
    cluster.stop()


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> Outcome:
    return cluster.run_undisturbed(STEPS)


@pytest.fixture(scope="module")
def slow_undisturbed(cluster: Cluster) -> Outcome:
    return cluster.run_undisturbed(SLOW_STEPS, function=slow_train)


@pytest.fixture
def session(cluster: Cluster) -> Iterator[sw.Session]:
    """A client of its own: protection is a session's."""
    session = cluster.connect()
    yield session
    session._state.close_quietly()
    wait_until(lambda: cluster.session.status().state == "ready", 60)


def snapshot_of(session: sw.Session) -> int:
    """Number of the newest complete snapshot; 0: none."""
    mine = session.info.session_id
    return next(each.snapshot for each in session.status().sessions if mine.startswith(each.session_id))


@pytest.mark.parametrize("node", [0, 1])
def test_a_killed_executor(
    cluster: Cluster, session: sw.Session, undisturbed: Outcome, caplog: pytest.LogCaptureFixture, node: int
) -> None:
    def disturb(number: int) -> None:
        if number == 12:
            wait_until(lambda: snapshot_of(session))
            cluster.kill_executor(node)

    with caplog.at_level(logging.WARNING, logger="shardwright"):
        assert_same(run(session, STEPS, snapshot_every=5, after_call=disturb), undisturbed)
    (report,) = session.recoveries
    assert f"node {node}" in report.loss
    assert report.snapshot_step >= 5
    assert report.restored_bytes > 0
    assert 0 < report.replayed_steps <= 12
    assert str(report) in caplog.text


def test_before_the_first_snapshot_all_is_run_again_from_the_initializer(
    cluster: Cluster, session: sw.Session, undisturbed: Outcome
) -> None:
    def disturb(number: int) -> None:
        if number == 3:
            cluster.kill_executor()

    assert_same(run(session, STEPS, snapshot_every=100, after_call=disturb), undisturbed)
    assert [report.restored_bytes for report in session.recoveries] == [0]


def test_a_worker_that_is_killed_and_started_again(cluster: Cluster, session: sw.Session) -> None:
    """State is split over the nodes: what the dead daemon held, the other one has as well."""

    def disturb(number: int) -> None:
        if number == 13:
            wait_until(lambda: snapshot_of(session))
            cluster.restart_worker()

    outcome = run(session, STEPS, snapshot_every=4, after_call=disturb, force="fsdp")
    assert_same(outcome, cluster.run_undisturbed(STEPS, force="fsdp"))
    (report,) = session.recoveries
    assert re.match(r"node 1 .* was lost: its daemon ended", report.loss), report.loss
    assert report.restored_bytes > 0


def test_in_a_step(cluster: Cluster, session: sw.Session, slow_undisturbed: Outcome) -> None:
    def disturb(number: int) -> None:
        if number == 6:  # it is under way, and will be for a while
            cluster.kill_executor()

    outcome = run(session, SLOW_STEPS, function=slow_train, snapshot_every=3, after_call=disturb)
    assert_same(outcome, slow_undisturbed)
    assert len(session.recoveries) == 1


def test_twice_again_while_steps_are_replayed(cluster: Cluster, session: sw.Session, slow_undisturbed: Outcome) -> None:
    began = cluster.generation

    def is_replaying(generation: int) -> bool:
        status = cluster.session.status()
        is_running = any(each.running_steps for each in status.sessions)
        return status.nodes[1].generation > generation and status.state == "ready" and is_running

    def kill_again(generation: int) -> None:
        wait_until(lambda: is_replaying(generation), 90)
        cluster.kill_executor()

    def disturb(number: int) -> None:
        if number == 9:
            cluster.kill_executor()
            for passed in range(2):
                later(0.0, partial(kill_again, began + passed))

    outcome = run(session, SLOW_STEPS, function=slow_train, snapshot_every=4, after_call=disturb)
    assert_same(outcome, slow_undisturbed)
    assert cluster.generation >= began + 3
    assert len(session.recoveries) <= 3


def test_during_a_snapshot(cluster: Cluster, session: sw.Session) -> None:
    size = 1 << 17  # 8 MiB of weights, and as much of momentum

    def disturb(number: int) -> None:
        if number == 6:
            later(0.02, cluster.kill_executor)

    outcome = run(session, 7, size=size, snapshot_every=2, after_call=disturb)
    assert_same(outcome, cluster.run_undisturbed(7, size=size))
    assert len(session.recoveries) == 1


def test_between_steps_and_before_reads(cluster: Cluster, session: sw.Session, undisturbed: Outcome) -> None:
    """A loop that reads each loss: nothing is under way when the executor is killed."""
    step = session.parallelize(train, donate_argnums=0, snapshot_every=5)
    state = step.init(initial, jax.random.key(0))
    doubled = session.parallelize(lambda x: x * 2)(np.ones((16, 64), np.float32))
    losses = []
    for number, x in enumerate(batches(STEPS), start=1):
        state, loss = step(state, x)
        losses.append(float(loss))
        if number in (8, 16):
            cluster.kill_executor(number // 16)
            np.testing.assert_array_equal(doubled, np.full((16, 64), 2))
            assert np.isfinite(np.asarray(state[1])).all()
    assert losses == undisturbed.losses
    np.testing.assert_array_equal(state[0], undisturbed.weights)
    assert len(session.recoveries) == 2


def test_status_shows_the_snapshot_and_memory_stays_bounded(cluster: Cluster, session: sw.Session) -> None:
    sizes: set[int] = set()

    def look(number: int) -> None:
        if number % 5 == 0:
            sizes.update(each.snapshot_bytes for each in session.status().sessions if each.snapshot)
            assert session._state._stream.journal.size_bytes < 1 << 20

    run(session, 60, snapshot_every=5, after_call=look)
    wait_until(lambda: snapshot_of(session) > 40)
    assert max(sizes) < 4 * 3 * 16 * 64 * 4, "two copies of weights and momentum, and small ones"
