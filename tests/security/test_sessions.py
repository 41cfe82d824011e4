"""A session belongs to whoever has its secret; its id, which logs and Status show in part, opens nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

import shardwright as sw
from shardwright.errors import ArrayError, AuthenticationError, SessionError
from shardwright.plans.layouts import Layout
from shardwright.proto.v1 import master_pb2
from shardwright.protocol import wire
from shardwright.protocol.session_secrets import id_of, new_secret
from tests.security.people import EVERYWHERE, PeoplesCluster, put_values, still_has_values, stubs_of
from tests.server.raw_client import RawClient, wait_until

#: A session that never was.
NOBODYS = id_of(new_secret())


def calls_that_name_a_session() -> list[tuple[str, Any, bool, bool]]:
    """(service, method, is the request a stream, is the reply) of the protocol, as its descriptors have it."""
    return [
        (service.name, method, method.client_streaming, method.server_streaming)
        for service in master_pb2.DESCRIPTOR.services_by_name.values()
        for method in service.methods
        if names_session(method.input_type)
    ]


def names_session(kind: Any) -> bool:
    return any(
        field.name == "session_id" or (field.message_type is not None and names_session(field.message_type))
        for field in kind.fields
    )


def request_for(kind: Any, session_id: str) -> Any:
    """A message that names the session, wherever its type has a place for it."""
    message = getattr(master_pb2, kind.name)()
    for field in kind.fields:
        if field.name == "session_id":
            message.session_id = session_id
        elif field.message_type is not None and "session_id" in field.message_type.fields_by_name:
            getattr(message, field.name).session_id = session_id
    return message


def call(channel: grpc.Channel, service: str, method: Any, session_id: str, metadata: Any) -> None:
    """Make the call, to its end; raises our error."""
    path = f"/shardwright.proto.v1.{service}/{method.name}"
    request = request_for(method.input_type, session_id)
    kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
    make = getattr(channel, kind)(
        path,
        request_serializer=type(request).SerializeToString,
        response_deserializer=getattr(master_pb2, method.output_type.name).FromString,
    )
    try:
        replies = make(iter([request]) if method.client_streaming else request, metadata=metadata, timeout=30)
        if method.server_streaming:
            list(replies)
    except grpc.RpcError as error:
        wire.raise_from_rpc(error)


def attempts(alice: RawClient, bob: RawClient) -> Iterator[tuple[str, Any, grpc.Channel]]:
    for service, method, _, _ in calls_that_name_a_session():
        for channel in stubs_of(bob)[service]:
            yield service, method, channel


def test_every_call_is_known_to_the_servers() -> None:
    """What this test finds in the protocol is what the servers look into."""
    from shardwright.server.access import SESSION_FIELDS

    found = {f"/shardwright.proto.v1.{service}/{method.name}" for service, method, _, _ in calls_that_name_a_session()}
    assert found == set(SESSION_FIELDS)
    assert len(found) >= 16


@pytest.mark.cluster
def test_the_id_of_another_session_opens_nothing(alice: RawClient, bob: RawClient) -> None:
    """With all that bob may have: a token, a session of his own with its secret, and the whole id of alice's."""
    put_values(alice)
    token = [pair for pair in bob.metadata if pair[0] == "authorization"]
    secrets = {"his own": list(bob.metadata), "none": token, "a guess": [*token, ("shardwright-session", new_secret())]}
    tried = 0
    for service, method, channel in attempts(alice, bob):
        for metadata in secrets.values():
            messages = []
            for session_id in (alice.session_id, NOBODYS):
                with pytest.raises(AuthenticationError) as caught:
                    call(channel, service, method, session_id, metadata)
                messages.append(str(caught.value).replace(session_id[:8], "ID"))
            assert messages[0] == messages[1], "the error tells whether the session exists"
            tried += 1
    assert tried >= 3 * 16
    assert still_has_values(alice)
    put_values(alice, 2)


@pytest.mark.cluster
def test_a_stream_takes_nothing_of_another_session(alice: RawClient, bob: RawClient) -> None:
    """Neither the stream of steps, nor a program that begins in one's own session and goes on in another's."""
    mine = alice.steps()
    opening = [master_pb2.RunStepsRequest(session_id=alice.session_id)]
    stranger = bob.master.RunSteps(iter(opening), metadata=bob.metadata, timeout=30)
    with pytest.raises(grpc.RpcError) as refused:
        next(stranger)
    assert isinstance(wire.error_from_rpc(refused.value), AuthenticationError)
    chunks = [
        master_pb2.UploadProgramRequest(session_id=bob.session_id, chunk=b"x"),
        master_pb2.UploadProgramRequest(session_id=alice.session_id, chunk=b"x"),
    ]
    with pytest.raises(AuthenticationError):
        bob.call("UploadProgram", iter(chunks))
    mine.send(1, "", [], [], move=master_pb2.MoveArrays())
    assert mine.reply().number == 1, "alice's stream goes on"
    mine.end()


@pytest.mark.cluster
def test_arrays_of_two_sessions_have_nothing_to_do_with_each_other(alice: RawClient, bob: RawClient) -> None:
    put_values(alice)
    put_values(bob)
    bob.call("ReleaseArrays", master_pb2.ReleaseArraysRequest(session_id=bob.session_id, array_ids=[1]))

    def is_gone() -> bool:
        try:
            bob.fetch(1, Layout.replicated("f32", (4,), EVERYWHERE))
        except ArrayError:
            return True
        return False

    wait_until(is_gone)
    assert still_has_values(alice)


@pytest.mark.cluster
def test_status_shows_no_id_that_opens_anything(alice: RawClient, olga: RawClient) -> None:
    text = str(olga.call("Status", master_pb2.StatusRequest()))
    assert alice.session_id[:8] in text
    assert alice.session_id not in text
    assert alice.session is not None
    assert alice.session.session_secret not in text
    assert id_of(alice.session.session_secret) == alice.session_id


@pytest.mark.cluster
def test_a_closed_session_stays_closed_for_its_holder(alice: RawClient) -> None:
    """Only who has the secret hears that a session is gone."""
    alice.call("CloseSession", master_pb2.CloseSessionRequest(session_id=alice.session_id))
    with pytest.raises(SessionError, match="no session"):
        alice.call("ReleaseArrays", master_pb2.ReleaseArraysRequest(session_id=alice.session_id))


@pytest.mark.cluster
def test_the_secret_is_not_shown_by_python(cluster: PeoplesCluster) -> None:
    with sw.connect(cluster.address, token="token-of-alice-0123456789") as session:
        secret = session.info.session_secret
        assert secret
        assert secret not in f"{session.info!r} {session!r} {session._state!r}"
