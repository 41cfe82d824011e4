"""The line between the launcher and the ranks of an elastic job: one JSON object a line over TCP, on both sides.

A rank says, after `hello` with the job's token and its worker number:

    {"do": "beat"}                                         it lives; twice a second
    {"do": "ready", "lost": true, "commits": 7}            it wants to be in the next generation
    {"do": "stalled", "generation": 3, "ranks": [2], "call": "allreduce sum 'loss'", "seconds": 61.0}

The launcher says:

    {"do": "join", "place": {"COORDINATOR": "127.0.0.1:4711", "RANK": "0", …}}    the answer to `ready`
    {"do": "lost", "generation": 3}                        a rank of this generation is gone: leave it
    {"do": "changed"}                                      ranks wait to be let in, or are to leave: come at a commit
    {"do": "leave"}                                        the answer to `ready` where there is no place any longer

Nothing that arrives is run or unpickled. Who does not know the token is not heard.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

from shardwright.clusters.cluster import join_address
from shardwright.errors import LaunchError
from shardwright.launch.tuning import BEAT_INTERVAL_S, CONTROL_LINE_BYTES, HELLO_TIMEOUT_S

#: Names of variables that elastic ranks get.
ADDRESS_VARIABLE = "SHARDWRIGHT_ELASTIC"
TOKEN_VARIABLE = "SHARDWRIGHT_ELASTIC_TOKEN"
WORKER_VARIABLE = "SHARDWRIGHT_WORKER"


def _encode(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


class ControlServer:
    """The launcher's end.

    on_message: called from threads with a worker's number and what it says; not for beats. Listens nowhere before
    `address_at`.
    """

    def __init__(self, on_message: Callable[[int, dict[str, Any]], None]) -> None:
        self.token = secrets.token_hex(16)
        self._on_message = on_message
        self._listeners: dict[str, socket.socket] = {}
        self._connections: dict[int, socket.socket] = {}
        self._heard_s: dict[int, float] = {}
        self._lock = threading.Lock()

    def address_at(self, host: str) -> str:
        """`host:port` of a listener on an address of this machine, made at the first call. Raises LaunchError."""
        if host not in self._listeners:
            try:
                family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
                listener = socket.create_server((host, 0), family=family)
            except OSError as error:
                raise LaunchError(
                    f"the launcher cannot listen ({error.strerror or error})",
                    where=host,
                    remedy="name an address of this machine that the hosts reach: --coordinator-address",
                ) from None
            self._listeners[host] = listener
            threading.Thread(target=self._accept, args=(listener,), name="control-accept", daemon=True).start()
        return join_address(host, self._listeners[host].getsockname()[1])

    def send(self, worker: int, **message: Any) -> None:
        """Say something to a worker. One that is gone is reported by its host, not here."""
        with self._lock:
            connection = self._connections.get(worker)
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.sendall(_encode(message))

    def silent_for_s(self, worker: int) -> float | None:
        """Seconds since a worker was last heard; None before its first word, and after `forget`."""
        heard_s = self._heard_s.get(worker)
        return None if heard_s is None else time.monotonic() - heard_s

    def forget(self, worker: int) -> None:
        """A worker has ended."""
        with self._lock:
            connection = self._connections.pop(worker, None)
            self._heard_s.pop(worker, None)
        if connection is not None:
            connection.close()

    def close(self) -> None:
        for listener in self._listeners.values():
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for worker in list(self._connections):
            self.forget(worker)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), name="control", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            connection.settimeout(HELLO_TIMEOUT_S)
            lines = connection.makefile("rb")
            hello = json.loads(lines.readline(CONTROL_LINE_BYTES))
            if not hmac.compare_digest(str(hello["token"]).encode(), self.token.encode()):
                return
            worker = int(hello["worker"])
            connection.settimeout(None)
            with self._lock:
                self._connections[worker] = connection
                self._heard_s[worker] = time.monotonic()
            try:
                self._listen(worker, connection, lines)
            finally:
                if self._connections.get(worker) is connection:  # its program ends, or starts anew
                    self.forget(worker)

    def _listen(self, worker: int, connection: socket.socket, lines: BinaryIO) -> None:
        while line := lines.readline(CONTROL_LINE_BYTES):
            message = json.loads(line)
            if self._connections.get(worker) is not connection:
                return  # it has connected anew
            self._heard_s[worker] = time.monotonic()
            if message["do"] != "beat":
                self._on_message(worker, message)


class ControlClient:
    """A rank's end. on_message: called from a thread with what the launcher says. Raises LaunchError."""

    def __init__(self, address: str, token: str, worker: int, on_message: Callable[[dict[str, Any]], None]) -> None:
        host, _, port = address.rpartition(":")
        try:
            self._connection = socket.create_connection((host.strip("[]"), int(port)), timeout=HELLO_TIMEOUT_S)
        except (OSError, ValueError) as error:
            raise LaunchError(
                f"the launcher cannot be reached ({error})",
                where=f"{ADDRESS_VARIABLE}={address}",
                remedy="start elastic ranks with: shardwright run --min-np 2 python train.py",
            ) from None
        self._connection.settimeout(None)
        self._lock = threading.Lock()
        self._on_message = on_message
        self._send({"token": token, "worker": worker})
        for target in (self._read, self._beat):
            threading.Thread(target=target, name=f"elastic{target.__name__}", daemon=True).start()

    def send(self, **message: Any) -> None:
        """Say something to the launcher. Where it is gone, the host ends this process."""
        with contextlib.suppress(OSError):
            self._send(message)

    def _send(self, message: Mapping[str, Any]) -> None:
        with self._lock:
            self._connection.sendall(_encode(message))

    def _beat(self) -> None:
        while True:
            try:
                self._send({"do": "beat"})
            except OSError:
                return
            time.sleep(BEAT_INTERVAL_S)

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in self._connection.makefile("rb"):
                self._on_message(json.loads(line))
