"""Clients whose server is gone: how long they try, and what they say; what Status gives away."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

import numpy as np
import pytest

import shardwright as sw
from tests.client.clusters import start_nodes
from tests.faults.test_hung_steps import X, double
from tests.server.raw_client import Server, wait_until

pytestmark = pytest.mark.cluster


def restart(folder: Path) -> tuple[Server, sw.Session]:
    """The master of a cluster of one node started again, and a new session with it."""
    port = json.loads((folder / "cluster.json").read_text())["master"]["port"]
    again = Server(str(folder / "cluster.json"), "0")
    opened: list[sw.Session] = []

    def is_open() -> bool:
        with contextlib.suppress(sw.ServerUnavailableError):
            opened.append(sw.connect(port))
        return bool(opened)

    wait_until(is_open, timeout_s=90)
    return again, opened[0]


def test_a_client_tries_as_long_as_the_grace_and_then_says_what_to_do(tmp_path: Path) -> None:
    servers, session = start_nodes(tmp_path, [1], "--grace", "4")
    assert session.info.grace_s == 4
    (shown,) = [each.session_id for each in session.status().sessions]
    assert session.info.session_id.startswith(shown)
    assert len(shown) == 8, "no key to the session"
    step = session.parallelize(double)
    np.testing.assert_array_equal(step(X), 2 * X)
    servers[0].process.kill()
    began_s = time.monotonic()
    with pytest.raises(
        sw.ServerUnavailableError, match=r"could not be reached for \d+ s; it keeps a session for 4 s"
    ) as caught:
        np.asarray(step(X))
    assert 3 < time.monotonic() - began_s < 20
    assert "connect again" in caught.value.remedy
    session._state.close_quietly()
    again, fresh = restart(tmp_path)
    try:
        np.testing.assert_array_equal(fresh.parallelize(double)(X), 2 * X)
        fresh.close()
    finally:
        again.stop()
        servers[0].stop()


def test_a_master_without_state_knows_no_session_of_the_one_before(tmp_path: Path) -> None:
    """Whatever the old session is asked for, each time."""
    servers, session = start_nodes(tmp_path, [1], "--grace", "60")
    step = session.parallelize(double)
    result = step(X)
    np.testing.assert_array_equal(result, 2 * X)
    unread = step(np.ones(1 << 18, np.float32)).block_until_ready()
    servers[0].process.kill()
    again, fresh = restart(tmp_path)
    try:
        for use in (
            lambda: np.asarray(unread),
            lambda: session.checkpoints(tmp_path),
            lambda: np.asarray(step(X)),
            lambda: np.asarray(step(X)),
            lambda: np.asarray(step(result)),
            lambda: session.parallelize(lambda x: x + 1)(X).block_until_ready(),
            lambda: session.save({"x": result}, tmp_path / "saved").wait(),
        ):
            with pytest.raises(sw.SessionError, match="belongs to a server that was restarted") as caught:
                use()
            assert "open a new session" in caught.value.remedy
        np.testing.assert_array_equal(fresh.parallelize(double)(X), 2 * X)
        fresh.close()
    finally:
        session._state.close_quietly()
        again.stop()
        servers[0].stop()
