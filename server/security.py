"""Tokens, TLS and binding of every port a server opens or dials."""

from __future__ import annotations

import errno
import hmac
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from shardwright.clusters.cluster import Cluster, join_address
from shardwright.errors import AuthenticationError, ClusterConfigError, ServerUnavailableError
from shardwright.protocol import wire
from shardwright.server.handlers import AioInterceptor, Handler, Interceptor, abort, abort_aio, with_behaviour

#: Health probes carry no token and learn nothing but "serving".
_OPEN_METHODS = "/grpc.health.v1.Health/"

_DENIAL = AuthenticationError(
    "the call carries no valid token", remedy="pass the token that the server's cluster file names"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Protection:
    """What one process needs to open and dial protected ports; all None: plain loopback."""

    token: str | None = None
    certificate: bytes | None = None
    key: bytes | None = None
    ca: bytes | None = None

    @classmethod
    def of(cls, cluster: Cluster) -> Protection:
        """Reads the PEM files; ClusterConfigError names one that cannot be read."""
        security = cluster.security
        if security is None:
            return cls(token=cluster.token)
        certificate, key, ca = (_read_pem(path) for path in (security.certificate, security.key, security.ca))
        return cls(token=cluster.token, certificate=certificate, key=key, ca=ca)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Call metadata that carries the token."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()

    def bind(self, server: grpc.Server | grpc.aio.Server, host: str, port: int) -> int:
        """Open `host:port` (0: any) on a server and return the port.

        Raises ServerUnavailableError where it is taken or not an address of this machine.
        """
        check_port(host, port)
        address = join_address(host, port)
        try:
            if self.certificate is None or self.key is None:
                return server.add_insecure_port(address)
            credentials = grpc.ssl_server_credentials([(self.key, self.certificate)])
            return server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise ServerUnavailableError(f"port {port} of {host} cannot be opened: {error}", where=address) from None

    def channel(self, address: str) -> grpc.Channel:
        credentials = self._channel_credentials()
        options = wire.CHANNEL_OPTIONS
        if credentials is None:
            return grpc.insecure_channel(address, options=options)
        return grpc.secure_channel(address, credentials, options=options)

    def aio_channel(self, address: str) -> grpc.aio.Channel:
        credentials = self._channel_credentials()
        options = wire.CHANNEL_OPTIONS
        if credentials is None:
            return grpc.aio.insecure_channel(address, options=options)
        return grpc.aio.secure_channel(address, credentials, options=options)

    def _channel_credentials(self) -> grpc.ChannelCredentials | None:
        """TLS when this cluster uses it; trusts `ca`, else the shared certificate itself."""
        if self.certificate is None:
            return None
        return grpc.ssl_channel_credentials(root_certificates=self.ca or self.certificate)

    def accepts(self, metadata: Any) -> bool:
        """Whether a call's metadata holds the token; the comparison takes constant time."""
        if self.token is None:
            return True
        given = next((value for key, value in metadata or () if key == "authorization"), "")
        return hmac.compare_digest(str(given).encode(), f"Bearer {self.token}".encode())


class TokenInterceptor(Interceptor):
    """Refuses calls without the token, for a threaded server."""

    def __init__(self, protection: Protection) -> None:
        self._protection = protection

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Handler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = continuation(handler_call_details)
        if handler is None or self._protection.accepts(handler_call_details.invocation_metadata):
            return handler

        def deny(request: Any, context: grpc.ServicerContext) -> None:
            abort(context, _DENIAL)

        return with_behaviour(handler, deny)


class AioTokenInterceptor(AioInterceptor):
    """Refuses calls without the token, for an asyncio server."""

    def __init__(self, protection: Protection) -> None:
        self._protection = protection

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler = await continuation(handler_call_details)
        allowed = handler_call_details.method.startswith(_OPEN_METHODS)
        if handler is None or allowed or self._protection.accepts(handler_call_details.invocation_metadata):
            return handler

        async def deny(request: Any, context: Any) -> None:
            await abort_aio(context, _DENIAL)

        return with_behaviour(handler, deny)


def check_port(host: str, port: int) -> None:
    """Raises ServerUnavailableError, in words, where `host:port` cannot be bound."""
    try:
        with _bind_socket(host, port):
            pass
    except OSError as error:
        address = join_address(host, port)
        if error.errno == errno.EADDRINUSE:
            raise ServerUnavailableError(
                f"port {port} of {host} is in use", remedy="stop what uses it, or change the port in the cluster file"
            ) from None
        raise ServerUnavailableError(
            f"{address} cannot be opened: {error.strerror or error}",
            remedy="the cluster file must give an address of this machine and a port that you may open",
        ) from None


def free_port(host: str) -> int:
    """A port of `host` that is free now."""
    with _bind_socket(host, 0) as bound:
        return int(bound.getsockname()[1])


def _bind_socket(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        if port:
            bound.listen(1)  # with SO_REUSEADDR, only listening tells that another listens
    except OSError:
        bound.close()
        raise
    return bound


def _read_pem(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise ClusterConfigError(
            f"{path} cannot be read ({error.strerror})", where="security", remedy="check path and permissions"
        ) from None
