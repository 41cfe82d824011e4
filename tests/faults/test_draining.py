"""SIGTERM and preemption notices on real servers: what runs ends, clients save, nothing new begins, exit code 0."""

from __future__ import annotations

import http.server
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from tests.client.clusters import start_nodes
from tests.faults.test_hung_steps import X, double, endless, in_thread, is_serving
from tests.server.raw_client import Server, all_gone, wait_until
from tests.server.test_processes import free_port
from tests.two_nodes import Running, TwoNodes

pytestmark = pytest.mark.cluster

Start = Callable[..., tuple[list[Server], sw.Session]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a cluster with a node for each number of devices, and a session with it."""
    with ExitStack() as stack:

        def run(devices: list[int], *options: str) -> tuple[list[Server], sw.Session]:
            servers, session = start_nodes(tmp_path, devices, *options)
            for server in servers:
                stack.callback(server.stop)
            stack.callback(session._state.close_quietly)
            return servers, session

        yield run


def count(state: dict[str, jax.Array], rounds: jax.Array) -> dict[str, jax.Array]:
    """One more step, which takes a time that grows with `rounds`."""
    w = jax.lax.fori_loop(0, rounds, lambda _, w: jnp.sin(w) + 1, state["w"])
    return {"n": state["n"] + 1, "w": w}


def test_sigterm_lets_a_step_end_and_its_client_save(start: Start, tmp_path: Path) -> None:
    (server,), session = start([2])
    family = server.family()
    step = session.parallelize(count, donate_argnums=0)
    state = step({"n": np.int32(0), "w": X}, np.int32(1))
    began_s = time.monotonic()
    state = step(state, np.int32(1_000_000))
    assert int(state["n"]) == 2
    rounds = np.int32(1_000_000 * max(2.0 / (time.monotonic() - began_s), 1.0))
    assert is_serving(session)

    state = step(state, rounds)  # two seconds, or longer
    wait_until(lambda: "step 3" in session.status().waiting_for or state["n"].is_ready())
    other = sw.connect(session._state.master.address)
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: session.draining)
    assert session.draining == "the server is ending (SIGTERM)"
    assert session.status().state == "draining"
    assert not is_serving(session)
    with pytest.raises(sw.ServerDrainingError, match=r"the server is ending \(SIGTERM\): no new step begins") as caught:
        step(state, np.int32(1))
    assert "save now" in caught.value.remedy
    with pytest.raises(sw.ServerDrainingError):
        sw.connect(session._state.master.address)
    with pytest.raises(sw.ServerDrainingError):
        other.parallelize(double)(X)
    other.close()
    session.save(state, tmp_path / "checkpoints", step=3).wait()  # of handles that the refused step did not take over
    assert int(state["n"]) == 3, "the step that ran has ended"
    final = np.asarray(state["w"])
    began_s = time.monotonic()
    session.close()
    code, errors = server.end(10)
    assert code == 0, errors
    assert time.monotonic() - began_s < 5, "nobody is left to be waited for"
    wait_until(lambda: all_gone(family))

    (server,), session = start([2])
    restored = session.restore(tmp_path / "checkpoints")
    assert int(restored["n"]) == 3
    np.testing.assert_array_equal(np.asarray(restored["w"]), final)


def test_what_is_kept_is_saved_by_itself(start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The client does nothing: it neither sends a step nor saves when the server is told to end."""
    (server,), session = start([2])
    step, directory = session.parallelize(count, donate_argnums=0), tmp_path / "checkpoints"
    state = {"n": np.int32(0), "w": X}
    state = step(state, np.int32(1))
    session.keep(state, checkpoints=sw.CheckpointPolicy(directory=directory, every=1_000))
    for _ in range(3):
        state = step(state, np.int32(1))
    expected = np.asarray(state["w"])
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: session.draining)
    wait_until(lambda: "the state is saved as" in caplog.text)
    with pytest.raises(sw.ServerDrainingError):
        step(state, np.int32(1))
    session.close()
    code, errors = server.end(20)
    assert code == 0, errors

    _, session = start([2])
    assert session.checkpoints(directory) == (3,)
    restored = session.restore(directory)
    assert int(restored["n"]) == 4
    np.testing.assert_array_equal(np.asarray(restored["w"]), expected)


