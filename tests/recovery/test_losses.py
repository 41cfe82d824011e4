"""Executors and daemons of a real cluster are killed; the loss curve is that of the undisturbed run, bit for bit."""

from __future__ import annotations

import logging
import re
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

import shardwright as sw
from tests.recovery.training import Outcome, assert_same, batches, initial, later, run, slow_train, train
from tests.server.raw_client import wait_until
from tests.two_nodes import Running, TwoNodes

pytestmark = pytest.mark.cluster

STEPS = 24
SLOW_STEPS = 12


def kill_executor(cluster: TwoNodes, node: int = 1) -> None:
    for executor in cluster.servers[node].executors():
        executor.kill()


def run_undisturbed(cluster: TwoNodes, steps: int, **options: Any) -> Outcome:
    """In a session of its own: one that stays open has its programs loaded again after each loss."""
    with cluster.connect() as session:
        return run(session, steps, **options)


def generation_of(cluster: TwoNodes) -> int:
    return cluster.status().nodes[1].generation


@pytest.fixture(scope="module")
def undisturbed(two_nodes: TwoNodes) -> Outcome:
    return run_undisturbed(two_nodes, STEPS)


@pytest.fixture(scope="module")
def slow_undisturbed(two_nodes: TwoNodes) -> Outcome:
    return run_undisturbed(two_nodes, SLOW_STEPS, function=slow_train)


@pytest.fixture
def session(healed: Running) -> sw.Session:
    """A client of its own: protection is a session's."""
    return healed[1]


def snapshot_of(session: sw.Session) -> int:
    """Number of the newest complete snapshot; 0: none."""
    mine = session.info.session_id
    return next(each.snapshot for each in session.status().sessions if mine.startswith(each.session_id))


@pytest.mark.parametrize("node", [0, 1])
def test_a_killed_executor(
    two_nodes: TwoNodes, session: sw.Session, undisturbed: Outcome, caplog: pytest.LogCaptureFixture, node: int
) -> None:
    def disturb(number: int) -> None:
        if number == 12:
            wait_until(lambda: snapshot_of(session))
            kill_executor(two_nodes, node)

    with caplog.at_level(logging.WARNING, logger="shardwright"):
        assert_same(run(session, STEPS, snapshot_every=5, after_call=disturb), undisturbed)
    (report,) = session.recoveries
    assert f"node {node}" in report.loss
    assert report.snapshot_step >= 5
    assert report.restored_bytes > 0
    assert 0 < report.replayed_steps <= 12
    assert str(report) in caplog.text


def test_before_the_first_snapshot_all_is_run_again_from_the_initializer(
    two_nodes: TwoNodes, session: sw.Session, undisturbed: Outcome
) -> None:
    def disturb(number: int) -> None:
        if number == 3:
            kill_executor(two_nodes)

    assert_same(run(session, STEPS, snapshot_every=100, after_call=disturb), undisturbed)
    assert [report.restored_bytes for report in session.recoveries] == [0]


def test_a_worker_that_is_killed_and_started_again(two_nodes: TwoNodes, session: sw.Session) -> None:
    """State is split over the nodes: what the dead daemon held, the other one has as well."""

    def disturb(number: int) -> None:
        if number == 13:
            wait_until(lambda: snapshot_of(session))
            two_nodes.restart_worker()

    outcome = run(session, STEPS, snapshot_every=4, after_call=disturb, force="fsdp")
    assert_same(outcome, run_undisturbed(two_nodes, STEPS, force="fsdp"))
    (report,) = session.recoveries
    assert re.match(r"node 1 .* was lost: its daemon ended", report.loss), report.loss
    assert report.restored_bytes > 0


def test_in_a_step(two_nodes: TwoNodes, session: sw.Session, slow_undisturbed: Outcome) -> None:
    def disturb(number: int) -> None:
        if number == 6:  # it is under way, and will be for a while
            kill_executor(two_nodes)

    outcome = run(session, SLOW_STEPS, function=slow_train, snapshot_every=3, after_call=disturb)
    assert_same(outcome, slow_undisturbed)
    assert len(session.recoveries) == 1


def test_twice_again_while_steps_are_replayed(
    two_nodes: TwoNodes, session: sw.Session, slow_undisturbed: Outcome
) -> None:
    began = generation_of(two_nodes)

    def is_replaying(generation: int) -> bool:
        status = two_nodes.status()
        is_running = any(each.running_steps for each in status.sessions)
        return status.nodes[1].generation > generation and status.state == "ready" and is_running

    def kill_again(generation: int) -> None:
        wait_until(lambda: is_replaying(generation), 90)
        kill_executor(two_nodes)

    def disturb(number: int) -> None:
        if number == 9:
            kill_executor(two_nodes)
            for passed in range(2):
                later(0.0, partial(kill_again, began + passed))

    outcome = run(session, SLOW_STEPS, function=slow_train, snapshot_every=4, after_call=disturb)
    assert_same(outcome, slow_undisturbed)
    assert generation_of(two_nodes) >= began + 3
    assert len(session.recoveries) <= 3


def test_during_a_snapshot(two_nodes: TwoNodes, session: sw.Session) -> None:
    size = 1 << 17  # 8 MiB of weights, and as much of momentum

    def disturb(number: int) -> None:
        if number == 6:
            later(0.02, partial(kill_executor, two_nodes))

    outcome = run(session, 7, size=size, snapshot_every=2, after_call=disturb)
    assert_same(outcome, run_undisturbed(two_nodes, 7, size=size))
    assert len(session.recoveries) == 1


def test_between_steps_and_before_reads(two_nodes: TwoNodes, session: sw.Session, undisturbed: Outcome) -> None:
    """A loop that reads each loss: nothing is under way when the executor is killed."""
    step = session.parallelize(train, donate_argnums=0, snapshot_every=5)
    state = step.init(initial, jax.random.key(0))
    doubled = session.parallelize(lambda x: x * 2)(np.ones((16, 64), np.float32))
    losses = []
    for number, x in enumerate(batches(STEPS), start=1):
        state, loss = step(state, x)
        losses.append(float(loss))
        if number in (8, 16):
            kill_executor(two_nodes, number // 16)
            np.testing.assert_array_equal(doubled, np.full((16, 64), 2))
            assert np.isfinite(np.asarray(state[1])).all()
    assert losses == undisturbed.losses
    np.testing.assert_array_equal(state[0], undisturbed.weights)
    assert len(session.recoveries) == 2


def test_status_shows_the_snapshot_and_memory_stays_bounded(two_nodes: TwoNodes, session: sw.Session) -> None:
    sizes: set[int] = set()

    def look(number: int) -> None:
        if number % 5 == 0:
            sizes.update(each.snapshot_bytes for each in session.status().sessions if each.snapshot)
            assert session._state._stream.journal.size_bytes < 1 << 20

    run(session, 60, snapshot_every=5, after_call=look)
    wait_until(lambda: snapshot_of(session) > 40)
    assert max(sizes) < 4 * 3 * 16 * 64 * 4, "two copies of weights and momentum, and small ones"
