"""Ports of servers: where they listen, and whom they answer, with TLS (certificates made for the test) and tokens."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import shardwright as sw
from shardwright.errors import AuthenticationError, ServerUnavailableError
from shardwright.plans.layouts import Layout
from shardwright.plans.shardings import Mesh
from shardwright.proto.v1 import master_pb2_grpc, worker_pb2
from shardwright.protocol import wire
from shardwright.server.security import check_port, free_port
from tests.faults.test_load import everywhere, methods
from tests.security import people
from tests.security.people import put_values
from tests.server.raw_client import RawClient, Server, command_of, embedded, is_loopback, listening_addresses
from tests.two_nodes import TwoNodes

openssl = shutil.which("openssl")


class TlsClient(RawClient):
    """Trusts one authority."""

    def __init__(self, address: str, token: str, ca: bytes) -> None:
        super().__init__(address, token)
        self.credentials = grpc.ssl_channel_credentials(ca)
        self.channel = grpc.secure_channel(address, self.credentials, options=wire.CHANNEL_OPTIONS)
        self.master = master_pb2_grpc.MasterStub(self.channel)

    def data(self, node: object) -> master_pb2_grpc.ArrayTransferStub:
        channel = grpc.secure_channel(node.data_address, self.credentials)  # type: ignore[attr-defined]
        return master_pb2_grpc.ArrayTransferStub(channel)


def secure_cluster(folder: Path) -> tuple[Path, str]:
    """A cluster file of two loopback nodes with TLS and a token; (path, master's address)."""
    subprocess.run(
        [
            str(openssl), "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=test",
            "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "node.key", "-out", "node.pem",
        ],
        cwd=folder, check=True, capture_output=True,
    )  # fmt: skip
    (folder / "token").write_text("secret\n")
    (folder / "token").chmod(0o600)
    nodes = [{"ip": "127.0.0.1", "port": free_port("127.0.0.1"), "devices": 1} for _ in range(2)]
    security = {"token_file": "token", "certificate": "node.pem", "key": "node.key", "ca": "node.pem"}
    path = folder / "cluster.json"
    path.write_text(json.dumps({"master": nodes[0], "workers": nodes[1:], "security": security}))
    return path, f"127.0.0.1:{nodes[0]['port']}"


needs_openssl = pytest.mark.skipif(openssl is None, reason="needs the openssl command to make certificates")


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[Server], TlsClient]]:
    """Two nodes with TLS and a token, and a client with a session."""
    folder = tmp_path_factory.mktemp("secured")
    path, address = secure_cluster(folder)
    servers = [Server(str(path), str(task)) for task in (0, 1)]
    try:
        client = TlsClient(address, "secret", (folder / "node.pem").read_bytes())
        client.open_soon()
        yield servers, client
    finally:
        for server in servers:
            server.stop()


@needs_openssl
@pytest.mark.cluster
def test_every_connection_of_a_secured_cluster_is_encrypted_and_asks_for_the_token(
    secured: tuple[list[Server], TlsClient],
) -> None:
    _, client = secured
    layout = Layout.replicated("f32", (3,), Mesh.of({"data": 2}))
    client.put(1, np.arange(3, dtype=np.float32), layout)
    np.testing.assert_array_equal(client.fetch(1, layout), np.arange(3))
    with pytest.raises(ServerUnavailableError):
        RawClient(client.channel_address, "secret").open()  # no TLS