def test_a_quiet_client_is_waited_for_and_a_limit_ends_what_hangs(start: Start) -> None:
    (server,), session = start([1], "--drain-timeout", "3")
    result = session.parallelize(endless)(X)
    waiting, outcome = in_thread(lambda: np.asarray(result))
    wait_until(lambda: "step 1" in session.status().waiting_for)
    began_s = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    waiting.join(20)
    assert isinstance(outcome[0], sw.ServerDrainingError)
    assert "the step did not end in time" in outcome[0].message
    code, errors = server.end(20)
    assert code == 0
    assert 2.5 < time.monotonic() - began_s < 15
    assert "its time is over; cut off: step 1 of session" in errors

    (server,), session = start([1])
    np.testing.assert_array_equal(session.parallelize(double)(X), 2 * X)
    began_s = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    assert server.end(20)[0] == 0
    assert time.monotonic() - began_s < 12, "a client that says nothing holds it up for a while only"


def test_a_second_signal_ends_at_once(start: Start) -> None:
    (server,), session = start([1], "--drain-timeout", "100")
    result = session.parallelize(endless)(X)
    wait_until(lambda: "step 1" in session.status().waiting_for)
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: session.status().state == "draining")
    time.sleep(3.5)
    assert server.process.poll() is None, "the step goes on"
    began_s = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    assert server.end(20)[0] == 0
    assert time.monotonic() - began_s < 8
    assert not result.is_ready()


def test_a_worker_that_is_terminated_is_let_go_and_may_come_back(
    two_nodes: TwoNodes, healed: Running, tmp_path: Path
) -> None:
    servers, session = healed
    step = session.parallelize(count, donate_argnums=0)
    state = step({"n": np.int32(0), "w": X}, np.int32(1))
    assert int(state["n"]) == 1
    servers[1].process.send_signal(signal.SIGTERM)
    wait_until(lambda: session.draining)
    assert session.draining == "node 1 will leave (SIGTERM)"
    with pytest.raises(sw.ServerDrainingError, match="node 1 will leave"):
        step(state, np.int32(1))
    np.testing.assert_array_equal(state["n"], 1)
    session.save(state, tmp_path / "checkpoints", step=1).wait()
    assert servers[1].end(20)[0] == 0
    wait_until(lambda: not session.draining)
    assert servers[0].process.poll() is None
    wait_until(lambda: session.status().nodes[1].state == "lost")
    servers[1] = two_nodes.start_server(1)
    wait_until(lambda: session.status().state == "ready", timeout_s=60)
    with pytest.raises(sw.WorkerLostError, match=r"node 1 .*was lost: it was drained \(SIGTERM\)"):
        np.asarray(state["n"])
    restored = session.restore(tmp_path / "checkpoints")
    assert int(step(restored, np.int32(1))["n"]) == 2


class _Metadata(http.server.BaseHTTPRequestHandler):
    """A cloud's metadata server: 404, then FALSE, then TRUE."""

    answers: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        self.send_response(404 if answer is None else 200)
        self.end_headers()
        self.wfile.write((answer or "").encode())

    def log_message(self, *arguments: object) -> None:
        pass


def test_a_preemption_notice_drains_ahead_of_time(start: Start, tmp_path: Path) -> None:
    notice = tmp_path / "preempted"
    (server,), session = start([1], "--preemption-notice", str(notice))
    step = session.parallelize(double)
    np.testing.assert_array_equal(step(X), 2 * X)
    notice.touch()
    wait_until(lambda: session.draining)
    assert session.draining == f"the server is ending (preemption notice {notice})"
    session.close()
    assert server.end(10)[0] == 0

    _Metadata.answers = [None, None, "FALSE\n", "FALSE\n", "TRUE\n"]
    with http.server.HTTPServer(("127.0.0.1", 0), _Metadata) as metadata:
        threading.Thread(target=metadata.serve_forever, daemon=True).start()
        port = free_port()
        path = tmp_path / "one.json"
        path.write_text(json.dumps({"master": {"ip": "127.0.0.1", "port": port, "devices": 1}}))
        url = f"http://127.0.0.1:{metadata.server_port}/preempted"
        server = Server(str(path), "0", "--preemption-notice", url)
        code, errors = server.end(20)
        metadata.shutdown()
    assert code == 0
    assert _Metadata.answers == ["TRUE\n"]
    assert f"the server is ending (preemption notice {url})" in errors
    refused = Server(str(path), "0", "--preemption-notice", "ftp://example.org/x")
    assert refused.end(20)[0] == 2
