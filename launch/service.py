"""The coordination service of `jax.distributed`, in the launcher: losing rank 0 is like losing any other rank."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from shardwright.clusters.cluster import join_address
from shardwright.errors import LaunchError
from shardwright.launch.hosts import Host
from shardwright.launch.ssh import SshOptions, address_reached_from
from shardwright.xla import private

#: Ports that are tried: between its choice and its use a port may be taken.
_ATTEMPTS = 8

LOOPBACK = "127.0.0.1"


class CoordinationService:
    """The service for the ranks of one generation.

    address: `host:port` that the ranks connect to. Ranks of one machine need loopback; ranks of several an address of
    this machine that their hosts reach. size: how many ranks there are.
    """

    def __init__(self, host: str, size: int) -> None:
        problems = []
        for _ in range(_ATTEMPTS):
            try:
                address = join_address(host, free_port(host))
                self._service: Any = private.start_coordination_service(address, size)
            except OSError as error:
                problems.append(error.strerror or str(error))
            except RuntimeError as error:
                problems.append(str(error))
            else:
                self.address = address
                return
        raise LaunchError(
            f"the coordination service cannot listen ({problems[-1]})",
            where=host,
            remedy="name an address of this machine that the hosts reach: --coordinator-address",
        )

    def close(self) -> None:
        """Ends the service; ranks that are still connected lose it."""
        if self._service is not None:
            self._service.shutdown()
            self._service = None

    def __enter__(self) -> CoordinationService:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def coordinator_host(remote_hosts: Sequence[Host], ssh: SshOptions, named: str | None = None) -> str:
    """The address that the service listens on: loopback, or the one that the first other host reaches.

    named: the user's choice, which comes first. Raises LaunchError.
    """
    if named is not None:
        return named
    return address_reached_from(remote_hosts[0], ssh) if remote_hosts else LOOPBACK


def free_port(host: str) -> int:
    """A port of an address that nobody listens on just now. Raises OSError for an address of another machine."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.bind(address)
        return int(probe.getsockname()[1])
