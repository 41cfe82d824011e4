"""TLS and tokens between real processes, with certificates made for the test."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import grpc
import numpy as np
import pytest

from shardwright.errors import AuthenticationError, ServerUnavailableError
from shardwright.plans.layouts import Layout
from shardwright.plans.shardings import Mesh
from shardwright.proto.v1 import master_pb2_grpc
from shardwright.protocol import wire
from shardwright.server.security import check_port, free_port
from tests.server.raw_client import RawClient, Server

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


@pytest.mark.slow
@pytest.mark.skipif(openssl is None, reason="needs the openssl command to make certificates")
def test_every_connection_of_a_secured_cluster_is_encrypted_and_asks_for_the_token(tmp_path: Path) -> None:
    path, address = secure_cluster(tmp_path)
    servers = [Server(str(path), str(task)) for task in (0, 1)]
    try:
        certificate = (tmp_path / "node.pem").read_bytes()
        client = TlsClient(address, "secret", certificate)
        client.open_soon()
        layout = Layout.replicated("f32", (3,), Mesh.of({"data": 2}))
        client.put(1, np.arange(3, dtype=np.float32), layout)
        np.testing.assert_array_equal(client.fetch(1, layout), np.arange(3))
        with pytest.raises(AuthenticationError):
            TlsClient(address, "guess", certificate).open()
        with pytest.raises(ServerUnavailableError):
            RawClient(address, "secret").open()  # no TLS
    finally:
        for server in servers:
            server.stop()


def test_a_port_that_cannot_be_opened_is_explained() -> None:
    with pytest.raises(ServerUnavailableError, match=r"192\.0\.2\.1:80 cannot be opened"):
        check_port("192.0.2.1", 80)
