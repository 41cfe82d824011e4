"""Steps that never end, on real servers: limits, cancel, close, Ctrl-C; other clients go on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import grpc
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import shardwright as sw
from tests.server.raw_client import ROOT, Server, wait_until
from tests.server.test_processes import free_port

pytestmark = pytest.mark.cluster

X = np.ones(4, np.float32)


def is_serving(session: sw.Session, service: str = "") -> bool:
    """What gRPC health says."""
    with grpc.insecure_channel(session._state.master.address) as channel:
        reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
    return reply.status == health_pb2.HealthCheckResponse.SERVING


def endless(x: jax.Array) -> jax.Array:
    return jax.lax.while_loop(lambda s: s[0].sum() < 3e38, lambda s: (jnp.sin(s[0]), s[1] + 1), (x, 0))[0]


def double(x: jax.Array) -> jax.Array:
    return x * 2


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A server of one node with a device, which an endless step keeps busy, and short limits."""
    port = free_port()
    path = tmp_path_factory.mktemp("hung") / "cluster.json"
    path.write_text(json.dumps({"master": {"ip": "127.0.0.1", "port": port, "devices": 1}}))
    server = Server(str(path), "0", "--stall", "3", "--cancel-grace", "1", "--step-timeout", "120")
    wait_until(lambda: _answers(port), timeout_s=60)
    yield port
    server.stop()


def _answers(port: int) -> bool:
    try:
        sw.connect(port).close()
    except sw.ServerUnavailableError:
        return False
    return True


@pytest.fixture
def sessions(port: int) -> Iterator[tuple[sw.Session, sw.Session]]:
    """Two clients; the second has an array and has run a step."""
    hanging, other = sw.connect(port), sw.connect(port)
    yield hanging, other
    for session in (hanging, other):
        session._state.close_quietly()


def in_thread(call: Callable[[], object]) -> tuple[threading.Thread, list[BaseException | object]]:
    outcome: list[BaseException | object] = []

    def run() -> None:
        try:
            outcome.append(call())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome


def test_a_step_over_its_limit_ends_and_others_go_on(
    sessions: tuple[sw.Session, sw.Session], port: int, caplog: pytest.LogCaptureFixture
) -> None:
    hanging, other = sessions
    step = other.parallelize(double)
    before = step(X)
    np.testing.assert_array_equal(before, 2 * X)
    hung = hanging.parallelize(endless, step_timeout=6)
    result = hung(X)
    waiting, outcome = in_thread(lambda: np.asarray(step(X)))
    wait_until(lambda: other.status().state == "stalled", timeout_s=15)
    told = other.status().waiting_for
    wait_until(lambda: not is_serving(other), timeout_s=3)
    assert is_serving(other, "live"), "no reason to start the server again"
    assert "step 1 of session" in told
    assert "process" in told
    assert "device" in told
    shown = subprocess.run(
        [sys.executable, "-m", "shardwright.cli", "status", str(port)],
        capture_output=True, text=True, check=False, cwd=ROOT, timeout=60,
    )  # fmt: skip
    if other.status().state == "stalled":  # else it was ended meanwhile
        assert shown.returncode == 3
        assert "stalled" in shown.stdout
        assert "waiting for: step 1" in shown.stdout
    with pytest.raises(sw.StepTimeoutError, match="did not end within 6 s: node 0") as caught:
        np.asarray(result)
    assert "process" in caught.value.message
    assert "everybody waits for step 1" in caplog.text
    waiting.join(60)
    if isinstance(outcome[0], np.ndarray):  # on a busy machine it may come before the hanging step, or after its end
        np.testing.assert_array_equal(outcome[0], 2 * X)
    else:
        assert isinstance(outcome[0], sw.WorkerLostError)
        assert "step 1 of session" in str(outcome[0])
    with pytest.raises(sw.ShardwrightError, match="all executors were replaced"):
        np.asarray(other.parallelize(double)(before))
    np.testing.assert_array_equal(step(X), 2 * X)
    assert other.status().state == "ready"
    wait_until(lambda: is_serving(other), timeout_s=3)


def test_a_cancelled_step_frees_the_devices(sessions: tuple[sw.Session, sw.Session]) -> None:
    hanging, other = sessions
    hung = hanging.parallelize(endless)
    result = hung(X)
    wait_until(lambda: "step 1" in other.status().waiting_for)
    assert not result.is_ready()
    assert hung.cancel() == 1
    with pytest.raises(sw.StepCancelledError, match="was cancelled, and did not end within 1 s"):
        np.asarray(result)
    assert hung.cancel() == 0
    np.testing.assert_array_equal(other.parallelize(double)(X), 2 * X)


def test_closing_a_session_ends_its_step(sessions: tuple[sw.Session, sw.Session]) -> None:
    hanging, other = sessions
    step = other.parallelize(double)
    np.testing.assert_array_equal(step(X), 2 * X)
    result = hanging.parallelize(endless)(X)
    wait_until(lambda: "step 1" in other.status().waiting_for)
    assert not result.is_ready()
    hanging.close()
    outcomes: list[object] = []
    losses: list[str] = []

    def has_run() -> bool:
        try:
            outcomes.append(np.asarray(step(X)))
        except sw.WorkerLostError as error:
            losses.append(str(error))
            return False
        return True

    wait_until(has_run, timeout_s=40)
    np.testing.assert_array_equal(outcomes[-1], 2 * X)
    assert not losses, "its own step uses no array of before"


_CLIENT = """
import sys, numpy as np, shardwright as sw
from tests.faults.test_hung_steps import X, endless
session = sw.connect(int(sys.argv[1]))
result = session.parallelize(endless)(X)
print("waits", flush=True)
try:
    np.asarray(result)
except KeyboardInterrupt:
    try:
        np.asarray(result)
    except sw.StepCancelledError:
        print("cancelled", flush=True)
"""


def test_an_interrupt_in_a_wait_cancels_the_step(sessions: tuple[sw.Session, sw.Session], port: int) -> None:
    client = subprocess.Popen(
        [sys.executable, "-c", _CLIENT, str(port)], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ
    )
    assert client.stdout is not None
    assert client.stdout.readline() == "waits\n"
    time.sleep(1.0)
    client.send_signal(signal.SIGINT)
    assert client.stdout.readline() == "cancelled\n"
    assert client.wait(30) == 0
    np.testing.assert_array_equal(sessions[1].parallelize(double)(X), 2 * X)


def test_a_wrong_time_limit_is_refused(sessions: tuple[sw.Session, sw.Session]) -> None:
    for wrong in (0, -1, float("nan"), float("inf"), "1", True):
        with pytest.raises(sw.OptionError, match="step_timeout"):
            sessions[0].parallelize(double, step_timeout=wrong)  # type: ignore[arg-type]