@needs_openssl
@pytest.mark.cluster
@pytest.mark.parametrize("token", [None, "", "guess", "secret "])
def test_no_call_is_answered_without_the_token(secured: tuple[list[Server], TlsClient], token: str | None) -> None:
    """Of any service, at any port of ours; but for health, which tells nothing."""
    _, client = secured
    assert client.session is not None
    metadata = [("authorization", f"Bearer {token}")] if token is not None else []
    reflection = ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", True, True)
    refusals = 0
    for node in client.session.nodes:
        with grpc.secure_channel(node.data_address, client.credentials) as data:
            calls = [*everywhere(client.channel, data), (client.channel, reflection)]
            for channel, (path, streams_in, streams_out) in calls:
                error = error_of(channel, path, streams_in, streams_out, metadata)
                assert error is not None, f"{path} was answered"
                assert error.code() is grpc.StatusCode.UNAUTHENTICATED, (path, error)
                assert isinstance(wire.error_from_rpc(error), AuthenticationError), path
                refusals += 1
    assert refusals >= 2 * 26
    health = health_pb2_grpc.HealthStub(client.channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
    assert health.status == health_pb2.HealthCheckResponse.SERVING


def error_of(
    channel: grpc.Channel, path: str, streams_in: bool, streams_out: bool, metadata: object, request: bytes = b""
) -> grpc.RpcError | None:
    """Of a call; every kind of message can be made of an empty one."""
    kind = f"{'stream' if streams_in else 'unary'}_{'stream' if streams_out else 'unary'}"
    try:
        reply = getattr(channel, kind)(path)(iter([request]) if streams_in else request, metadata=metadata, timeout=20)
        if streams_out:
            next(reply, None)
    except grpc.RpcError as error:
        return error
    return None


@pytest.fixture
def running(request: pytest.FixtureRequest) -> Iterator[tuple[list[psutil.Process], RawClient]]:
    """Servers of the kind that is asked for, with all their processes, and a client with a session."""
    match request.param:
        case "plain":
            nodes: TwoNodes = request.getfixturevalue("two_nodes")
            client = RawClient(nodes.address)
            client.open()
            yield [process for server in nodes.servers for process in server.family()], client
            client.close()
        case "tokens":
            yield request.getfixturevalue("cluster").family(), request.getfixturevalue("alice")
        case "TLS":
            servers, client = request.getfixturevalue("secured")
            yield [process for server in servers for process in server.family()], client
        case "embedded":
            for server, client in embedded(1):
                yield server.family(), client


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("running", "bearer", "key", "refusal"),
    [
        pytest.param("TLS", "guess", "", "UNAUTHENTICATED", marks=needs_openssl),
        ("tokens", people.TOKENS["olga"], "", "does not carry this service's key"),
        ("tokens", people.TOKENS["olga"], "guess", "does not carry this service's key"),
    ],
    indirect=["running"],
    ids=["tls", "token", "token and key"],  # a test's name is in the environment of servers that it starts
)
def test_snapshots_ask_for_the_token_and_the_daemon_s_key(
    running: tuple[list[psutil.Process], RawClient], bearer: str, key: str, refusal: str
) -> None:
    """Their service is for executors: an operator who knows a session's id reads no parts of it either."""
    processes, client = running
    put_values(client, array_id=7)
    parts = worker_pb2.ListPartsRequest(session_id=client.session_id, number=1).SerializeToString()
    metadata = [("authorization", f"Bearer {bearer}"), *([("shardwright-snapshots", key)] if key else [])]
    daemons = [process for process in processes if "executor" not in command_of(process)]
    refusals = 0
    for _, port in listening_addresses(daemons):
        with dial(client, f"127.0.0.1:{port}") as channel:
            for path, streams_in, streams_out in methods("Snapshots", worker_pb2):
                request = parts if path.endswith("/ListParts") else b""
                error = error_of(channel, path, streams_in, streams_out, metadata, request)
                assert error is not None, (path, port)
                refusals += refusal in f"{error.code()} {wire.error_from_rpc(error)}"
    assert refusals == 2 * 4, "each method, of each node's daemon"


def dial(client: RawClient, address: str) -> grpc.Channel:
    """As the client does."""
    if isinstance(client, TlsClient):
        return grpc.secure_channel(address, client.credentials)
    return grpc.insecure_channel(address)


@needs_openssl
@pytest.mark.cluster
def test_a_client_without_the_authority_hears_where_to_name_it(secured: tuple[list[Server], TlsClient]) -> None:
    with pytest.raises(ServerUnavailableError) as caught:
        sw.connect(secured[1].channel_address, token="secret")
    assert "SHARDWRIGHT_CA" in str(caught.value)


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("running", "ports"),
    [("plain", 5), ("tokens", 5), pytest.param("TLS", 5, marks=needs_openssl), ("embedded", 2)],
    indirect=["running"],
)
def test_servers_on_loopback_listen_nowhere_else(running: tuple[list[psutil.Process], RawClient], ports: int) -> None:
    """ports: the master's, two daemons', two executors' at least; an embedded server's and its executor's."""
    hosts = [host for host, _ in listening_addresses(running[0])]
    assert len(hosts) >= ports
    assert all(map(is_loopback, hosts)), hosts


def test_a_port_that_cannot_be_opened_is_explained() -> None:
    with pytest.raises(ServerUnavailableError, match=r"192\.0\.2\.1:80 cannot be opened"):
        check_port("192.0.2.1", 80)
