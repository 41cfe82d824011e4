"""Clusters of real servers, eight devices in all, each started when it is first asked for."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import shardwright as sw
from tests.server.raw_client import Server
from tests.server.test_processes import free_port

#: Devices of a cluster, over all its nodes.
DEVICES = 8

#: Of a device, as the cluster file has it: so much that a plan fits what the devices then do not.
MEMORY_GIB = 1 << 21


def start(folder: Path, nodes: int = 2) -> tuple[list[Server], sw.Session]:
    """A cluster of eight devices, and a session with it."""
    return start_nodes(folder, [DEVICES // nodes] * nodes)


def start_nodes(folder: Path, devices: Sequence[int], *options: str) -> tuple[list[Server], sw.Session]:
    """A cluster of a node for each number of devices, and a session with it. options: of its servers."""
    path, address = write_file(folder, devices)
    servers = [Server(str(path), str(task), *options) for task in range(len(devices))]
    deadline_s = time.monotonic() + 60
    while True:
        try:
            return servers, sw.connect(address)
        except sw.ServerUnavailableError:
            assert time.monotonic() < deadline_s
            time.sleep(0.2)


def write_file(folder: Path, devices: Sequence[int]) -> tuple[Path, str]:
    """A cluster file on free ports, and its master's address."""
    entries = [{"ip": "127.0.0.1", "port": free_port(), "devices": count} for count in devices]
    path = folder / "cluster.json"
    path.write_text(json.dumps({"master": entries[0], "workers": entries[1:], "memory_gib": MEMORY_GIB}))
    return path, f"127.0.0.1:{entries[0]['port']}"


@contextmanager
def running_nodes(folder: Path, devices: Sequence[int], *options: str) -> Iterator[tuple[list[Server], sw.Session]]:
    """`start_nodes`, stopped at the end, also those that a test froze."""
    servers, session = start_nodes(folder, devices, *options)
    try:
        yield servers, session
    finally:
        session._state.close_quietly()
        for server in servers:
            for process in server.family() if server.process.poll() is None else ():
                process.resume()
            server.stop()


class Clusters:
    """One running cluster at a time, kept as long as the number of its workers is what is asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[int, tuple[list[Server], sw.Session]] = {}

    def session(self, nodes: int) -> sw.Session:
        if nodes not in self._running:
            self.stop()  # one at a time: two cores carry no more
            self._running[nodes] = start(self._folder, nodes)
        return self._running[nodes][1]

    @property
    def servers(self) -> list[Server]:
        """Of the cluster that runs."""
        ((servers, _),) = self._running.values()
        return servers

    def stop(self) -> None:
        for servers, session in self._running.values():
            session.close()
            for server in servers:
                server.stop()
        self._running.clear()
