"""How other hosts are reached. Nothing of a job is on ssh's command line: everything travels over standard input."""

from __future__ import annotations

import ipaddress
import shlex
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwright.errors import LaunchError
from shardwright.launch.hosts import Host

#: Seconds until a dead connection is given up: three unanswered questions.
_ALIVE_INTERVAL_S = 15
_RESOLVE_TIMEOUT_S = 10.0
#: Any port: no packet is sent.
_PROBE_PORT = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class SshOptions:
    """How other hosts are reached. options: `Name=value` as in ssh_config; the user's own ssh_config holds besides."""

    port: int | None = None
    identity: Path | None = None
    options: tuple[str, ...] = ()

    def arguments(self, connect_timeout_s: float) -> list[str]:
        """ssh's arguments ahead of the host: ssh never asks, and connects to known hosts alone."""
        words = [f"-o{option}" for option in self.options]
        words += [
            "-oBatchMode=yes",
            "-oStrictHostKeyChecking=yes",
            f"-oConnectTimeout={max(1, int(connect_timeout_s))}",
        ]
        words += [f"-oServerAliveInterval={_ALIVE_INTERVAL_S}", "-oServerAliveCountMax=3"]
        words += ["-oControlMaster=no", "-oRemoteCommand=none", "-T", "-x"]  # a shared connection is used, not made
        words += ["-p", str(self.port)] if self.port is not None else []
        words += ["-i", str(self.identity)] if self.identity is not None else []
        return words


def ssh_command(host: Host, words: Sequence[str], ssh: SshOptions, connect_timeout_s: float) -> list[str]:
    """The command that runs `words` on a host, in place of the login shell."""
    return ["ssh", *ssh.arguments(connect_timeout_s), "--", host.destination, f"exec {shlex.join(words)}"]


def address_reached_from(host: Host, ssh: SshOptions) -> str:
    """The address of this machine that a host's answers come to: the one that packets to the host carry.

    ssh says which machine a name in ssh_config is. Raises LaunchError where there is no way to tell.
    """
    name = _host_name(host, ssh)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(name, _PROBE_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            own: str = probe.getsockname()[0]
    except OSError as error:
        raise LaunchError(
            f"the address that {host.name} reaches this machine at is unknown ({error.strerror or error})",
            where=host.name,
            remedy="name it: --coordinator-address ADDRESS",
        ) from None
    return str(ipaddress.ip_address(own.split("%")[0]))


def _host_name(host: Host, ssh: SshOptions) -> str:
    """The `HostName` that ssh's configuration gives a host; its own name where ssh has none."""
    try:
        asked = subprocess.run(
            ["ssh", "-G", *ssh.arguments(1.0), "--", host.destination],
            capture_output=True, text=True, timeout=_RESOLVE_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return host.name
    names = [line.split()[1] for line in asked.stdout.splitlines() if line.startswith("hostname ")]
    return names[0] if names else host.name
