"""Executors and daemons of a real cluster are killed; the loss curve is that of the undisturbed run, bit for bit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

import shardwright as sw
from shardwright.proto.v1 import master_pb2
from tests.client.clusters import start_nodes
from tests.recovery.training import Outcome, assert_same, batches, initial, later, run, slow_train, train
from tests.server.raw_client import Server, wait_until

pytestmark = pytest.mark.slow

STEPS = 24


class Cluster:
    """Two nodes of two devices; a worker may be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.servers, self.session = start_nodes(folder, [2, 2])
        self._file = str(folder / "cluster.json")

    def kill_executor(self, node: int = 1) -> None:
        for executor in self.servers[node].executors():
            executor.kill()

    def restart_worker(self) -> None:
        """The daemon of node 1 is killed, and started again."""
        self.servers[1].process.kill()
        self.servers[1].end()
        self.servers[1] = Server(self._file, "1")

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
    return run(cluster.session, STEPS)


@pytest.fixture
def recovered(cluster: Cluster) -> Callable[[], list[sw.Recovered]]:
    """The losses survived in this test."""
    before = len(cluster.session.recoveries)
    return lambda: list(cluster.session.recoveries[before:])


def wait_for_snapshot(session: sw.Session) -> None:
    mine = session.info.session_id

    def is_there() -> bool:
        return any(mine.startswith(each.session_id) and each.snapshot for each in session.status().sessions)

    wait_until(is_there)


@pytest.mark.parametrize("node", [0, 1])
def test_a_killed_executor(
    cluster: Cluster,
    undisturbed: Outcome,
    recovered: Callable[[], list[sw.Recovered]],
    caplog: pytest.LogCaptureFixture,
    node: int,
) -> None:
    def disturb(number: int) -> None:
        if number == 12:
            wait_for_snapshot(cluster.session)
            cluster.kill_executor(node)

    with caplog.at_level(logging.WARNING, logger="shardwright"):
        assert_same(run(cluster.session, STEPS, snapshot_every=5, after_call=disturb), undisturbed)
    (report,) = recovered()
    assert f"node {node}" in report.loss
    assert report.restored_bytes > 0
    assert 0 < report.replayed_steps < 20, "three intervals, and what is under way"
    assert str(report) in caplog.text


def test_before_the_first_snapshot_all_is_run_again_from_the_initializer(
    cluster: Cluster, undisturbed: Outcome, recovered: Callable[[], list[sw.Recovered]]
) -> None:
    disturb = {3: cluster.kill_executor}
    outcome = run(
        cluster.session, STEPS, snapshot_every=100, after_call=lambda number: disturb.get(number, lambda: None)()
    )
    assert_same(outcome, undisturbed)
    assert [report.restored_bytes for report in recovered()] == [0]


def test_a_worker_that_is_killed_and_started_again(
    cluster: Cluster, undisturbed: Outcome, recovered: Callable[[], list[sw.Recovered]]
) -> None:
    def disturb(number: int) -> None:
        if number == 13:
            wait_for_snapshot(cluster.session)
            cluster.restart_worker()

    outcome = run(cluster.session, STEPS, snapshot_every=4, after_call=disturb, force="fsdp")
    assert outcome.count == STEPS
    assert_same(outcome, run(cluster.session, STEPS, force="fsdp"))
    (report,) = recovered()
    assert report.restored_bytes > 0, "what the dead daemon held, the other one has as well"


def test_in_a_step(cluster: Cluster, recovered: Callable[[], list[sw.Recovered]]) -> None:
    expected = run(cluster.session, 12, function=slow_train)
    timers = [later(1.3, cluster.kill_executor)]
    outcome = run(cluster.session, 12, function=slow_train, snapshot_every=3)
    timers[0].join()
    assert_same(outcome, expected)
    wait_until(lambda: cluster.session.status().state == "ready")


def test_twice_again_while_steps_are_replayed(cluster: Cluster, recovered: Callable[[], list[sw.Recovered]]) -> None:
    expected = run(cluster.session, 12, function=slow_train)
    began = cluster.generation

    def kill_again(generation: int) -> None:
        wait_until(lambda: cluster.generation > generation and cluster.session.status().state == "ready", 60)
        later(0.6, cluster.kill_executor)

    def disturb(number: int) -> None:
        if number == 9:
            cluster.kill_executor()
            for passed in range(2):
                later(0.0, lambda passed=passed: kill_again(began + passed))

    assert_same(run(cluster.session, 12, function=slow_train, snapshot_every=4, after_call=disturb), expected)
    assert cluster.generation >= began + 3
    assert len(recovered()) <= 3


def test_during_a_snapshot(cluster: Cluster, recovered: Callable[[], list[sw.Recovered]]) -> None:
    size = 1 << 18  # 16 MiB of weights, and as much of momentum
    expected = run(cluster.session, 10, size=size)

    def disturb(number: int) -> None:
        if number == 6:
            later(0.02, cluster.kill_executor)

    assert_same(run(cluster.session, 10, size=size, snapshot_every=2, after_call=disturb), expected)
    assert len(recovered()) == 1


def test_between_steps_and_in_reads(cluster: Cluster, undisturbed: Outcome) -> None:
    """A loop that reads each loss, and the state of before, while nothing is under way."""
    step = cluster.session.parallelize(train, donate_argnums=0, snapshot_every=5)
    kept = step.init(initial, jax.random.key(0))
    weights = np.asarray(kept[0])
    result = cluster.session.parallelize(lambda x: x * 2)(weights)
    wait_until(result.is_ready)
    cluster.kill_executor()
    np.testing.assert_array_equal(result, weights * 2)  # the session is not protected before the step's first call
    del kept, result
    state = step.init(initial, jax.random.key(0))
    losses = []
    for number, x in enumerate(batches(STEPS), start=1):
        state, loss = step(state, x)
        losses.append(float(loss))
        if number in (8, 16):
            cluster.kill_executor(number % 3 % 2)
            momentum = np.asarray(state[1])
            assert momentum.shape == (16, 64)
    assert losses == undisturbed.losses
    np.testing.assert_array_equal(state[0], undisturbed.weights)


def test_status_shows_the_snapshot_and_memory_stays_bounded(cluster: Cluster) -> None:
    sizes: set[int] = set()
    session = sw.connect(cluster.session._state.master.address)

    def look(number: int) -> None:
        if number % 5 == 0:
            wait_for_snapshot(session)
            status: master_pb2.StatusReply = session.status()
            sizes.update(each.snapshot_bytes for each in status.sessions if each.snapshot)
            assert session._state._stream.journal.size_bytes < 1 << 20

    with session:
        run(session, 40, snapshot_every=5, after_call=look)
    assert max(sizes) < 4 * 3 * 16 * 64 * 4, "two copies of weights and momentum, and small ones"
    wait_until(lambda: not any(each.snapshot_bytes for each in cluster.session.status().sessions[1:]))
