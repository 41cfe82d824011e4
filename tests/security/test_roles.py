"""Tokens of people: names and roles, operators' calls, and a file that changes while servers run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from shardwright.clusters.access_tokens import Caller, hash_of
from shardwright.errors import AuthenticationError, OptionError, SessionError
from shardwright.proto.v1 import master_pb2, worker_pb2, worker_pb2_grpc
from shardwright.protocol import wire
from shardwright.server.access import Access
from shardwright.server.security import Protection
from tests.security.people import ROLES, TOKENS, PeoplesCluster, put_values, run_command, still_has_values
from tests.server.raw_client import RawClient, wait_until


def sessions_seen_by(client: RawClient) -> dict[str, str]:
    """Owner by the first digits of the session's id."""
    return {each.session_id: each.owner for each in client.call("Status", master_pb2.StatusRequest()).sessions}


@pytest.mark.cluster
def test_status_names_owners_to_operators_and_shows_others_their_own(
    alice: RawClient, bob: RawClient, olga: RawClient
) -> None:
    hers, his = alice.session_id[:8], bob.session_id[:8]
    seen = sessions_seen_by(olga)
    assert (seen[hers], seen[his]) == ("alice", "bob")
    assert set(sessions_seen_by(alice).values()) == {"alice"}
    assert hers in sessions_seen_by(alice)
    assert his not in sessions_seen_by(alice)


@pytest.mark.cluster
def test_an_operator_closes_a_session_and_its_client_hears_who(
    cluster: PeoplesCluster, alice: RawClient, bob: RawClient
) -> None:
    put_values(bob)
    steps = alice.steps()
    steps.send(1, "", [], [], move=master_pb2.MoveArrays())
    assert steps.reply().number == 1
    done = run_command("close", cluster.address, alice.session_id[:8], SHARDWRIGHT_TOKEN=TOKENS["olga"])
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"session {alice.session_id[:8]} of alice is closed\n"
    with pytest.raises(SessionError, match="closed by the operator olga"):
        steps.reply()
    with pytest.raises(SessionError, match="no session"):
        alice.call("ReleaseArrays", master_pb2.ReleaseArraysRequest(session_id=alice.session_id))
    assert still_has_values(bob)
    assert f"session {alice.session_id[:8]} of alice is closed by the operator olga" in cluster.log()


@pytest.mark.cluster
def test_an_operator_ends_a_step_and_a_user_does_not(cluster: PeoplesCluster, alice: RawClient) -> None:
    steps = alice.steps()
    steps.send(1, "", [77], [], snapshot=master_pb2.SnapshotArrays())  # it waits for array 77
    which = f"{alice.session_id[:8]}/1"
    refused = run_command("cancel", cluster.address, which, SHARDWRIGHT_TOKEN=TOKENS["alice"])
    assert refused.returncode == 1
    assert "EndSteps is for operators" in refused.stderr
    done = run_command("cancel", cluster.address, which, SHARDWRIGHT_TOKEN=TOKENS["olga"])
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"step 1 of session {alice.session_id[:8]} of alice will not run\n"
    error = steps.reply().error
    assert "cancelled by the operator olga" in error.message
    again = run_command("cancel", cluster.address, which, SHARDWRIGHT_TOKEN=TOKENS["olga"])
    assert "step 1 is not under way" in again.stderr


@pytest.mark.cluster
def test_an_operator_is_told_what_was_wrong(alice: RawClient, olga: RawClient) -> None:
    with pytest.raises(SessionError, match="no session none"):
        olga.call("EndSession", master_pb2.EndSessionRequest(session="none"))
    with pytest.raises(SessionError, match="empty"):
        olga.call("EndSession", master_pb2.EndSessionRequest())
    with pytest.raises(OptionError, match="reason"):
        olga.call("Drain", master_pb2.DrainRequest())
    assert alice.session_id[:8] in sessions_seen_by(olga)


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("method", "request_"),
    [("EndSession", master_pb2.EndSessionRequest(session="1")), ("Drain", master_pb2.DrainRequest(reason="x"))],
)
def test_users_make_no_calls_of_operators(bob: RawClient, method: str, request_: object) -> None:
    with pytest.raises(AuthenticationError, match=f"{method} is for operators, and the token of bob has the role user"):
        bob.call(method, request_)


@pytest.mark.cluster
def test_users_are_no_nodes(bob: RawClient) -> None:
    """Else they would be sent the programs and arguments of all."""
    cluster = worker_pb2_grpc.ClusterStub(bob.channel)  # type: ignore[no-untyped-call]
    hello = worker_pb2.SupervisorEvent(hello=worker_pb2.DaemonHello(node_index=1))
    ready = worker_pb2.ExecutorEvent(hello=worker_pb2.ExecutorHello(node_index=1))
    for stream in (
        cluster.Supervise(iter([hello]), metadata=bob.metadata, timeout=10),
        cluster.Execute(iter([ready]), metadata=bob.metadata, timeout=10),
    ):
        with pytest.raises(grpc.RpcError) as refused:
            next(stream)
        error = wire.error_from_rpc(refused.value)
        assert isinstance(error, AuthenticationError)
        assert "for operators" in error.message


