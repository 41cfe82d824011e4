"""Servers on loopback are their user's: the user's own programs need nothing, other users get nothing."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardwright as sw
from shardwright.clusters.listeners import belongs_to_others
from shardwright.clusters.local_token import path_of, read_or_make_token, read_token
from shardwright.errors import AuthenticationError
from shardwright.proto.v1 import master_pb2
from tests.security import people
from tests.security.people import PeoplesCluster, run_command
from tests.server.raw_client import ROOT, RawClient, Server, wait_until
from tests.server.test_processes import free_port

CONNECT = """
import sys
import shardwright as sw
try:
    with sw.connect(sys.argv[1]) as session:
        print(session.info.platform)
except sw.ShardwrightError as error:
    print(type(error).__name__, error)
"""

#: A user that this machine has besides the one of the tests.
NOBODY = 65534


def connect_elsewhere(address: str, **environment: str) -> str:
    """What a program prints that connects in another environment."""
    done = subprocess.run(
        [sys.executable, "-c", CONNECT, address],
        capture_output=True, text=True, check=False, timeout=120, cwd=ROOT, env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def elsewhere(tmp_path: Path) -> dict[str, str]:
    """The environment of another user: neither home directory nor state are the server's user's."""
    return {"HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state"), "XDG_RUNTIME_DIR": str(tmp_path)}


@pytest.mark.cluster
def test_the_user_s_own_programs_need_no_token(cluster: PeoplesCluster) -> None:
    assert connect_elsewhere(cluster.address) == "cpu\n"
    assert run_command("status", cluster.address).returncode == 0


@pytest.mark.cluster
def test_other_users_are_refused_and_told_which_file_it_takes(
    cluster: PeoplesCluster, elsewhere: dict[str, str]
) -> None:
    told = connect_elsewhere(cluster.address, **elsewhere)
    assert told.startswith("AuthenticationError")
    assert str(path_of(cluster.port)) in told
    done = run_command("status", cluster.address, **elsewhere)
    assert done.returncode == 1
    assert str(path_of(cluster.port)) in done.stderr
    assert not (Path(elsewhere["HOME"]) / "state").exists(), "clients make no files"


@pytest.mark.cluster
@pytest.mark.parametrize("token", ["", "guess", "0" * 43])
def test_wrong_tokens_are_refused(cluster: PeoplesCluster, token: str) -> None:
    stranger = RawClient(cluster.address, token)
    with pytest.raises(AuthenticationError, match="no valid token"):
        stranger.call("Status", master_pb2.StatusRequest())
    with pytest.raises(AuthenticationError):
        stranger.open()
    stranger.close()


@pytest.mark.cluster
def test_a_worker_of_another_user_is_refused(cluster: PeoplesCluster, elsewhere: dict[str, str]) -> None:
    code, errors = Server(str(cluster.cluster_file), "1", environment=elsewhere).end(60)
    assert code == 1
    assert str(path_of(cluster.port)) in errors


@pytest.mark.cluster
def test_the_file_is_its_user_s_alone(cluster: PeoplesCluster) -> None:
    path = path_of(cluster.port)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert len(path.read_text().strip()) >= 43, "256 bits"


def test_a_token_that_others_could_read_is_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    port = free_port()
    token = read_or_make_token(port)
    path_of(port).chmod(0o644)
    with pytest.raises(AuthenticationError, match="can be read or changed by other users") as caught:
        sw.connect(port)
    assert caught.value.remedy == f"chmod 600 {path_of(port)}"
    path_of(port).chmod(0o600)
    assert read_token(port) == token


@pytest.mark.cluster
def test_a_server_does_not_start_with_it(tmp_path: Path) -> None:
    port = free_port()
    state = tmp_path / "shardwright" / "tokens"
    state.mkdir(parents=True)
    (state / str(port)).write_text("x" * 43)
    (state / str(port)).chmod(0o640)
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({"master": {"ip": "127.0.0.1", "port": port, "devices": 1}}))
    code, errors = Server(str(path), "0", environment={"XDG_STATE_HOME": str(tmp_path)}).end(60)
    assert code == 1
    assert f"chmod 600 {state / str(port)}" in errors


@pytest.mark.cluster
def test_state_that_cannot_be_written_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({"master": {"ip": "127.0.0.1", "port": free_port(), "devices": 1}}))
    code, errors = Server(str(path), "0", environment={"XDG_STATE_HOME": str(tmp_path / "file")}).end(60)
    assert code == 1
    assert "the token of" in errors
    assert "XDG_STATE_HOME" in errors or "run as the user" in errors


def test_whoever_comes_first_makes_it() -> None:
    """Master and workers start at the same time."""
    port = free_port()
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        tokens = set(pool.map(read_or_make_token, [port] * 16, chunksize=1))
    assert tokens == {read_token(port)}
    assert [path.name for path in path_of(port).parent.iterdir() if path.name.startswith(f".{port}")] == []


@pytest.mark.cluster
def test_a_file_that_says_insecure_asks_nobody(tmp_path: Path, elsewhere: dict[str, str]) -> None:
    port = free_port()
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({"insecure": True, "master": {"ip": "127.0.0.1", "port": port, "devices": 1}}))
    server = Server(str(path), "0")
    try:
        client = RawClient(f"127.0.0.1:{port}", "")

        def answers() -> bool:
            try:
                client.call("Status", master_pb2.StatusRequest())
            except sw.ServerUnavailableError:
                return False
            return True

        wait_until(answers)
        client.close()
        assert read_token(port) is None
    finally:
        server.stop()


# ---- somebody else at the port ------------------------------------------------------------
class Eavesdropper:
    """Another user's process that listens, and keeps what it is sent."""

    def __init__(self, folder: Path) -> None:
        self._heard = folder / "heard"
        self._heard.touch()
        code = (
            "import os, socket, sys\n"
            "heard = open(sys.argv[1], 'ab', buffering=0); os.setuid(int(sys.argv[2]))\n"
            "s = socket.create_server(('127.0.0.1', 0))\n"
            "print(s.getsockname()[1], flush=True)\n"
            "while True:\n"
            "    c, _ = s.accept(); c.settimeout(2); heard.write(b'+')\n"
            "    try:\n"
            "        while data := c.recv(4096): heard.write(data)\n"
            "    except OSError: pass\n"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, str(self._heard), str(NOBODY)], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    @property
    def heard(self) -> bytes:
        return self._heard.read_bytes()

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def eavesdropper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Eavesdropper]:
    if os.geteuid() != 0:
        pytest.skip("only root starts processes of other users")
    listening = Eavesdropper(tmp_path_factory.mktemp("heard"))
    yield listening
    listening.stop()


