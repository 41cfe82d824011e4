"""Losses that a session does not survive: typed errors that say what to do, and the session can begin anew."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

import shardwright as sw
from tests.client.clusters import start_nodes
from tests.recovery.training import batches, initial, run, train
from tests.server.raw_client import Server, wait_until

RANDOM_HLO = """HloModule noise

ENTRY main {
  low = f32[] constant(0)
  high = f32[] constant(1)
  x = f32[4] parameter(0)
  noise = f32[4] rng(low, high), distribution=rng_uniform
  ROOT sum = (f32[4]) tuple(noise)
}
"""


@pytest.mark.cluster
def test_two_neighbours_that_die_take_the_snapshot_along(tmp_path: Path) -> None:
    servers, session = start_nodes(tmp_path, [1, 1, 1])
    try:
        step = session.parallelize(train, donate_argnums=0, snapshot_every=3, force="fsdp")
        state = step.init(lambda key: initial(key, 96), jax.random.key(0))
        for x in batches(10):
            state, loss = step(state, x)
        float(loss)
        wait_until(lambda: session.status().sessions[0].snapshot > 3)
        for node in (1, 2):
            servers[node].process.kill()
            servers[node].end()
            servers[node] = Server(str(tmp_path / "cluster.json"), str(node))
        with pytest.raises(sw.SnapshotLostError, match="both nodes that held") as caught:
            float(step(state, x)[1])
        assert "checkpoint" in caught.value.remedy
        assert run(session, 5, snapshot_every=3).count == 5
    finally:
        session._state.close_quietly()
        for server in servers:
            server.stop()


@pytest.mark.dear
def test_random_numbers_of_the_devices_are_refused() -> None:
    with sw.connect(devices=1, snapshot_every=5) as session:
        step = session.program(RANDOM_HLO)
        with pytest.raises(sw.UnsupportedProgramError, match="random numbers from a state"):
            step(np.ones(4, np.float32))


@pytest.mark.cluster
def test_without_room_for_snapshots_training_goes_on_and_the_client_keeps_little(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (server,), session = start_nodes(tmp_path, [1], "--snapshot-memory", "1KiB")
    try:
        journal = session._state._stream.journal

        def look(number: int) -> None:
            assert len(journal.entries) < 2 * 5 * 12, "uploads and steps of some intervals"
            if number == 100:
                wait_until(lambda: "3 snapshots failed in a row" in caplog.text)

        assert run(session, 100, snapshot_every=5, after_call=look).count == 100
        assert "the limit is 1.00 KiB" in caplog.text
        step = session.parallelize(train, donate_argnums=0, snapshot_every=5)
        state, loss = step(step.init(initial, jax.random.key(0)), next(batches(1)))
        float(loss)
        server.executors()[0].kill()
        with pytest.raises(sw.WorkerLostError, match="there is no snapshot to restore"):
            float(step(state, next(batches(1)))[1])
    finally:
        session._state.close_quietly()
        server.stop()
