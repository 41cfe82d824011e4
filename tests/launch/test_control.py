"""The line between launcher and ranks: what is said arrives, and who does not know the token is not heard."""

from __future__ import annotations

import contextlib
import queue
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

import shardwright as sw
from shardwright.launch.control import ControlClient, ControlServer


class Server:
    def __init__(self) -> None:
        self.heard: queue.SimpleQueue[tuple[int, dict[str, Any]]] = queue.SimpleQueue()
        self.control = ControlServer(lambda worker, message: self.heard.put((worker, message)))
        self.address = self.control.address_at("127.0.0.1")

    def silent(self, worker: int, within_s: float = 5.0) -> float | None:
        """How long a worker is silent, once it is known."""
        until_s = time.monotonic() + within_s
        while (silent_s := self.control.silent_for_s(worker)) is None and time.monotonic() < until_s:
            time.sleep(0.01)
        return silent_s


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.control.close()


def test_both_sides_hear_each_other(server: Server) -> None:
    told: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    client = ControlClient(server.address, server.control.token, 4, told.put)
    client.send(do="ready", lost=False, commits=2)
    assert server.heard.get(timeout=5) == (4, {"do": "ready", "lost": False, "commits": 2})
    server.control.send(4, do="changed")
    server.control.send(5, do="changed")  # nobody
    assert told.get(timeout=5) == {"do": "changed"}


def test_beats_are_heard_and_silence_is_measured(server: Server) -> None:
    assert server.control.silent_for_s(0) is None
    ControlClient(server.address, server.control.token, 0, lambda message: None)
    assert server.silent(0) is not None
    time.sleep(1.2)
    silent_s = server.silent(0)
    assert silent_s is not None
    assert silent_s < 1.0
    assert server.heard.empty()  # beats are not passed on


def test_who_closes_the_line_is_not_silent(server: Server) -> None:
    connection = socket.create_connection(("127.0.0.1", int(server.address.rpartition(":")[2])))
    connection.sendall(f'{{"token": "{server.control.token}", "worker": 7}}\n'.encode())
    assert server.silent(7) is not None
    connection.close()
    until_s = time.monotonic() + 5
    while server.control.silent_for_s(7) is not None and time.monotonic() < until_s:
        time.sleep(0.01)
    assert server.control.silent_for_s(7) is None


@pytest.mark.parametrize("hello", [b'{"token": "guess", "worker": 1}\n', b"nonsense\n", b"{}\n", b'["token"]\n'])
def test_strangers_are_not_heard(server: Server, hello: bytes) -> None:
    with socket.create_connection(("127.0.0.1", int(server.address.rpartition(":")[2]))) as connection:
        connection.settimeout(5)
        connection.sendall(hello + b'{"do": "ready", "lost": true, "commits": 9}\n')
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(10) == b""
    assert server.control.silent_for_s(1) is None
    assert server.heard.empty()


def test_a_launcher_that_is_not_there_is_named() -> None:
    with pytest.raises(sw.LaunchError, match="cannot be reached"):
        ControlClient("127.0.0.1:9", "token", 0, lambda message: None)
