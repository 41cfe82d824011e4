"""gRPC health at the plain port of a master and a worker, as Kubernetes' probes ask for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.operators.servers import health
from tests.server.raw_client import Server, wait_until
from tests.server.test_processes import free_port

pytestmark = pytest.mark.cluster


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[tuple[int, Server]]]:
    """(health port, server) of a worker without a master; the cluster file is beside it."""
    with ExitStack() as stack:
        path = tmp_path / "cluster.json"
        first, second = ({"ip": "127.0.0.1", "port": free_port(), "devices": 1} for _ in range(2))
        path.write_text(json.dumps({"master": first, "workers": [second]}))
        port = free_port()
        worker = Server(str(path), "1", "--health-port", str(port), "--drain-timeout", "20")
        stack.callback(worker.stop)
        yield [(port, worker)]


def test_a_worker_without_its_master_is_live_and_not_ready(nodes: list[tuple[int, Server]]) -> None:
    ((port, worker),) = nodes
    wait_until(lambda: health(port, "live") == "SERVING")
    assert health(port) == "NOT_SERVING"
    worker.process.terminate()
    assert worker.end()[0] == 0
    assert health(port) == "nothing"


def test_both_nodes_are_ready_once_they_have_found_each_other(nodes: list[tuple[int, Server]], tmp_path: Path) -> None:
    ((worker_port, worker),) = nodes
    master_port = free_port()
    master = Server(str(tmp_path / "cluster.json"), "0", "--health-port", str(master_port))
    try:
        wait_until(lambda: health(master_port) == health(worker_port) == "SERVING", 60)
        assert health(master_port, "shardwright.proto.v1.Master") == "SERVING"
        (executor,) = worker.executors()
        executor.kill()
        wait_until(lambda: health(master_port) == "NOT_SERVING")
        wait_until(lambda: health(master_port) == health(worker_port) == "SERVING", 60)
        worker.process.terminate()  # drains, and leaves
        wait_until(lambda: health(master_port) == "NOT_SERVING")
        assert worker.end()[0] == 0
        assert health(master_port, "live") == "SERVING"
    finally:
        master.stop()


def test_a_port_that_is_taken_is_said(nodes: list[tuple[int, Server]]) -> None:
    ((port, _),) = nodes
    wait_until(lambda: health(port, "live") == "SERVING")
    code, errors = Server("--embedded", "1", "--health-port", str(port)).end()
    assert code == 1
    assert f"port {port} of 127.0.0.1 is in use" in errors
    assert "--health-port" in errors
