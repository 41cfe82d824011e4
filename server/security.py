"""Credentials, TLS and binding of every port that a server opens or dials; `access.py` says who may call."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import grpc
import grpc.aio

from shardwright.clusters.cluster import Cluster, join_address
from shardwright.clusters.listeners import belongs_to_others
from shardwright.clusters.secret_files import read_secret_file
from shardwright.errors import ClusterConfigError, ServerUnavailableError
from shardwright.protocol import wire


@dataclass(frozen=True, slots=True, kw_only=True)
class Protection:
    """What one process needs to open and dial protected ports; all None: ports for everybody.

    token: the nodes' own. tokens_file: path of the tokens that people have. local_token: path of the file that `token`
    came from, if it is the local user's.
    """

    token: str | None = field(default=None, repr=False)
    certificate: bytes | None = field(default=None, repr=False)
    key: bytes | None = field(default=None, repr=False)
    ca: bytes | None = field(default=None, repr=False)
    tokens_file: str | None = None
    local_token: str | None = None

    @classmethod
    def of(cls, cluster: Cluster) -> Protection:
        """Reads the PEM files; ClusterConfigError names one that cannot be read, or a key that others can read."""
        security = cluster.security
        if security is None:
            return cls(token=cluster.token)
        certificate, ca = (_read_pem(path) for path in (security.certificate, security.ca))
        return cls(
            token=cluster.token,
            certificate=certificate,
            key=_read_pem(security.key, "security.key"),
            ca=ca,
            tokens_file=str(security.tokens_file.resolve()) if security.tokens_file else None,
            local_token=str(security.local_token) if security.local_token else None,
        )

    def to_json(self) -> dict[str, str | None]:
        """For a child process, through a pipe."""
        return {name: value.decode() if isinstance(value, bytes) else value for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, data: Mapping[str, str | None]) -> Protection:
        pem = {name: value.encode() for name in ("certificate", "key", "ca") if (value := data[name]) is not None}
        return cls(**{**data, **pem})  # type: ignore[arg-type]

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

    def check_listener(self, address: str) -> None:
        """Raises ServerUnavailableError where another user listens at `host:port`, who may wait for the local token."""
        host, _, port = address.rpartition(":")
        if self.local_token and belongs_to_others(host.strip("[]"), int(port)):
            raise ServerUnavailableError(f"another user of this machine listens at {address}")

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


def _read_pem(path: Path | None, secret: str = "") -> bytes | None:
    """secret: the field of a file that nobody else may read."""
    if path is None:
        return None

    def refuse(problem: str, remedy: str) -> ClusterConfigError:
        return ClusterConfigError(problem, where=secret, remedy=remedy)

    try:
        return read_secret_file(path, refuse) if secret else path.read_bytes()
    except OSError as error:
        raise ClusterConfigError(
            f"{path} cannot be read ({error.strerror})", where="security", remedy="check path and permissions"
        ) from None
