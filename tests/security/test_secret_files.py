"""Files with secrets that others can read are refused, before anything is served or sent."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from shardwright.clusters.access_tokens import parse_tokens
from shardwright.clusters.cluster import Cluster
from shardwright.clusters.secret_files import exposure_of
from shardwright.errors import ClusterConfigError
from tests.server.raw_client import Server
from tests.server.test_processes import free_port

openssl = shutil.which("openssl")

#: More than most can guess.
TOKEN = "0123456789abcdef0123456789"


def write_secret(path: Path, text: str, mode: int = 0o600) -> None:
    path.write_text(text)
    path.chmod(mode)


def cluster_file(folder: Path, **security: str) -> Path:
    path = folder / "cluster.json"
    path.write_text(
        json.dumps({"master": {"ip": "127.0.0.1", "port": free_port(), "devices": 1}, "security": security})
    )
    return path


def refusal(path: Path) -> str:
    """What a server that does not start says, in one line."""
    code, errors = Server(str(path), "0", "--wait", "1").end(60)
    assert code == 1, errors
    (line,) = errors.splitlines()
    return line


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660, 0o602])
@pytest.mark.parametrize(("field", "text"), [("token_file", TOKEN), ("tokens_file", f"alice user {TOKEN}")])
def test_token_files_that_others_can_read_are_refused(tmp_path: Path, field: str, text: str, mode: int) -> None:
    write_secret(tmp_path / "secret", text, mode)
    with pytest.raises(ClusterConfigError, match="can be read or changed by other users") as caught:
        Cluster.load(cluster_file(tmp_path, **{field: "secret"}))
    assert f"security.{field}" in caught.value.where
    assert caught.value.remedy == f"chmod 600 {tmp_path / 'secret'}"
    (tmp_path / "secret").chmod(0o400)
    Cluster.load(cluster_file(tmp_path, **{field: "secret"}))


@pytest.mark.cluster
def test_a_server_does_not_start_with_them(tmp_path: Path) -> None:
    write_secret(tmp_path / "secret", TOKEN, 0o644)
    line = refusal(cluster_file(tmp_path, token_file="secret"))
    assert "(mode 0644)" in line
    assert f"chmod 600 {tmp_path / 'secret'}" in line
    assert TOKEN not in line


@pytest.mark.cluster
@pytest.mark.skipif(openssl is None, reason="needs the openssl command to make a key")
def test_a_private_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    subprocess.run(
        [
            str(openssl), "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=test",
            "-keyout", "node.key", "-out", "node.pem",
        ],
        cwd=tmp_path, check=True, capture_output=True,
    )  # fmt: skip
    write_secret(tmp_path / "token", TOKEN)
    (tmp_path / "node.key").chmod(0o640)
    path = cluster_file(tmp_path, token_file="token", certificate="node.pem", key="node.key")
    line = refusal(path)
    assert "security.key" in line
    assert f"chmod 600 {tmp_path / 'node.key'}" in line


def test_a_cluster_file_with_a_token_in_it_is_a_secret(tmp_path: Path) -> None:
    path = cluster_file(tmp_path, token=TOKEN)
    with pytest.raises(ClusterConfigError, match="and holds a token") as caught:
        Cluster.load(path)
    assert f"chmod 600 {path}" in caught.value.remedy
    path.chmod(0o600)
    assert Cluster.load(path).token == TOKEN
    assert TOKEN not in repr(Cluster.load(path))


def facts(mode: int, owner: int) -> os.stat_result:
    return os.stat_result((stat.S_IFREG | mode, 0, 0, 1, owner, 0, 0, 0, 0, 0))


@pytest.mark.parametrize(
    ("mode", "owner", "reader", "problem"),
    [
        (0o600, 1000, 1000, None),
        (0o400, 1000, 1000, None),
        (0o640, 1000, 1000, "mode 0640"),
        (0o640, 0, 1000, None),  # root's, handed to a service by its group
        (0o660, 0, 1000, "mode 0660"),
        (0o644, 0, 1000, "mode 0644"),
        (0o640, 0, 0, "mode 0640"),
        (0o600, 1001, 1000, "belongs to user 1001"),
    ],
)
def test_who_may_read_it(mode: int, owner: int, reader: int, problem: str | None) -> None:
    found = exposure_of(Path("secret"), facts(mode, owner), reader)
    assert (found is None) if problem is None else (found is not None and problem in found[0])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("alice user", "line 1: 2 words"),
        ("\n# people\nalice user short", "line 3: the token of alice can be guessed: 5 letters"),
        (f"alice admin {TOKEN}", "'admin' is no role"),
        (f"alice/x user {TOKEN}", "'alice/x' is no name"),
        (f"default user {TOKEN}", "the nodes' own"),
        ("alice user sha256:12", "the hash of alice is no SHA-256"),
        (f"alice user {TOKEN}\nalice user {TOKEN}x", "line 2: alice has a token in line 1 already"),
        (f"alice user {TOKEN}\nbob user {TOKEN}", "line 2: bob has the token of alice"),
        (f"alice user {'schlüssel' * 3}", "characters that no call can carry"),
    ],
)
def test_wrong_lines_of_a_tokens_file(tmp_path: Path, text: str, problem: str) -> None:
    write_secret(tmp_path / "tokens", text)
    with pytest.raises(ClusterConfigError) as caught:
        Cluster.load(cluster_file(tmp_path, tokens_file="tokens"))
    assert "security.tokens_file" in caught.value.where
    assert problem in caught.value.message
    assert TOKEN not in str(caught.value)
    assert caught.value.remedy


def test_nobody_has_the_nodes_own_token(tmp_path: Path) -> None:
    write_secret(tmp_path / "token", TOKEN)
    write_secret(tmp_path / "tokens", f"alice user {TOKEN}")
    with pytest.raises(ClusterConfigError, match="alice has the token of the nodes"):
        Cluster.load(cluster_file(tmp_path, token_file="token", tokens_file="tokens"))


def test_nodes_of_an_open_network_need_a_token_of_their_own(tmp_path: Path) -> None:
    write_secret(tmp_path / "tokens", f"alice user {TOKEN}")
    (tmp_path / "node.pem").touch()
    path = tmp_path / "cluster.json"
    security = {"tokens_file": "tokens", "certificate": "node.pem", "key": "node.pem"}
    path.write_text(json.dumps({"master": {"ip": "10.0.0.1", "port": 2222}, "security": security}))
    with pytest.raises(ClusterConfigError, match="tokens_file is for people, the nodes have a token of their own"):
        Cluster.load(path)


def test_comments_and_hashes_are_read() -> None:
    def refuse(number: int, problem: str, remedy: str) -> Exception:
        return AssertionError(f"{number} {problem} {remedy}")

    text = f"# the team\n\nalice operator {TOKEN}  # since May\nbob user sha256:{'AB' * 32}\n"
    callers: Any = parse_tokens(text, refuse)
    assert sorted((caller.name, caller.is_operator) for caller in callers.values()) == [("alice", True), ("bob", False)]
    assert "ab" * 32 in callers
