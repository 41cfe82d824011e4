"""The master of an elastic cluster is killed with -9 and started again: the nodes that ran go on, others join later."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

import shardwright as sw
from tests.elasticity.clusters import ElasticCluster, running, snapshot_of, wait_for_nodes
from tests.elasticity.training import assert_close, batches, initial, run, run_on_one_device, train
from tests.server.raw_client import wait_until

pytestmark = pytest.mark.cluster

STEPS = 24


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ElasticCluster]:
    """Of two nodes, or of so many as the test's parameter says."""
    devices = [2] * getattr(request, "param", 2)
    options = ("--rejoin-grace", "2", "--node-failures", "100", "--grace", "60", "--wait", "60")
    with running(tmp_path, devices, "--state-dir", str(tmp_path / "state"), *options) as cluster:
        yield cluster


@pytest.fixture
def session(cluster: ElasticCluster) -> Iterator[sw.Session]:
    """Protected, on all nodes."""
    with cluster.connect(snapshot_every=4) as session:
        wait_for_nodes(session, *cluster.servers)
        yield session


def restart_master(cluster: ElasticCluster) -> None:
    cluster.kill(0)
    cluster.start(0)


def generation_of(session: sw.Session) -> int:
    return int(session.status().nodes[0].generation)


@pytest.mark.parametrize("cluster", [3], indirect=True, ids=["three_nodes"])
def test_the_master_of_a_shrunken_cluster(cluster: ElasticCluster, session: sw.Session) -> None:
    """Its two nodes are taken up as they are; the third one joins them when it is back."""
    generations: list[int] = []

    def disturb(number: int) -> None:
        if number == 6:
            wait_until(lambda: snapshot_of(session))
            cluster.kill(2)
        if number == 12:
            wait_for_nodes(session, 0, 1)
            generations.append(generation_of(session))
            restart_master(cluster)
        if number == 16:
            wait_for_nodes(session, 0, 1)
            assert session.status().has_adopted
            generations.append(generation_of(session))
            cluster.start(2)
        if number == 17:
            wait_for_nodes(session, 0, 1, 2)

    assert_close(run(session, STEPS, after_call=disturb, force="fsdp"), run_on_one_device(STEPS))
    assert generations[0] == generations[1], "the executors are the same"
    shrunk, grown = session.recoveries
    assert "node 2" in shrunk.loss
    assert "node 2 joins" in grown.loss


def test_a_node_that_ends_with_the_master(cluster: ElasticCluster, session: sw.Session) -> None:
    """The executors of before cannot be taken up: the nodes that are left form anew."""

    def disturb(number: int) -> None:
        if number == 10:
            wait_until(lambda: snapshot_of(session))
            cluster.kill(1)
            restart_master(cluster)

    assert_close(run(session, STEPS, after_call=disturb, force="fsdp"), run_on_one_device(STEPS))
    wait_for_nodes(session, 0)
    assert not session.status().has_adopted
    assert session.recoveries


def test_a_node_that_was_taken_out_of_the_file_meanwhile(cluster: ElasticCluster, session: sw.Session) -> None:
    def disturb(number: int) -> None:
        if number == 10:
            wait_until(lambda: snapshot_of(session))
            cluster.kill(0)
            cluster.remove_last_entry()
            cluster.start(0)

    assert_close(run(session, STEPS, after_call=disturb, force="fsdp"), run_on_one_device(STEPS))
    wait_for_nodes(session, 0)
    cluster.servers.pop(1).end(60)  # the master has no use for it


def test_a_named_session_goes_on_with_fewer_nodes(cluster: ElasticCluster) -> None:
    """Another process takes it up, from a snapshot of the nodes that there were."""
    xs, expected = list(batches(STEPS)), run_on_one_device(STEPS)
    first = cluster.connect(name="run-7", snapshot_every=4)
    wait_for_nodes(first, 0, 1)
    step = first.parallelize(train, donate_argnums=0, force="fsdp")
    state = step.init(initial, jax.random.key(0))
    first.keep(state)
    for x in xs[:10]:
        state, loss = step(state, x)
        float(loss)
    wait_until(lambda: snapshot_of(first))
    first.leave()
    cluster.kill(1)
    with cluster.connect() as looking:
        wait_for_nodes(looking, 0)
    with cluster.connect(name="run-7", snapshot_every=4) as second:
        resumed = second.resume()
        assert resumed is not None
        assert not resumed.is_live
        assert 1 <= resumed.updates <= 10
        step = second.parallelize(train, donate_argnums=0, force="fsdp")
        state = resumed.state
        for number in range(resumed.updates, STEPS):
            state, loss = step(state, xs[number])
            np.testing.assert_allclose(loss, expected.losses[number], rtol=1e-5)
            if number == 16:
                cluster.start(1)
        assert int(state["count"]) == STEPS