@pytest.fixture
def original_tokens(cluster: PeoplesCluster) -> Iterator[str]:
    """The lines of the tokens file, put back afterwards."""
    lines = cluster.tokens_file.read_text()
    yield lines
    cluster.write_tokens(lines)
    wait_until(lambda: can_call(cluster, TOKENS["alice"]))


def can_call(cluster: PeoplesCluster, token: str) -> bool:
    client = RawClient(cluster.address, token)
    try:
        client.call("Status", master_pb2.StatusRequest())
    except AuthenticationError:
        return False
    finally:
        client.close()
    return True


@pytest.mark.cluster
def test_people_come_and_go_while_servers_run(
    cluster: PeoplesCluster, alice: RawClient, original_tokens: str, tmp_path: Path
) -> None:
    put_values(alice)
    made = run_command("token", "carol", "--file", str(cluster.tokens_file))
    assert made.returncode == 0, made.stderr
    token = made.stdout.strip()
    assert token not in cluster.tokens_file.read_text()
    assert cluster.tokens_file.stat().st_mode & 0o777 == 0o600
    wait_until(lambda: can_call(cluster, token))

    cluster.write_tokens("what is this\n")
    wait_until(lambda: can_call(cluster, token) and "the tokens that were read before stay valid" in cluster.log())

    cluster.write_tokens(original_tokens)
    wait_until(lambda: not can_call(cluster, token))

    def is_refused_by_data_ports() -> bool:
        try:
            still_has_values(alice)
        except AuthenticationError:
            return True
        return False

    cluster.write_tokens("".join(line for line in original_tokens.splitlines(True) if "alice" not in line))
    wait_until(is_refused_by_data_ports)


def test_executors_start_again_while_the_file_is_wrong(tmp_path: Path) -> None:
    """An edit in a hurry shall not end a service: nodes go on, people wait until it is mended."""
    path = tmp_path / "tokens"
    path.write_text("what is this\n")
    path.chmod(0o600)
    access = Access(Protection(token="of-the-nodes", tokens_file=str(path)))
    carol = [("authorization", "Bearer token-of-carol-0123456789")]
    nodes = [("authorization", "Bearer of-the-nodes")]
    assert access.caller(nodes) == Caller(name="default", role="operator")
    assert access.caller(carol) is None
    path.write_text("carol user token-of-carol-0123456789\n")
    wait_until(lambda: access.caller(carol) == Caller(name="carol", role="user"))


@pytest.mark.cluster
def test_a_token_may_be_given_by_its_hash(cluster: PeoplesCluster, original_tokens: str) -> None:
    cluster.write_tokens(f"{original_tokens}# by its hash\ndave user sha256:{hash_of('the token of dave, in words')}\n")
    wait_until(lambda: can_call(cluster, "the token of dave, in words"))


@pytest.mark.cluster
def test_logs_name_who_opened_a_session(cluster: PeoplesCluster, alice: RawClient) -> None:
    wait_until(lambda: f"session {alice.session_id[:8]} of alice opened by" in cluster.log())


@pytest.mark.cluster
def test_shardwright_status_names_owners(cluster: PeoplesCluster, bob: RawClient) -> None:
    done = run_command("status", cluster.address, SHARDWRIGHT_TOKEN=TOKENS["olga"])
    assert f"session {bob.session_id[:8]} of bob: step 0" in done.stdout
    done = run_command("status", cluster.address, "--json", SHARDWRIGHT_TOKEN=TOKENS["bob"])
    assert {each["owner"] for each in json.loads(done.stdout)["sessions"]} == {"bob"}


@pytest.mark.cluster
def test_the_one_token_is_an_operator_s(cluster: PeoplesCluster, alice: RawClient) -> None:
    """The nodes' own: here the local user's, who needs no token to operate his servers."""
    assert ROLES["alice"] == "user"
    done = run_command("status", cluster.address, SHARDWRIGHT_TOKEN="")
    assert f"session {alice.session_id[:8]} of alice" in done.stdout


# ---- what `shardwright token` refuses ----------------------------------------------------
def test_token_without_a_file_prints_the_line_to_add() -> None:
    done = run_command("token", "erin", "--role", "operator")
    assert done.returncode == 0
    assert f"erin operator sha256:{hash_of(done.stdout.strip())}\n" in done.stderr


def test_token_refuses_a_name_that_is_there(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    assert run_command("token", "erin", "--file", str(path)).returncode == 0
    before = path.read_text()
    done = run_command("token", "erin", "--file", str(path))
    assert done.returncode == 1
    assert "erin has a token in line 1 already" in done.stderr
    assert path.read_text() == before
    path.chmod(0o644)
    done = run_command("token", "frank", "--file", str(path))
    assert f"chmod 600 {path}" in done.stderr
    assert path.read_text() == before