def test_whose_a_port_is(eavesdropper: Eavesdropper) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mine:
        assert not belongs_to_others("127.0.0.1", mine.getsockname()[1])
        assert not belongs_to_others("localhost", mine.getsockname()[1])
    assert belongs_to_others("127.0.0.1", eavesdropper.port)
    assert not belongs_to_others("127.0.0.2", eavesdropper.port)
    assert not belongs_to_others("127.0.0.1", free_port())


@pytest.mark.dear
def test_clients_do_not_tell_other_users_the_token(eavesdropper: Eavesdropper) -> None:
    token = read_or_make_token(eavesdropper.port)

    def connect() -> None:
        with pytest.raises(sw.ShardwrightError):
            sw.connect(eavesdropper.port)

    client = threading.Thread(target=connect)
    client.start()
    client.join(60)
    assert b"+" in eavesdropper.heard, "it was dialed"
    assert token.encode() not in eavesdropper.heard


@pytest.mark.cluster
def test_workers_do_not_tell_other_users_the_token(eavesdropper: Eavesdropper, tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    nodes = [{"ip": "127.0.0.1", "port": port, "devices": 1} for port in (eavesdropper.port, free_port())]
    path.write_text(json.dumps({"master": nodes[0], "workers": nodes[1:]}))
    before = eavesdropper.heard
    code, errors = Server(str(path), "1", "--wait", "2").end(60)
    assert code == 75, errors
    assert eavesdropper.heard == before


def connect_soon(address: str) -> sw.Session:
    """A session, once the cluster is complete."""
    found: list[sw.Session] = []

    def is_open() -> bool:
        try:
            found.append(sw.connect(address))
        except sw.ServerUnavailableError:
            return False
        return True

    wait_until(is_open, 60)
    return found[0]


@pytest.mark.cluster
def test_its_user_drains_a_server(tmp_path: Path) -> None:
    """As an operator does, by `shardwright drain`: master and worker end with exit code 0, and clients hear why."""
    with people.running(tmp_path, has_tokens=False) as cluster:
        connect_soon(cluster.address).close()
        done = run_command("drain", cluster.address, "--reason", "new kernel")
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("draining: the server ends within ")
        assert [server.end(60)[0] for server in cluster.servers] == [0, 0]
        assert "the operator local: new kernel" in cluster.log()


# ---- restarts -----------------------------------------------------------------------------
@pytest.mark.cluster
def test_workers_and_clients_outlast_a_restart_of_the_master(tmp_path: Path) -> None:
    """They keep the token that they had: the file stays."""
    with people.running(tmp_path, has_tokens=False) as cluster:
        with connect_soon(cluster.address) as session:
            assert session.info.device_count == 2
        master = cluster.servers[0]
        for process in master.family():
            process.kill()
        cluster.start(0)
        with connect_soon(cluster.address) as session:
            assert session.info.device_count == 2
        assert cluster.servers[1].process.poll() is None
