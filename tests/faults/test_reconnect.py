"""Clients whose server is gone: how long they try, and what they say; what Status gives away."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

import shardwright as sw
from tests.client.clusters import start_nodes
from tests.faults.test_hung_steps import X, double
from tests.server.raw_client import Server

pytestmark = pytest.mark.slow


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
    with pytest.raises(sw.ServerUnavailableError, match="could not be reached for 4 s") as caught:
        np.asarray(step(X))
    assert 3 < time.monotonic() - began_s < 20
    assert "connect again" in caught.value.remedy
    session._state.close_quietly()
    port = json.loads((tmp_path / "cluster.json").read_text())["master"]["port"]
    again = Server(str(tmp_path / "cluster.json"), "0")
    try:
        deadline_s = time.monotonic() + 60
        while True:
            try:
                fresh = sw.connect(port)
                break
            except sw.ServerUnavailableError:
                assert time.monotonic() < deadline_s
        np.testing.assert_array_equal(fresh.parallelize(double)(X), 2 * X)
        fresh.close()
    finally:
        again.stop()
        servers[0].stop()
