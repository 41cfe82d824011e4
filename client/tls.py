"""Why no secure connection comes about: gRPC says only that there is none."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

#: OpenSSL's X509_V_ERR codes (openssl/x509_vfy.h).
_NOT_YET_VALID, _EXPIRED = 9, 10
_WRONG_NAME, _WRONG_ADDRESS = 62, 64


def explain_no_channel(address: str, ca_file: str | None, timeout_s: float) -> tuple[str, str] | None:
    """(problem, remedy) of a server that listens and does not answer, by a handshake of our own; None: not the TLS.

    ca_file: PEM file of the trusted certificate; None: a connection without TLS was tried.
    """
    if ca_file is None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if _handshake(context, address, timeout_s) is not None:
            return None
        return "the server uses TLS", "set SHARDWRIGHT_CA to the file of its certificate, or of who vouches for it"
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except ssl.SSLError:
        return f"{Path(ca_file)} holds no certificate", "set SHARDWRIGHT_CA to a PEM file"
    error = _handshake(context, address, timeout_s)
    if isinstance(error, ssl.SSLCertVerificationError):
        return _explain_certificate(error, address, ca_file)
    if isinstance(error, ssl.SSLError):
        return "the server does not use TLS", "unset SHARDWRIGHT_CA, or check the port"
    return None


def _explain_certificate(error: ssl.SSLCertVerificationError, address: str, ca_file: str) -> tuple[str, str]:
    host = address.rpartition(":")[0].strip("[]")
    match error.verify_code:
        case code if code in (_EXPIRED, _NOT_YET_VALID):
            when = "has expired" if code == _EXPIRED else "is not valid yet"
            return f"the server's certificate {when}", "renew it on the server, and check both machines' clocks"
        case code if code in (_WRONG_NAME, _WRONG_ADDRESS):
            return (
                f"the server's certificate is not for {host!r}",
                "dial a name that it is for, or make one with this name among its subjectAltName",
            )
        case _:
            return (
                f"the server's certificate is not trusted: {error.verify_message} (SHARDWRIGHT_CA is {ca_file})",
                "set SHARDWRIGHT_CA to the file of the server's certificate, or of who vouches for it",
            )


def _handshake(context: ssl.SSLContext, address: str, timeout_s: float) -> OSError | None:
    """What a handshake fails with; None where it succeeds."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((host, int(port)), timeout=timeout_s) as plain,
            context.wrap_socket(plain, server_hostname=host),
        ):
            return None
    except OSError as error:
        return error
