"""Addresses as users write them: read, or refused with what to write instead."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent import futures
from typing import Any

import grpc
import pytest

import shardwright as sw
from shardwright.client.addresses import read_address
from shardwright.client.connection import Dialer, MasterConnection
from shardwright.proto.v1 import master_pb2, master_pb2_grpc


@pytest.mark.parametrize(
    ("written", "address"),
    [
        ("host:2222", "host:2222"),
        (" 10.0.0.1:1 ", "10.0.0.1:1"),
        ("[::1]:2222", "[::1]:2222"),
        ("node_1.cluster-a:65535", "node_1.cluster-a:65535"),
        (2222, "127.0.0.1:2222"),
        ("2222", "127.0.0.1:2222"),
    ],
)
def test_addresses_are_read(written: str | int, address: str) -> None:
    assert read_address(written) == address


@pytest.mark.parametrize(
    ("written", "message", "remedy"),
    [
        ("::1:2222", "without brackets", '"[::1]:2222"'),
        ("fe80::1", "no address with a port", "[IPv6 address]:port"),
        ("[::1]", "has no port", '"[::1]:2222"'),
        ("localhost", "has no port", '"localhost:2222"'),
        ("", "has no port", '"host:2222"'),
        (":80", "has no host", '"127.0.0.1:80"'),
        ("host:", "is no port", "between 1 and 65535"),
        ("host:http", "is no port", "between 1 and 65535"),
        ("host:99999", "is no port", "between 1 and 65535"),
        (0, "is no port", "between 1 and 65535"),
        (70000, "is no port", "between 1 and 65535"),
        ("http://host:2222/x", "is a URL", '"host:2222"'),
        ("two hosts:2222", "neither a host name nor an IP address", "the address alone"),
        (True, "is no address", "host:port"),
        (("host", 2222), "is no address", "host:port"),
    ],
)
def test_wrong_addresses_say_what_to_write(written: Any, message: str, remedy: str) -> None:
    with pytest.raises(sw.OptionError, match=message) as refusal:
        sw.connect(written)
    assert remedy in refusal.value.remedy


@pytest.mark.parametrize(
    ("host", "port", "where"), [("::1:", "2222", "SERVER_IP"), ("a b", "1", "SERVER_IP"), ("h", "x", "SERVER_PORT")]
)
def test_wrong_addresses_in_the_environment_name_the_variable(
    monkeypatch: pytest.MonkeyPatch, host: str, port: str, where: str
) -> None:
    monkeypatch.setenv("SERVER_IP", host)
    monkeypatch.setenv("SERVER_PORT", port)
    with pytest.raises(sw.OptionError) as refusal:
        sw.connect()
    assert refusal.value.where == where


class OtherVersion(master_pb2_grpc.MasterServicer):
    """A master of a later version: it opens sessions, and has dropped all other calls."""

    def OpenSession(self, request: Any, context: Any) -> Any:
        return master_pb2.OpenSessionReply(session_id="s", server_version="9.1.0", platform="cpu")


def test_a_server_of_another_version_is_told_of_by_both_versions(caplog: pytest.LogCaptureFixture) -> None:
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
    master_pb2_grpc.add_MasterServicer_to_server(OtherVersion(), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        master = MasterConnection(f"127.0.0.1:{port}", Dialer(None, None))
        master.open(sw.__version__)
        assert "9.1.0" in caplog.text
        assert sw.__version__ in caplog.text
        with pytest.raises(sw.ServerUnavailableError, match=rf"9\.1\.0.*{sw.__version__}") as refusal:
            master.status()
        assert "same version" in refusal.value.remedy
        master.close()
    finally:
        server.stop(None)


#: Forks beside calls that run; prints what gRPC says of it on standard error.
FORKING = """
import os, sys, threading
import shardwright as sw
with sw.connect(sys.argv[1]) as session:
    stop = threading.Event()
    def ask():
        while not stop.is_set():
            session.status()
    asking = [threading.Thread(target=ask) for _ in range(2)]
    for thread in asking:
        thread.start()
    for _ in range(20):
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    stop.set()
    for thread in asking:
        thread.join()
    print(session.status().state)
"""


@pytest.mark.dear
def test_forks_beside_calls_print_nothing(session: sw.Session) -> None:
    assert session._state.server is not None
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKING, session._state.master.address],
        env={**os.environ, "SHARDWRIGHT_TOKEN": session._state.server.token},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout == "ready\n", done.stderr
    assert done.stderr == ""


def test_the_package_runs_as_the_command_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "shardwright", "plan", "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert done.stdout.startswith("usage: shardwright plan")
