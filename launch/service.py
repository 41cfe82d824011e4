"""The coordination service of `jax.distributed`, in the launcher: rank 0 may be lost like any other rank."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

from shardwright.clusters.cluster import join_address
from shardwright.errors import LaunchError
from shardwright.launch.hosts import Host
from shardwright.launch.ssh import SshOptions, find_reachable_address
from shardwright.xla import private

LOOPBACK = "127.0.0.1"


class CoordinationService:
    """The service for the ranks of one generation.

    host: an address of this machine reachable from the ranks' hosts; loopback for ranks of this machine. size: number
    of ranks. port: 0 for a free one. elastic: the loss of a rank ends no other. listen: the address of the socket,
    where that is another; "0.0.0.0" for all. address: `host:port` for the ranks. Raises LaunchError.
    """

    def __init__(self, host: str, size: int, port: int = 0, *, elastic: bool = False, listen: str = "") -> None:
        try:
            with reserve_port(listen or host, port) as port:
                self.address = join_address(host, port)
                socket_address = join_address(listen or host, port)
                self._service: Any = private.start_coordination_service(socket_address, size, recoverable=elastic)
        except (OSError, RuntimeError) as error:
            raise LaunchError(
                f"the coordination service cannot listen ({getattr(error, 'strerror', None) or error})",
                where=host,
                remedy="name an address of this machine that the hosts reach: --coordinator-address",
            ) from None

    def close(self) -> None:
        """End the service; connected ranks lose it."""
        if self._service is not None:
            self._service.shutdown()
            self._service = None

    def __enter__(self) -> CoordinationService:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def coordinator_host(remote_hosts: Sequence[Host], ssh: SshOptions) -> str:
    """The address of the service: loopback, or this machine's address on the way to the first other host.

    Raises LaunchError.
    """
    return find_reachable_address(remote_hosts[0], ssh) if remote_hosts else LOOPBACK


@contextlib.contextmanager
def reserve_port(host: str, port: int = 0) -> Iterator[int]:
    """Reserve a port for gRPC within the block; port 0: a free one.

    Both sockets share the port by SO_REUSEPORT (gRPC sets it, too); this one never listens. Without the reservation
    another process could take the port before its use, and jaxlib would end the process. Raises OSError for an address
    of another machine, and for a taken port.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(address)
        yield int(holder.getsockname()[1])
