"""A node of a real cluster is killed for good, and comes back: training goes on, as on one device."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

import shardwright as sw
from tests.elasticity.clusters import ElasticCluster, running, snapshot_of, wait_for_nodes
from tests.elasticity.training import assert_close, batches, initial, run, run_on_one_device, train
from tests.server.raw_client import wait_until

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ElasticCluster]:
    folder = tmp_path_factory.mktemp("elastic")
    with running(folder, [2, 2, 2], "--rejoin-grace", "2", "--node-failures", "100") as cluster:
        yield cluster


@pytest.fixture
def session(cluster: ElasticCluster) -> Iterator[sw.Session]:
    """Protected, on three nodes."""
    yield from _protected(cluster, 3)


@pytest.fixture
def session_of_some(cluster: ElasticCluster) -> Iterator[sw.Session]:
    """Protected, on as many nodes as the test before has left: three, or two; else on two."""
    yield from _protected(cluster, 2)


def _protected(cluster: ElasticCluster, least: int) -> Iterator[sw.Session]:
    for node in range(least):
        if node not in cluster.servers:
            cluster.start(node)
    with cluster.connect() as looking:
        wait_for_nodes(looking, *sorted(cluster.servers))
    with cluster.connect(snapshot_every=4) as session:
        yield session


def train_on(step: sw.Step, state: Any, x: np.ndarray) -> None:
    for _ in range(100):
        state, loss = step(state, x)
        float(loss)


def is_joining(session: sw.Session, node: int) -> bool:
    return any(each.node.index == node and each.state == "joining" for each in session.status().nodes)


def test_a_node_that_is_gone_and_comes_back(
    cluster: ElasticCluster, session: sw.Session, caplog: pytest.LogCaptureFixture
) -> None:
    def disturb(number: int) -> None:
        if number == 10:
            wait_until(lambda: snapshot_of(session))
            cluster.kill(2)
        if number == 18:
            wait_for_nodes(session, 0, 1)
            cluster.start(2)
            wait_until(lambda: is_joining(session, 2))
        if number == 26:
            wait_for_nodes(session, 0, 1, 2)

    with caplog.at_level(logging.WARNING, logger="shardwright"):
        assert_close(run(session, 32, after_call=disturb, force="fsdp"), run_on_one_device(32))
    shrunk, grown = session.recoveries
    assert "node 2" in shrunk.loss
    assert shrunk.restored_bytes > 0
    assert "node 2 joins" in grown.loss
    assert "the cluster has 4 devices now, of node 0, 1" in caplog.text


def test_a_checkpoint_of_three_nodes_is_restored_on_two(
    cluster: ElasticCluster, session: sw.Session, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("checkpoint")
    step = session.parallelize(train, donate_argnums=0, force="fsdp")
    state = step.init(initial, jax.random.key(0))
    xs, expected = list(batches(12)), run_on_one_device(12)
    for x in xs[:6]:
        state, _ = step(state, x)
    step.save(state, folder).wait()
    cluster.kill(2)
    state = step.restore(folder, like=state)
    for number, x in enumerate(xs[6:], start=6):
        state, loss = step(state, x)
        np.testing.assert_allclose(loss, expected.losses[number], rtol=1e-5)
    wait_for_nodes(session, 0, 1)


def test_results_and_state_are_read_while_nothing_is_trained(
    cluster: ElasticCluster, session_of_some: sw.Session
) -> None:
    session = session_of_some
    step = session.parallelize(train, donate_argnums=0, force="fsdp")
    state = step.init(initial, jax.random.key(0))
    doubled = session.parallelize(lambda x: x * 2)(np.arange(24.0, dtype=np.float32).reshape(12, 2))
    expected = run_on_one_device(12)
    losses = []
    for number, x in enumerate(batches(12), start=1):
        state, loss = step(state, x)
        losses.append(float(loss))
        if number == 8:
            wait_until(lambda: snapshot_of(session))
            cluster.kill(max(cluster.servers))
            np.testing.assert_array_equal(doubled, np.arange(24.0).reshape(12, 2) * 2)
            assert state["count"] == 8
    np.testing.assert_allclose(losses, expected.losses, rtol=1e-5)
    np.testing.assert_allclose(state["in"], expected.state["in"], atol=1e-5)


def test_another_loss_before_the_next_snapshot(cluster: ElasticCluster, session: sw.Session) -> None:
    def disturb(number: int) -> None:
        if number == 6:
            wait_until(lambda: snapshot_of(session))
            cluster.kill(2)
        if number == 7:
            wait_for_nodes(session, 0, 1)
            cluster.kill_executor(1)

    assert_close(run(session, 20, after_call=disturb, force="fsdp"), run_on_one_device(20))
    assert len(session.recoveries) in (1, 2)


def test_before_the_first_snapshot_all_is_run_again_from_the_initializer(
    cluster: ElasticCluster, session_of_some: sw.Session
) -> None:
    with cluster.connect(snapshot_every=100) as seldom:

        def disturb(number: int) -> None:
            if number == 3:
                cluster.kill(max(cluster.servers))

        assert_close(run(seldom, 8, after_call=disturb, force="fsdp"), run_on_one_device(8))
        assert [report.restored_bytes for report in seldom.recoveries] == [0]


def test_a_session_without_snapshots_loses_its_arrays_and_goes_on(
    cluster: ElasticCluster, session_of_some: sw.Session
) -> None:
    with cluster.connect() as plain:
        step = plain.parallelize(train, donate_argnums=0, force="fsdp")
        state = step.init(initial, jax.random.key(0))
        xs = list(batches(4))
        for x in xs[:2]:
            state, _ = step(state, x)
        lost = max(cluster.servers)
        cluster.kill(lost)
        with pytest.raises(sw.WorkerLostError, match=f"node {lost}"):
            train_on(step, state, xs[2])
        assert_close(run(plain, 4, force="fsdp"), run_on_one_device(4))
        wait_for_nodes(plain, *cluster.servers)


def test_a_mesh_that_needs_all_nodes_says_what_to_change(cluster: ElasticCluster, session_of_some: sw.Session) -> None:
    session = session_of_some
    step = session.parallelize(train, donate_argnums=0, mesh={"data": session.info.device_count})
    state = step.init(initial, jax.random.key(0))
    xs = list(batches(8))
    for x in xs[:6]:
        state, _ = step(state, x)
    wait_until(lambda: snapshot_of(session))
    cluster.kill(max(cluster.servers))
    with pytest.raises(sw.ShardwrightError, match=f"{2 * len(cluster.servers)} devices that are left") as caught:
        train_on(step, state, xs[6])
    assert "leave mesh" in caught.value.remedy
