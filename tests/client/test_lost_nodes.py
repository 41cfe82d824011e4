"""A node that is lost while arrays go to it, or that is not there at all, is named as such."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import shardwright as sw
from tests.server.raw_client import Server
from tests.server.test_processes import free_port

pytestmark = pytest.mark.cluster


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[Server, sw.Session]]:
    port = free_port()
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({"master": {"ip": "127.0.0.1", "port": port, "devices": 1}}))
    server = Server(str(path), "0")
    while True:
        try:
            session = sw.connect(port)
            break
        except sw.ServerUnavailableError:
            assert server.process.poll() is None
    yield server, session
    session._state.close_quietly()
    server.stop()


def test_an_executor_that_is_lost_in_an_upload_is_a_lost_worker(server: tuple[Server, sw.Session]) -> None:
    running, session = server
    step = session.parallelize(lambda x: x.sum())
    assert float(step(np.ones(8, np.float32))) == 8
    mean = session.parallelize(lambda x: x.mean())
    large = np.ones(16 << 20, np.float32)
    assert float(mean(large)) == 1
    (executor,) = running.executors()
    executor.suspend()
    losses: list[sw.ShardwrightError] = []

    def upload() -> None:
        try:
            float(mean(large))
        except sw.ShardwrightError as error:
            losses.append(error)

    uploading = threading.Thread(target=upload)
    uploading.start()
    uploading.join(1)
    executor.kill()
    uploading.join(60)
    assert not uploading.is_alive()
    (error,) = losses
    assert isinstance(error, sw.WorkerLostError)
    assert "node 0" in error.message
    assert "restore a checkpoint" in error.remedy
    assert float(step(np.ones(8, np.float32))) == 8
