"""Sessions: how they open and close, what a broken connection or a lost worker does to them."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import psutil
import pytest

import shardwright as sw
from shardwright.client.embedded import EmbeddedServer


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


# ---- opening -------------------------------------------------------------------


def test_nobody_there_is_said_at_once_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    started = time.monotonic()
    with pytest.raises(sw.ServerUnavailableError, match=rf"127.0.0.1:{port}: no server(.|\n)*launch_worker.sh"):
        sw.connect(f"127.0.0.1:{port}")
    monkeypatch.setenv("SERVER_IP", "127.0.0.1")
    monkeypatch.setenv("SERVER_PORT", str(port))
    with pytest.raises(sw.ServerUnavailableError, match=str(port)):
        sw.connect()
    monkeypatch.delenv("SERVER_IP")  # a port alone is one of this machine
    with pytest.raises(sw.ServerUnavailableError, match=f"127.0.0.1:{port}"):
        sw.connect()
    assert time.monotonic() - started < 5


def test_wrong_addresses_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_IP", "127.0.0.1")
    monkeypatch.delenv("SERVER_PORT", raising=False)
    with pytest.raises(sw.OptionError, match="SERVER_PORT"):
        sw.connect()
    monkeypatch.delenv("SERVER_IP")
    with pytest.raises(sw.OptionError, match="devices"):
        sw.connect(devices=0)


def test_a_certificate_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWRIGHT_CA", "/nonexistent.pem")
    with pytest.raises(sw.OptionError, match="SHARDWRIGHT_CA"):
        sw.connect("127.0.0.1:1")


# ---- one server for the rest -----------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    server = EmbeddedServer(2)
    yield server
    server.close()


def test_a_wrong_token_is_refused(server: EmbeddedServer) -> None:
    with pytest.raises(sw.AuthenticationError):
        sw.connect(server.address, token="wrong")


def test_a_closed_session_says_so(server: EmbeddedServer) -> None:
    with sw.connect(server.address, token=server.token) as session:
        step = session.parallelize(lambda x: x + 1)
        handle = step(np.ones(4, np.float32))
    session.close()  # twice is fine
    assert "closed" in repr(session)
    for use in (lambda: step(np.ones(4)), lambda: np.asarray(handle), lambda: step.init(lambda: 0), session.status):
        with pytest.raises(sw.SessionError, match="closed"):
            use()


def test_handles_of_another_session_are_refused(server: EmbeddedServer) -> None:
    with (
        sw.connect(server.address, token=server.token) as first,
        sw.connect(server.address, token=server.token) as second,
    ):
        handle = first.parallelize(lambda x: x + 1)(np.ones(4, np.float32))
        with pytest.raises(sw.SessionError, match="another session"):
            second.parallelize(lambda x: x)(handle)


def test_errors_while_planning_are_typed_and_name_the_tensor(server: EmbeddedServer) -> None:
    with sw.connect(server.address, token=server.token) as session:
        step = session.parallelize(lambda x: sw.annotate(x, {0: "nosuch"}) + 1, mesh="2")
        with pytest.raises(sw.AnnotationError, match="nosuch"):
            step(np.ones(4, np.float32))
        with pytest.raises(sw.PlanError, match="no plan yet"):
            _ = step.plan
        wrong = session.parallelize(lambda x: x, force={"y": {0: "data"}})
        with pytest.raises(sw.OptionError, match="no argument is named 'y'"):
            wrong(np.ones(4, np.float32))


class Proxy:
    """A TCP relay whose connections can be cut."""

    def __init__(self, target: str) -> None:
        host, port = target.rsplit(":", 1)
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                pair = (near, socket.create_connection(self._target))
                self._pairs.append(pair)
                threading.Thread(target=self._relay, args=pair, daemon=True).start()

    @staticmethod
    def _relay(near: socket.socket, far: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError):
            while True:
                for ready in select.select([near, far], [], [])[0]:
                    data = ready.recv(65536)
                    if not data:
                        return
                    (far if ready is near else near).sendall(data)

    def cut(self) -> None:
        pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()

    def close(self) -> None:
        self._listener.close()
        self.cut()


def test_steps_run_once_each_over_a_connection_that_breaks(server: EmbeddedServer) -> None:
    proxy = Proxy(server.address)
    try:
        with sw.connect(proxy.address, token=server.token) as session:
            step = session.parallelize(lambda count: (count + 1, count * 1), donate_argnums=0)
            count, seen = step(0)
            for number in range(1, 12):
                count, seen = step(count)
                if number in (3, 4, 9):
                    proxy.cut()
            assert int(seen) == 11
            assert int(np.asarray(count)) == 12
            proxy.cut()
            time.sleep(1.0)  # idle while it breaks
            assert int(step(count)[1]) == 12
    finally:
        proxy.close()


def test_a_lost_worker_is_a_typed_error_and_the_session_goes_on(server: EmbeddedServer) -> None:
    with sw.connect(server.address, token=server.token) as session:
        step = session.parallelize(lambda s: (s + 1, s.sum()), donate_argnums=0)
        state, _ = step(np.ones(4, np.float32))
        state.block_until_ready()
        (executor,) = [
            child
            for child in psutil.Process(server.pid).children(recursive=True)
            if "shardwright.server.worker.executor" in " ".join(child.cmdline())
        ]
        os.kill(executor.pid, signal.SIGKILL)
        psutil.wait_procs([executor], timeout=10)
        with pytest.raises((sw.WorkerLostError, sw.ArrayError)):
            step(state)[1].block_until_ready()
        state = step.init(lambda: jnp.ones(4, jnp.float32))
        state, total = step(state)
        assert float(total) == 4


# ---- closing ---------------------------------------------------------------------


def _run(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)


@pytest.mark.dear
def test_an_embedded_server_ends_with_its_program() -> None:
    code = "import shardwright as sw; session = sw.connect(devices=1); print(session._state.server.pid); {end}"
    ends = ("pass", "raise SystemExit(3)", "import os; os._exit(0)")
    with ThreadPoolExecutor(len(ends)) as pool:
        programs = dict(zip(ends, pool.map(lambda end: _run(code.format(end=end)), ends), strict=True))
    for end, done in programs.items():
        pid = int(done.stdout)
        deadline = time.monotonic() + 20
        while psutil.pid_exists(pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not psutil.pid_exists(pid), (end, done.stderr)
        assert "Traceback" not in done.stderr


#: A program with one session: children that it forks, then what keeps the session open. Prints a line for each test.
#: gRPC, which the parent uses, ends a child that uses it too, now and then, unless it was told of forks before.
ONE_SESSION = """
import gc, os, sys
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "1"
import numpy as np
import psutil
import shardwright as sw

