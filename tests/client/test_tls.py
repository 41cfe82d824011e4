"""What is wrong with a server's certificate, in words."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import shardwright as sw
from shardwright.client import connection

openssl = shutil.which("openssl")
pytestmark = pytest.mark.skipif(openssl is None, reason="needs the openssl command to make certificates")


def make_certificate(folder: Path, name: str, *, days: int = 1, names: str = "IP:127.0.0.1,DNS:localhost") -> Path:
    """A self-signed certificate, `NAME.pem`, and its key; of negative days it ended before it was made."""
    key, request, extensions = (folder / f"{name}.{kind}" for kind in ("key", "csr", "ext"))
    extensions.write_text(f"subjectAltName={names}\n")
    run_openssl(
        "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", f"/CN={name}",
        "-keyout", key, "-out", request,
    )  # fmt: skip
    certificate = folder / f"{name}.pem"
    run_openssl(
        "x509", "-req", "-in", request, "-signkey", key, "-days", days, "-extfile", extensions, "-out", certificate
    )
    return certificate


def run_openssl(*words: object) -> None:
    subprocess.run([str(openssl), *map(str, words)], check=True, capture_output=True)


@contextmanager
def listening(certificate: Path | None) -> Iterator[str]:
    """The address of something that shakes hands, and answers nothing."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if certificate is not None:
        context.load_cert_chain(certificate, certificate.with_suffix(".key"))
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer(peer: socket.socket) -> None:
            try:
                with context.wrap_socket(peer, server_side=True) if certificate is not None else peer as stream:
                    if certificate is None:
                        stream.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                    stream.recv(1)
            except OSError:
                pass

        def accept() -> None:
            while True:
                try:
                    peer, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=answer, args=(peer,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "CONNECT_TIMEOUT_S", 0.5)
    monkeypatch.setenv("SHARDWRIGHT_TOKEN", "token")


@pytest.mark.parametrize(
    ("server", "trusted", "problem", "remedy"),
    [
        ("expired", "expired", "the server's certificate has expired", "renew it"),
        ("other", "good", "the server's certificate is not trusted", "SHARDWRIGHT_CA to the file of the server's"),
        ("elsewhere", "elsewhere", "the server's certificate is not for '127.0.0.1'", "subjectAltName"),
        ("good", None, "the server uses TLS", "set SHARDWRIGHT_CA"),
        (None, "good", "the server does not use TLS", "unset SHARDWRIGHT_CA"),
        ("good", "empty", "empty.pem holds no certificate", "a PEM file"),
    ],
)
def test_a_certificate_that_does_not_do(
    server: str | None, trusted: str | None, problem: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_certificate(tmp_path, "good")
    make_certificate(tmp_path, "other")
    make_certificate(tmp_path, "elsewhere", names="DNS:elsewhere.example")
    make_certificate(tmp_path, "expired", days=-1)
    (tmp_path / "empty.pem").write_text("")
    if trusted is not None:
        monkeypatch.setenv("SHARDWRIGHT_CA", str(tmp_path / f"{trusted}.pem"))
    with (
        listening(tmp_path / f"{server}.pem" if server else None) as address,
        pytest.raises(sw.ServerUnavailableError) as caught,
    ):
        sw.connect(address)
    assert problem in caught.value.message
    assert remedy in caught.value.remedy
