"""Datasets over losses of workers: the same batches again, whatever was lost."""

from __future__ import annotations

import json
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import shardwright as sw
from shardwright.client.session_state import SessionState
from shardwright.clusters.local_token import read_or_make_token
from tests.datasets import sources
from tests.datasets.training import BATCH, BATCHES, MODULE, assert_close, expected, initial, run, train_step
from tests.faults.test_outages import Far, ProxiedDialer
from tests.server.raw_client import Server, wait_until
from tests.server.test_processes import free_port
from tests.two_nodes import Running

pytestmark = pytest.mark.cluster


def test_a_killed_executor(healed: Running, tmp_path: Path) -> None:
    servers, session = healed
    address = session._state.master.address
    with sw.connect(address) as alone:  # while it is open its programs are loaded again after each loss
        undisturbed = run(alone, alone.dataset(BATCHES, batch=BATCH), 20, force="data")
    assert_close(undisturbed, expected(20))

    def disturb(number: int) -> None:
        if number in (3, 11):
            for executor in servers[number % 2].executors():
                executor.kill()

    with sw.connect(address, snapshot_every=4) as protected:
        data = protected.dataset(BATCHES, batch=BATCH, log=str(tmp_path))
        assert run(protected, data, 20, force="data", after_call=disturb) == undisturbed  # bit for bit
        assert 1 <= len(protected.recoveries) <= 2
    halves = {frozenset(line["rows"]) for lines in sources.events(tmp_path, "read").values() for line in lines}
    assert halves == {frozenset(range(8)), frozenset(range(8, 16)), frozenset({0})}


def test_a_session_without_snapshots_goes_on_with_the_dataset(healed: Running) -> None:
    servers, session = healed
    data = session.dataset(BATCHES, batch=BATCH)
    run(session, data, 2, force="data")
    for executor in servers[1].executors():
        executor.kill()
    deadline_s = time.monotonic() + 60
    while True:
        try:
            data.seek(0)
            assert_close(run(session, data, 5, force="data"), expected(5))
            return
        except (sw.WorkerLostError, sw.ServerUnavailableError, sw.SessionError):
            assert time.monotonic() < deadline_s
            time.sleep(0.2)


def test_a_slow_reader_is_waited_for(healed: Running) -> None:
    _, session = healed
    data = session.dataset(BATCHES, batch=BATCH, pause_s=3.0, prefetch=0)
    assert_close(run(session, data, 2, force="data"), expected(2))


def test_an_outage_of_the_network(tmp_path: Path) -> None:
    port = free_port()
    path = tmp_path / "cluster.json"
    path.write_text(
        json.dumps({"master": {"ip": "127.0.0.1", "port": port, "devices": 2}, "dataset_modules": [MODULE]})
    )
    server, dialer = Server(str(path), "0"), ProxiedDialer(read_or_make_token(port))
    sessions: list[sw.Session] = []

    def is_open() -> bool:
        try:
            sessions.append(sw.Session(SessionState(f"127.0.0.1:{port}", dialer, None)))
        except sw.ServerUnavailableError:
            return False
        return True

    try:
        wait_until(is_open, timeout_s=60)
        far = Far(server, sessions[0], dialer)
        data = far.session.dataset(BATCHES, batch=BATCH)
        twice = far.session.parallelize(lambda batch: batch["x"] * 2)
        for number in range(6):
            with far.outage(1.0 if number % 2 else 0.0):
                batch = next(data)
            with far.outage(1.0 if number == 2 else 0.0):
                result = twice(batch)
            np.testing.assert_array_equal(result, 2 * sources.whole_batch(number, BATCH, 0)["x"])
        far.session.close()
    finally:
        server.stop()


def test_a_checkpoint_and_a_position_resume_a_training(healed: Running, tmp_path: Path) -> None:
    _, session = healed
    data = session.dataset(BATCHES, batch=BATCH)
    step = session.parallelize(train_step, donate_argnums=0)
    w = step.init(initial, jax.random.key(0))
    losses = []
    for _ in range(3):
        w, loss = step(w, next(data))
        losses.append(float(loss))
    session.save({"w": w, "position": data.position}, tmp_path / "run").wait()
    with sw.connect(session._state.master.address) as later:
        state = later.restore(tmp_path / "run")
        data = later.dataset(BATCHES, batch=BATCH)
        data.seek(int(state["position"]))
        step, w = later.parallelize(train_step, donate_argnums=0), state["w"]
        for _ in range(3):
            w, loss = step(w, next(data))
            losses.append(float(loss))
    assert_close(losses, expected(6))