session = sw.connect(devices=1)
child = os.fork()
if not child:
    sys.exit(0)  # with all that a session does at exit
print(os.waitpid(child, 0)[1], session.status().state, flush=True)

child = os.fork()
if not child:
    with sw.connect(devices=1) as own:
        sys.exit(own.status().state != "ready")
print(os.waitpid(child, 0)[1], session.status().state, flush=True)

step = session.parallelize(lambda x: x + 1)
server = session._state.server.pid
del session
gc.collect()
handle = step(np.ones(4, np.float32))
del step
gc.collect()
print(float(np.asarray(handle).sum()), psutil.pid_exists(server), end=" ")
del handle
gc.collect()
print(psutil.pid_exists(server))
"""


@pytest.fixture(scope="module")
def one_session() -> list[str]:
    """What `ONE_SESSION` prints: a line a test, the error instead of those that it did not come to."""
    done = _run(ONE_SESSION)
    return [*done.stdout.splitlines(), *3 * [done.stderr]]


@pytest.mark.dear
def test_a_forked_child_leaves_the_session_to_its_parent(one_session: list[str]) -> None:
    assert one_session[0] == "0 ready"


@pytest.mark.dear
def test_a_forked_child_opens_a_session_of_its_own(one_session: list[str]) -> None:
    assert one_session[1] == "0 ready"


@pytest.mark.dear
def test_a_step_or_a_handle_alone_keeps_the_session_open(one_session: list[str]) -> None:
    assert one_session[2] == "8.0 True False"


def test_a_server_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHOME", "/nowhere")  # no Python starts there
    with pytest.raises(sw.ServerUnavailableError, match="did not start"):
        sw.connect(devices=1)
