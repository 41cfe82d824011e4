"""No secret is where others of the machine could look: arguments, environments of children, logs at debug level."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from shardwright.clusters.local_token import read_token
from tests.security.people import TOKENS, PeoplesCluster, put_values, still_has_values
from tests.server.programs import training_step
from tests.server.raw_client import ROOT, RawClient, Server, wait_until
from tests.server.test_processes import free_port

#: A client in a process of its own that says what it holds, and waits.
CLIENT = """
import sys
import numpy as np
import shardwright as sw
with sw.connect(int(sys.argv[1]) if len(sys.argv) > 1 else None, devices=1) as session:
    step = session.parallelize(lambda x: x + 1)
    step(np.ones(4, np.float32)).block_until_ready()
    server = session._state.server
    print(session.info.session_secret, server.token if server is not None else "", flush=True)
    sys.stdin.read()
"""


def visible(processes: list[psutil.Process]) -> str:
    """Command lines of processes, and environments of those that our servers started."""
    texts = []
    for process in processes:
        texts += process.cmdline()
        if process.pid != os.getpid():
            texts += [f"{name}={value}" for name, value in process.environ().items()]
    return "\n".join(texts)


@pytest.mark.cluster
def test_nothing_secret_in_arguments_environments_and_logs(cluster: PeoplesCluster, alice: RawClient) -> None:
    put_values(alice)
    alice.load(alice.plan(alice.upload(training_step()))[0])  # starts a planner and a compiler, beside the executors
    assert still_has_values(alice)
    assert alice.session is not None
    local = read_token(cluster.port)
    assert local
    family = cluster.family()
    assert len(family) >= 6, "two daemons, two executors, planner and compiler"
    text = visible(family) + cluster.log()
    for secret in (local, alice.session.session_secret, *TOKENS.values()):
        assert secret not in text
    assert alice.session_id not in cluster.log()
    assert alice.session_id[:8] in cluster.log()


@pytest.fixture
def environment_with_token(tmp_path: Path) -> Iterator[tuple[Server, str]]:
    """A server started from a shell that has a client's token."""
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({"master": {"ip": "127.0.0.1", "port": free_port(), "devices": 1}}))
    server = Server(str(path), "0", environment={"SHARDWRIGHT_TOKEN": "of-another-cluster-0123456789"})
    yield server, "of-another-cluster-0123456789"
    server.stop()


@pytest.mark.cluster
def test_children_of_servers_do_not_get_a_client_s_token(environment_with_token: tuple[Server, str]) -> None:
    server, token = environment_with_token
    wait_until(lambda: len(server.executors()) == 1)
    children = server.family()[1:]
    assert children
    assert token not in visible(children)


@pytest.mark.dear
def test_an_embedded_server_shows_no_secret(tmp_path: Path) -> None:
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        env={**os.environ, "SHARDWRIGHT_TOKEN": "of-another-cluster-0123456789"},
    )  # fmt: skip
    try:
        assert client.stdout is not None
        secret, token = client.stdout.readline().split()
        servers = psutil.Process(client.pid).children(recursive=True)
        assert len(servers) >= 2
        text = visible(servers)
        for each in (secret, token, "of-another-cluster-0123456789"):
            assert each not in text
    finally:
        client.communicate("")
