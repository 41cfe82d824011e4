"""A cluster of two nodes on loopback whose users have tokens and roles, and its clients."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import grpc
import numpy as np
import psutil

from shardwright.plans.layouts import Layout
from shardwright.plans.shardings import Mesh
from shardwright.protocol import wire
from tests.server.raw_client import RawClient, Server
from tests.server.test_processes import free_port

TOKENS = {name: f"token-of-{name}-0123456789" for name in ("alice", "bob", "olga")}
ROLES = {"alice": "user", "bob": "user", "olga": "operator"}

#: Two devices, one a node.
EVERYWHERE = Mesh.of({"data": 2})
VALUES = np.arange(4, dtype=np.float32)
LAYOUT = Layout.replicated("f32", (4,), EVERYWHERE)


class PeoplesCluster:
    """logs: what its servers wrote, at debug level."""

    def __init__(self, folder: Path, *, has_tokens: bool = True, options: Sequence[str] = ()) -> None:
        self._options = options
        nodes = [{"ip": "127.0.0.1", "port": free_port(), "devices": 1} for _ in range(2)]
        self.port = nodes[0]["port"]
        self.address = f"127.0.0.1:{self.port}"
        self.tokens_file = folder / "tokens"
        self.cluster_file = folder / "cluster.json"
        cluster: dict[str, object] = {"master": nodes[0], "workers": nodes[1:]}
        if has_tokens:
            cluster["security"] = {"tokens_file": "tokens"}
            self.write_tokens("".join(f"{name} {ROLES[name]} {token}\n" for name, token in TOKENS.items()))
        self.cluster_file.write_text(json.dumps(cluster))
        self.logs: list[IO[bytes]] = []
        self.servers: list[Server] = []
        for task in range(2):
            self.start(task)

    def start(self, task: int) -> Server:
        log = tempfile.TemporaryFile("a+b")  # noqa: SIM115 - lives as long as the cluster
        server = Server(str(self.cluster_file), str(task), "--log-level", "debug", *self._options, stderr=log)
        self.logs.append(log)
        self.servers.append(server)
        return server

    def kill_master(self) -> None:
        """Its machine goes on."""
        self.servers[0].process.kill()
        self.servers[0].end()

    def write_tokens(self, text: str) -> None:
        self.tokens_file.write_text(text)
        self.tokens_file.chmod(0o600)

    def client(self, name: str) -> RawClient:
        """With the token of this person, and a session."""
        client = RawClient(self.address, TOKENS[name])
        client.open_soon()
        return client

    def log(self) -> str:
        parts = []
        for log in self.logs:
            log.seek(0)
            parts.append(log.read().decode(errors="replace"))
        return "".join(parts)

    def family(self) -> list[psutil.Process]:
        return [process for server in self.servers if server.process.poll() is None for process in server.family()]

    def stop(self) -> None:
        for server in self.servers:
            server.stop()


@contextmanager
def running(folder: Path, *, has_tokens: bool = True, options: Sequence[str] = ()) -> Iterator[PeoplesCluster]:
    cluster = PeoplesCluster(folder, has_tokens=has_tokens, options=options)
    try:
        yield cluster
    finally:
        cluster.stop()


def put_values(client: RawClient, array_id: int = 1) -> None:
    client.put(array_id, VALUES, LAYOUT)


def still_has_values(client: RawClient, array_id: int = 1) -> bool:
    return bool(np.array_equal(client.fetch(array_id, LAYOUT), VALUES))


def stubs_of(client: RawClient) -> dict[str, list[grpc.Channel]]:
    """Channels of each service of the protocol's that serves clients."""
    assert client.session is not None
    data = [grpc.insecure_channel(node.data_address, options=wire.CHANNEL_OPTIONS) for node in client.session.nodes]
    return {"Master": [client.channel], "ArrayTransfer": data, "Checkpoints": data, "Datasets": data}


def run_command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`shardwright …` as a process."""
    return subprocess.run(
        [sys.executable, "-m", "shardwright", *arguments],
        capture_output=True, text=True, check=False, timeout=120, env={**os.environ, **environment},
    )  # fmt: skip
