"""A network that is away for seconds: calls that are not steps are made again, too."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import pytest

import shardwright as sw
from shardwright.client.connection import Dialer
from shardwright.client.session import Session
from shardwright.client.session_state import SessionState
from shardwright.clusters.local_token import read_or_make_token
from tests.faults.test_hung_steps import in_thread
from tests.faults.test_preparation import new_function
from tests.server.raw_client import Server, wait_until
from tests.server.test_processes import free_port

pytestmark = pytest.mark.cluster

GRACE_S = 8.0


class Proxy:
    """A port in front of another one, that can be cut."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._is_cut = False
        self._pairs: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._is_cut = True
        for end in self._pairs:
            self._shut(end)
        self._pairs.clear()

    def mend(self) -> None:
        self._is_cut = False

    def close(self) -> None:
        self.cut()
        self._listener.close()

    @staticmethod
    def _shut(end: socket.socket) -> None:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                if self._is_cut:
                    raise ConnectionRefusedError
                far = socket.create_connection(self._target)
            except OSError:  # nobody listens there, either
                near.close()
                continue
            self._pairs += [near, far]
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=self._copy, args=(source, target), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        for end in (source, target):
            self._shut(end)


class ProxiedDialer(Dialer):
    """Reaches every port through a proxy of its own."""

    def __init__(self, token: str) -> None:
        super().__init__(token, None)
        self.proxies: dict[str, Proxy] = {}

    def dial(self, address: str) -> grpc.Channel:
        host, _, port = address.rpartition(":")
        proxy = self.proxies.setdefault(address, Proxy((host, int(port))))
        return super().dial(f"127.0.0.1:{proxy.port}")


@dataclass
class Far:
    """A client whose every connection goes through proxies."""

    server: Server
    session: sw.Session
    dialer: ProxiedDialer

    @contextmanager
    def outage(self, seconds: float, *, of: str = "") -> Iterator[None]:
        """Begins at once and ends by itself. of: the address, default: all."""
        chosen = [proxy for address, proxy in self.dialer.proxies.items() if of in address]
        for proxy in chosen:
            proxy.cut()
        timer = threading.Timer(seconds, lambda: [proxy.mend() for proxy in chosen])
        timer.start()
        yield
        timer.join()


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Far]:
    port = free_port()
    path = tmp_path_factory.mktemp("outages") / "cluster.json"
    path.write_text(json.dumps({"master": {"ip": "127.0.0.1", "port": port, "devices": 1}}))
    server, dialer = Server(str(path), "0", "--grace", str(GRACE_S)), ProxiedDialer(read_or_make_token(port))
    sessions: list[sw.Session] = []

    def is_open() -> bool:
        try:
            sessions.append(Session(SessionState(f"127.0.0.1:{port}", dialer, None)))
        except sw.ServerUnavailableError:
            return False
        return True

    wait_until(is_open, timeout_s=60)
    yield Far(server, sessions[0], dialer)
    sessions[0]._state.close_quietly()
    for proxy in dialer.proxies.values():
        proxy.close()
    server.stop()


LARGE = np.arange(1 << 20, dtype=np.float32)


def test_calls_that_are_not_steps_wait_for_the_network(far: Far) -> None:
    step = far.session.parallelize(lambda x: x + 1)
    result = step(LARGE)
    np.testing.assert_array_equal(result, LARGE + 1)
    with far.outage(1):
        assert far.session.status().state == "ready"
    with far.outage(1):
        np.testing.assert_array_equal(result, LARGE + 1, "a read")
    with far.outage(1):
        np.testing.assert_array_equal(step(LARGE), LARGE + 1, "an upload")
    function, factor = new_function()
    with far.outage(1):
        np.testing.assert_array_equal(far.session.parallelize(function)(LARGE), factor * LARGE, "a plan")


def test_an_outage_of_the_data_port_alone(far: Far) -> None:
    step = far.session.parallelize(lambda x: x + 1)
    result = step(LARGE)
    np.testing.assert_array_equal(result, LARGE + 1)
    (node,) = far.session.info.nodes
    with far.outage(4, of=node.data_address):
        np.testing.assert_array_equal(result, LARGE + 1)


def test_an_outage_in_the_middle_of_an_upload_and_of_a_plan(far: Far) -> None:
    large = np.ones(24 << 20, np.float32)
    total = far.session.parallelize(lambda x: x[0] + x[-1])
    assert float(total(large)) == 2
    for moment_s in (0.05, 0.3):
        waiting, outcome = in_thread(lambda: float(total(large)))
        time.sleep(moment_s)
        with far.outage(1):
            waiting.join(60)
        assert outcome == [2.0]
    function, factor = new_function()
    planner = far.server.planners()[0]
    planner.suspend()
    waiting, outcome = in_thread(lambda: np.asarray(far.session.parallelize(function)(LARGE)))
    time.sleep(1)
    with far.outage(2):
        waiting.join(60)
    np.testing.assert_array_equal(outcome[0], factor * LARGE)


def test_an_outage_longer_than_the_grace_says_so(far: Far) -> None:
    began_s = time.monotonic()
    with far.outage(GRACE_S + 6):
        with pytest.raises(
            sw.ServerUnavailableError, match=rf"could not be reached for \d+ s; it keeps a session for {GRACE_S:g} s"
        ) as caught:
            far.session.status()
        assert GRACE_S - 2 < time.monotonic() - began_s < GRACE_S + 6
        assert "connect again" in caught.value.remedy
    with pytest.raises(sw.SessionError):
        far.session.parallelize(lambda x: x - 1)(LARGE)


def test_a_cluster_that_misses_a_node_says_which(tmp_path: Path) -> None:
    nodes = [{"ip": "127.0.0.1", "port": free_port(), "devices": 1} for _ in range(2)]
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({"master": nodes[0], "workers": nodes[1:]}))
    server = Server(str(path), "0")
    errors: list[sw.ServerUnavailableError] = []

    def is_answered() -> bool:
        try:
            sw.connect(nodes[0]["port"]).close()
        except sw.ServerUnavailableError as error:
            errors.append(error)
        return "is missing" in str(errors[-1])

    wait_until(is_answered, timeout_s=60)
    server.stop()
    assert f"node 1 is missing (127.0.0.1:{nodes[1]['port']}: it has not come yet)" in errors[-1].message
    assert "task number 1" in errors[-1].remedy
