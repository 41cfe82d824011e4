"""Two nodes: logs of both from one place, also of executors that died; health under hangs and drains."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from tests.client.clusters import start_nodes
from tests.faults.test_hung_steps import X, endless, in_thread, is_serving
from tests.operators.servers import Scrape, log_of, run_steps
from tests.server.raw_client import ROOT, Server, wait_until
from tests.server.test_processes import free_port

pytestmark = pytest.mark.cluster


class Follower:
    """`shardwright logs --follow --json` in a process of its own."""

    def __init__(self, address: str) -> None:
        command = [sys.executable, "-m", "shardwright.cli", "logs", address, "--follow", "--json"]
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        self.lines: list[dict[str, object]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(json.loads(line))

    def says(self, text: str, **of: object) -> bool:
        """Whether a line has this in its message, and these values."""
        return any(text in str(line["message"]) and of.items() <= line.items() for line in list(self.lines))

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


Running = tuple[list[Server], sw.Session, int]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Two nodes of a device whose log is JSON, a session with them, and the port of their metrics."""
    metrics = free_port()
    options = (
        "--cancel-grace",
        "2",
        "--log-format",
        "json",
        "--metrics-port",
        str(metrics),
        "--stall",
        "4",
        "--silence",
        "5",
    )
    servers, session = start_nodes(tmp_path_factory.mktemp("operators"), [1, 1], *options)
    yield servers, session, metrics
    session._state.close_quietly()
    for server in servers:
        if server.process.poll() is None:
            for process in server.family():
                process.resume()
        server.stop()


@pytest.fixture
def follower(cluster: Running) -> Iterator[Follower]:
    found = Follower(cluster[1]._state.master.address)
    yield found
    found.end()


def generation(session: sw.Session) -> int:
    return session.status().nodes[1].generation


def id_of(session: sw.Session) -> str:
    return session.info.session_id[:8]


def test_all_nodes_from_one_place_and_a_killed_executor(cluster: Running, follower: Follower) -> None:
    servers, session, metrics = cluster
    np.testing.assert_array_equal(run_steps(session, 3), np.full(4, 8, np.float32))
    wait_until(lambda: follower.says("the executor of generation 1 has 1 devices", node=1, process="executor"))
    (executor,) = servers[1].executors()
    executor.kill()
    wait_until(lambda: follower.says("the executor of generation 1 ended with SIGKILL", node=1, process="daemon"))
    wait_until(lambda: follower.says("the executor of node 1 was lost", process="master"))
    wait_until(lambda: follower.says("the executor of generation 2 has 1 devices", node=1, process="executor"), 60)
    wait_until(lambda: session.status().state == "ready")
    command = [sys.executable, "-m", "shardwright.cli", "logs", session._state.master.address, "--node", "1"]
    last_words = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "node 1 executor: the executor of generation 1 has 1 devices" in last_words
    assert "the executor of generation 1 ended with SIGKILL" in last_words
    assert "node 0" not in last_words
    np.testing.assert_array_equal(run_steps(session, 2), np.full(4, 4, np.float32))
    scrape = Scrape(metrics)
    assert scrape("generations_total") == 2
    assert scrape("executor_exits_total", node="1") == 1
    assert scrape("nodes", state="ready") == 2
    assert session.status().nodes[1].executor_exits == 1
    pids = {line["pid"] for line in follower.lines if line["process"] == "executor" and line["node"] == 1}
    assert executor.pid in pids
    assert len(pids) == 2


def test_bytes_between_executors_are_counted(cluster: Running, follower: Follower) -> None:
    _, session, metrics = cluster
    rows = np.linspace(-1, 1, 64 * 32, dtype=np.float32).reshape(64, 32)
    weights = [np.full((32, 32), 0.01 * number, np.float32) for number in (1, 2)]

    def train(first: jax.Array, second: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def loss(first: jax.Array, second: jax.Array) -> jax.Array:
            return jnp.mean((jnp.tanh(x @ first) @ second) ** 2)

        gradients = jax.grad(loss, (0, 1))(first, second)
        return first - gradients[0], second - gradients[1]

    found = session.parallelize(train, stages=2, micro_batches=2, schedule="gpipe")(*weights, rows)
    for mine, expected in zip(found, jax.jit(train)(*weights, rows), strict=True):
        np.testing.assert_allclose(np.asarray(mine), expected, rtol=1e-4, atol=1e-6)
    activations = 64 * 32 * 4  # from the first stage to the second, and gradients of the same size back

    def fetched() -> float:
        return Scrape(metrics).total("array_fetched_bytes_total")

    wait_until(lambda: fetched() >= 2 * activations)
    assert fetched() < 4 * activations


def test_an_executors_last_words_are_kept(cluster: Running, follower: Follower) -> None:
    servers, session, _ = cluster
    now = generation(session)
    (executor,) = servers[1].executors()
    executor.send_signal(signal.SIGABRT)  # as XLA does
    wait_until(lambda: follower.says(f"the executor of generation {now} ended with SIGABRT", level="error", node=1))
    wait_until(lambda: session.status().state == "ready" and generation(session) > now, 60)


def test_health_and_metrics_tell_a_hang(cluster: Running, follower: Follower) -> None:
    servers, session, metrics = cluster
    np.testing.assert_array_equal(run_steps(session, 1), np.full(4, 2, np.float32))
    assert is_serving(session)
    step = session.parallelize(endless)
    in_thread(lambda: np.asarray(step(X)))
    wait_until(lambda: not is_serving(session))
    assert is_serving(session, "live")
    scrape = Scrape(metrics)
    assert scrape("state", state="stalled") == 1
    assert scrape("oldest_command_seconds") > 3
    assert scrape("steps_running") == 1
    wait_until(lambda: follower.says("everybody waits for step", level="warning", session=id_of(session)))
    step.cancel()
    wait_until(lambda: is_serving(session), 60)
    assert Scrape(metrics)("steps_total", kind="step", result="cancelled") == 1
    now = generation(session)
    (executor,) = servers[1].executors()
    executor.suspend()
    wait_until(lambda: not is_serving(session))
    assert is_serving(session, "live")
    wait_until(lambda: is_serving(session), 90)  # it was replaced
    assert generation(session) > now


def test_health_tells_a_drain_and_all_lines_are_json(cluster: Running, follower: Follower) -> None:
    servers, session, metrics = cluster
    step = session.parallelize(endless)
    in_thread(lambda: np.asarray(step(X)))
    wait_until(lambda: session.status().sessions[0].running_steps == 1)
    servers[0].process.terminate()
    wait_until(lambda: not is_serving(session))
    assert is_serving(session, "live")
    assert Scrape(metrics)("state", state="draining") == 1
    wait_until(lambda: follower.says("the server is ending (SIGTERM)", level="warning"))
    step.cancel()
    session._state.close_quietly()
    for node, server in enumerate(servers):
        lines = log_of(server)
        assert {line["node"] for line in lines} == {node}
        assert {line["process"] for line in lines} >= {"daemon", "executor"}
