"""Sessions with a name: who comes with the token that one was opened with takes it up, others are refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import shardwright as sw
from shardwright.protocol.session_secrets import id_of, named_secret
from shardwright.server.own_node import LOG_NAME
from tests.security import people
from tests.security.people import TOKENS, PeoplesCluster
from tests.server.raw_client import wait_until

VALUES = np.arange(6, dtype=np.float32)


def connect(cluster: PeoplesCluster, person: str, name: str | None = None) -> sw.Session:
    opened: list[sw.Session] = []

    def is_open() -> bool:
        try:
            opened.append(sw.connect(cluster.address, token=TOKENS[person], name=name))
        except sw.ServerUnavailableError:
            return False
        return True

    wait_until(is_open, 90)
    return opened[0]


def keep_values(session: sw.Session) -> None:
    kept = {"values": session.parallelize(lambda x: x * 2)(VALUES)}
    session.keep(kept)
    kept["values"] = session.parallelize(lambda x: x + 1, donate_argnums=0)(kept["values"])
    kept["values"].block_until_ready()


def assert_refused(cluster: PeoplesCluster, name: str, *persons: str) -> None:
    for person in persons:
        with pytest.raises(sw.AuthenticationError, match=f"'{name}' was opened with another token") as caught:
            sw.connect(cluster.address, token=TOKENS[person], name=name)
        assert "another name" in caught.value.remedy


@pytest.mark.cluster
def test_a_name_opens_a_session_with_its_token_only(cluster: PeoplesCluster) -> None:
    first = connect(cluster, "alice", "run-1")
    keep_values(first)
    assert_refused(cluster, "run-1", "bob", "olga")
    first.leave()
    assert_refused(cluster, "run-1", "bob", "olga")
    with connect(cluster, "alice", "run-1") as second:
        assert second.info.session_id == first.info.session_id
        resumed = second.resume()
        assert resumed is not None
        assert resumed.is_live
        np.testing.assert_array_equal(resumed.state["values"], VALUES * 2 + 1)
        assert_refused(cluster, "run-1", "bob")
    with connect(cluster, "bob", "run-1") as third:
        assert third.info.session_id != first.info.session_id, "it was closed: the name is free again"
        assert third.resume() is None


@pytest.mark.cluster
def test_the_next_session_of_a_name_is_another_one(cluster: PeoplesCluster) -> None:
    ids = []
    for _ in range(2):
        with connect(cluster, "alice", "run-2") as session:
            ids.append(session.info.session_id)
    assert ids[0] != ids[1]


@pytest.mark.cluster
def test_names_that_no_session_can_have(cluster: PeoplesCluster) -> None:
    for name in ("", "x" * 201, "two\nlines"):
        with pytest.raises(sw.OptionError, match="name="):
            sw.connect(cluster.address, token=TOKENS["alice"], name=name)


def test_a_secret_is_made_of_token_salt_and_name() -> None:
    made = {named_secret(*parts) for parts in (("a", "b", "c"), ("a", "c", "b"), ("b", "b", "c"), ("a", "bc", ""))}
    assert len(made) == 4
    assert named_secret("a", "b", "c") in made
    assert len({id_of(secret) for secret in made}) == 4


@pytest.fixture
def durable(tmp_path: Path) -> Iterator[PeoplesCluster]:
    with people.running(tmp_path, options=("--state-dir", str(tmp_path / "state"), "--grace", "30")) as running:
        yield running


@pytest.mark.cluster
def test_the_same_holds_after_a_restart_of_the_master(durable: PeoplesCluster, tmp_path: Path) -> None:
    """And the state directory tells nothing: of a session it has a hash, and a salt."""
    named, plain = connect(durable, "alice", "run-1"), connect(durable, "alice")
    keep_values(named)
    secrets = [named.info.session_secret, plain.info.session_secret, *TOKENS.values()]
    named.leave()
    durable.kill_master()
    durable.start(0)
    assert_refused_soon(durable, "run-1", "bob")
    assert_refused(durable, "run-1", "olga")
    taken_up = connect(durable, "alice", "run-1")
    resumed = taken_up.resume()
    assert resumed is not None
    np.testing.assert_array_equal(resumed.state["values"], VALUES * 2 + 1)
    np.testing.assert_array_equal(plain.parallelize(lambda x: x - 1)(VALUES), VALUES - 1)
    files = [path for path in (tmp_path / "state").iterdir() if path.is_file()]
    assert {path.name for path in files} >= {"state.sqlite3", LOG_NAME}
    for path in files:
        assert path.stat().st_mode & 0o077 == 0, f"others can read {path.name}"
        contents = path.read_bytes()
        assert not any(secret.encode() in contents for secret in secrets), f"a secret is in {path.name}"
    taken_up.close()
    plain.close()


def assert_refused_soon(cluster: PeoplesCluster, name: str, person: str) -> None:
    """Once the master is back."""
    refused: list[sw.AuthenticationError] = []

    def is_refused() -> bool:
        try:
            sw.connect(cluster.address, token=TOKENS[person], name=name)
        except sw.ServerUnavailableError:
            return False
        except sw.AuthenticationError as error:
            refused.append(error)
        return True

    wait_until(is_refused, 60)
    assert "another token" in refused[0].message
