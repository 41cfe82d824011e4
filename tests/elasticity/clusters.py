"""An elastic cluster of real servers, whose nodes can be killed for good and started again."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import shardwright as sw
from shardwright.client.connection import team_of
from tests.server.raw_client import Server, wait_until
from tests.server.test_processes import free_port


class ElasticCluster:
    """options: of all its servers. sizes: more keys of the cluster file."""

    def __init__(self, folder: Path, devices: Sequence[int], *options: str, **sizes: int) -> None:
        self.path = folder / "cluster.json"
        self._options = options
        self._entries = [{"ip": "127.0.0.1", "port": free_port(), "devices": count} for count in devices]
        self._sizes = {"min_nodes": 1, **sizes}
        self.write_file()
        self.servers: dict[int, Server] = {}
        for node in range(len(devices)):
            self.start(node)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._entries[0]['port']}"

    def write_file(self) -> None:
        self.path.write_text(
            json.dumps({"master": self._entries[0], "workers": self._entries[1:], "memory_gib": 1 << 21, **self._sizes})
        )

    def add_entry(self, devices: int) -> int:
        """Write another node into the file; returns its number."""
        self._entries.append({"ip": "127.0.0.1", "port": free_port(), "devices": devices})
        self.write_file()
        return len(self._entries) - 1

    def remove_last_entry(self) -> None:
        self._entries.pop()
        self.write_file()

    def start(self, node: int) -> None:
        self.servers[node] = Server(str(self.path), str(node), *self._options)

    def kill(self, node: int) -> None:
        """The node is gone, with all its processes."""
        server = self.servers.pop(node)
        server.process.kill()
        server.end()

    def kill_executor(self, node: int) -> None:
        for executor in self.servers[node].executors():
            executor.kill()

    def connect(self, **options: Any) -> sw.Session:
        deadline_s = time.monotonic() + 120
        while True:
            try:
                return sw.connect(self.address, **options)
            except sw.ServerUnavailableError:
                assert time.monotonic() < deadline_s
                time.sleep(0.2)

    def stop(self) -> None:
        for server in self.servers.values():
            server.stop()


@contextmanager
def running(folder: Path, devices: Sequence[int], *options: str, **sizes: int) -> Iterator[ElasticCluster]:
    cluster = ElasticCluster(folder, devices, *options, **sizes)
    try:
        yield cluster
    finally:
        cluster.stop()


def nodes_of(session: sw.Session) -> list[int]:
    """The nodes that run, once they are ready; else none."""
    team = team_of(session.status())
    return [node.node.index for node in team] if all(node.state == "ready" for node in team) else []


def wait_for_nodes(session: sw.Session, *nodes: int, timeout_s: float = 120.0) -> None:
    wait_until(lambda: nodes_of(session) == list(nodes), timeout_s)


def snapshot_of(session: sw.Session) -> int:
    """Number of the newest complete snapshot; 0: none."""
    mine = session.info.session_id
    return next(each.snapshot for each in session.status().sessions if mine.startswith(each.session_id))
