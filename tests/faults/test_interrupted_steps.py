"""Long steps that their users do not want any more, on real servers: who waits for them, and what the end costs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from tests.server.raw_client import ROOT, Server, wait_until
from tests.server.test_processes import free_port

pytestmark = pytest.mark.cluster

#: Its results are too large to come back with the reply: they are on the servers, or gone.
X = np.ones(4096, np.float32)
#: Time of a cancelled step, on these servers; and that of a client that is away.
CANCEL_S, GRACE_S = 3.0, 8.0


def endless(x: jax.Array) -> jax.Array:
    return jax.lax.while_loop(lambda s: s[0].sum() < 3e38, lambda s: (jnp.sin(s[0]), s[1] + 1), (x, 0))[0]


def double(x: jax.Array) -> jax.Array:
    return x * 2


@pytest.fixture
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A server of one node with a device."""
    port = free_port()
    path = tmp_path_factory.mktemp("long") / "cluster.json"
    path.write_text(json.dumps({"master": {"ip": "127.0.0.1", "port": port, "devices": 1}}))
    server = Server(str(path), "0", "--cancel-grace", str(CANCEL_S), "--grace", str(GRACE_S), "--step-timeout", "900")
    wait_until(lambda: _answers(port), timeout_s=60)
    yield port
    server.stop()


def _answers(port: int) -> bool:
    try:
        sw.connect(port).close()
    except sw.ServerUnavailableError:
        return False
    return True


_CLIENT = """
import sys, numpy as np, shardwright as sw
from tests.faults.test_interrupted_steps import X, double, endless
how, port = sys.argv[1], int(sys.argv[2])
options = {"snapshot_every": 1} if how == "snapshots" else {}
session = sw.connect(port, **options)
step = session.parallelize(double)
y = step(X)
y.block_until_ready()
hung = session.parallelize(endless)(X)
print("runs", flush=True)
try:
    float(hung[0])
except KeyboardInterrupt:
    print("interrupted", flush=True)
    np.testing.assert_array_equal(step(X), 2 * X)
    try:
        print("kept", np.asarray(y)[0], flush=True)
    except sw.ShardwrightError as error:
        print("lost", type(error).__name__, error.message, flush=True)
"""


def start_client(how: str, port: int) -> subprocess.Popen[str]:
    client = subprocess.Popen(
        [sys.executable, "-c", _CLIENT, how, str(port)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ,
    )  # fmt: skip
    assert client.stdout is not None
    assert client.stdout.readline() == "runs\n"
    return client


@pytest.mark.parametrize("how", ["plain", "snapshots"])
def test_the_same_session_goes_on_after_an_interrupt(port: int, how: str) -> None:
    client = start_client(how, port)
    time.sleep(1.0)
    began_s = time.monotonic()
    client.send_signal(signal.SIGINT)
    output, errors = client.communicate(timeout=60)
    assert client.returncode == 0, errors
    lines = output.splitlines()
    assert lines[0] == "interrupted"
    if how == "snapshots":
        assert lines[1] == "kept 2.0"
    else:
        assert lines[1].startswith("lost WorkerLostError")
        assert "was cancelled" in lines[1]
    assert time.monotonic() - began_s < CANCEL_S + 20, "with the start of new executors"
    assert "all executors are replaced" in errors, "it says whom it waits for"


@pytest.mark.parametrize("size", [4096, 1 << 20])
def test_others_without_arrays_go_on_though_their_step_was_queued(port: int, size: int) -> None:
    """Arguments ride along, or are uploaded: then they are written again."""
    x = np.ones(size, np.float32)
    other = sw.connect(port)
    step = other.parallelize(double)
    np.asarray(step(x))
    client = start_client("plain", port)
    results = [step(x)]
    x[:] = 7  # it is the caller's again
    results.append(step(results[-1]))
    wait_until(lambda: "step 2" in other.status().waiting_for)
    client.kill()
    began_s = time.monotonic()
    np.testing.assert_array_equal(results[1], np.full(size, 4))
    np.testing.assert_array_equal(results[0], np.full(size, 2))
    assert GRACE_S - 3 < time.monotonic() - began_s < GRACE_S + 20
    other.close()


def test_an_operator_ends_a_step_that_everybody_waits_for(port: int) -> None:
    other, hanging = sw.connect(port), sw.connect(port)
    step = other.parallelize(double)
    mine = step(X)
    mine.block_until_ready()
    result = hanging.parallelize(endless)(X)
    wait_until(lambda: "step 1" in other.status().waiting_for)
    waits, alone = step(mine), step(X)
    which = f"{hanging._state.info.session_id[:8]}/1"
    ended = subprocess.run(
        [sys.executable, "-m", "shardwright.cli", "cancel", f"127.0.0.1:{port}", which],
        capture_output=True, text=True, check=False, cwd=ROOT, timeout=60,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "ends now" in ended.stdout
    with pytest.raises(sw.StepCancelledError, match="was ended by the operator local"):
        result.block_until_ready()
    with pytest.raises(sw.WorkerLostError, match="all executors were replaced"):
        waits.block_until_ready()
    np.testing.assert_array_equal(alone, 2 * X)
    hanging.close()
    other.close()
