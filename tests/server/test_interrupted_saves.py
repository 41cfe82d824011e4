"""Saves that a lost worker, client or server interrupts: what was complete stays, and nobody hangs."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np
import psutil
import pytest

import shardwright as sw
from tests.client.clusters import running_nodes
from tests.server.raw_client import ROOT, Server, all_gone, wait_until

pytestmark = pytest.mark.cluster


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    """To be filled; they end with the test."""
    with ExitStack() as stack:
        running: list[Server] = []
        stack.callback(lambda: [server.stop() for server in running])
        yield running


def start_two(folder: Path, servers: list[Server]) -> str:
    """Two nodes of two CPU devices; the master's address."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        nodes = [{"ip": "127.0.0.1", "port": each.getsockname()[1], "devices": 2} for each in sockets]
    path = folder / "cluster.json"
    path.write_text(json.dumps({"master": nodes[0], "workers": nodes[1:]}))
    servers += [Server(str(path), str(task), "--grace", "10") for task in range(2)]
    return f"127.0.0.1:{nodes[0]['port']}"


def connect(address: str) -> sw.Session:
    results: list[sw.Session] = []

    def is_up() -> bool:
        try:
            results.append(sw.connect(address))
        except sw.ServerUnavailableError:
            return False
        return True

    wait_until(is_up, timeout_s=60)
    return results[0]


def double(state: Any) -> Any:
    return jax.tree.map(lambda x: x * 2, state)


def step_of(session: sw.Session) -> Any:
    return session.parallelize(double, donate_argnums=0, force="fsdp")


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_lost_worker_and_killed_servers_leave_what_was_complete(tmp_path: Path, servers: list[Server]) -> None:
    directory, ones = tmp_path / "run", {"w": np.ones((8, 6), np.float32)}
    session = connect(start_two(tmp_path, servers))
    step = step_of(session)
    state = step(ones)
    session.save(state, directory, step=1).wait()
    state = step(state)
    state["w"].block_until_ready()

    # A worker hangs in the middle of a save, then dies.
    (hanging,) = servers[1].executors()
    hanging.send_signal(signal.SIGSTOP)
    save = session.save(state, directory, step=2)
    wait_until(lambda: len(names_in(directory)) == 2)
    assert not save.is_done
    hanging.kill()
    with pytest.raises(sw.WorkerLostError):
        save.wait()
    assert session.checkpoints(directory) == (1,), "asked of the workers that run now"

    # It goes on from the last complete one; what the interrupted save left goes with the next.
    state = step(step.restore(directory))
    np.testing.assert_array_equal(np.asarray(state["w"]), 4)
    assert len(names_in(directory)) == 2
    session.save(state, directory, step=2).wait()
    assert names_in(directory) == ["1", "2"]

    # All servers are killed in the middle of a save.
    state = step(state)
    state["w"].block_until_ready()
    (hanging,) = servers[1].executors()
    hanging.send_signal(signal.SIGSTOP)
    save = session.save(state, directory, step=3)
    wait_until(lambda: len(names_in(directory)) == 3)
    family = [process for server in servers for process in server.family()]
    for process in family:
        _kill(process)
    started_s = time.monotonic()
    with pytest.raises(sw.ShardwrightError):
        save.wait()
    assert time.monotonic() - started_s < 90
    wait_until(lambda: all_gone(family))

    # Another number of workers, another plan.
    with sw.connect(devices=3) as alone:
        assert alone.checkpoints(directory) == (1, 2)
        state = alone.parallelize(double, mesh="3", force="fsdp")(alone.restore(directory))
        np.testing.assert_array_equal(np.asarray(state["w"]), 8)


def _kill(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.kill()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[Server], sw.Session]]:
    """Two nodes that no test ends; they keep a lost client's session for four seconds."""
    with running_nodes(tmp_path_factory.mktemp("nodes"), [2, 2], "--grace", "4") as running:
        yield running


_SAVER = """
import sys, time
import numpy as np, shardwright as sw

session = sw.connect(sys.argv[1])
state = session.parallelize(lambda state: state, force="fsdp")({"w": np.arange(16 << 20, dtype=np.float32)})
state["w"].block_until_ready()
print("computed", flush=True)
sys.stdin.readline()
session.save(state, sys.argv[2], step=1)
time.sleep(600)
"""


def test_the_save_of_a_killed_client_becomes_complete(tmp_path: Path, cluster: tuple[list[Server], sw.Session]) -> None:
    servers, session = cluster
    directory = tmp_path / "run"
    command = [sys.executable, "-c", _SAVER, session._state.master.address, str(directory)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ
    ) as client:
        assert client.stdin is not None
        assert client.stdout is not None
        try:
            assert client.stdout.readline() == "computed\n"
            (hanging,) = servers[1].executors()
            hanging.suspend()  # the save is under way until it goes on
            client.stdin.write("save\n")
            client.stdin.flush()
            wait_until(lambda: directory.exists() and bool(names_in(directory)))
        finally:
            client.kill()
    time.sleep(6)  # longer than the session is kept, were it not for the save
    assert names_in(directory) != ["1"]
    hanging.resume()
    wait_until(lambda: session.checkpoints(directory) == (1,), timeout_s=60)
    assert names_in(directory) == ["1"]
    np.testing.assert_array_equal(np.asarray(session.restore(directory)["w"]), np.arange(16 << 20))
    wait_until(lambda: len(session.status().sessions) == 1, timeout_s=60)
    session.save({"w": np.ones(4)}, directory, step=2).wait()  # the directory is nobody's now


def test_debris_of_the_node_that_begins_saves_goes_with_the_next(
    tmp_path: Path, cluster: tuple[list[Server], sw.Session]
) -> None:
    servers, session = cluster
    directory = tmp_path / "run"
    step = step_of(session)
    state = step({"w": np.ones((8, 6), np.float32)})
    session.save(state, directory, step=1).wait()
    state = step(state)
    state["w"].block_until_ready()
    (hanging,), (beginning,) = servers[1].executors(), servers[0].executors()
    hanging.suspend()
    save = session.save(state, directory, step=2)
    wait_until(lambda: len(names_in(directory)) == 2)
    beginning.kill()
    with pytest.raises(sw.WorkerLostError):
        save.wait()
    wait_until(lambda: all_gone([hanging, beginning]), timeout_s=60)
    assert session.checkpoints(directory) == (1,)
    assert len(names_in(directory)) == 2

    state = step(step.restore(directory))
    session.save(state, directory, step=2).wait()
    assert names_in(directory) == ["1", "2"]
    np.testing.assert_array_equal(np.asarray(session.restore(directory)["w"]), 4)
