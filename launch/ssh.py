"""ssh to other hosts. Nothing of a job is on ssh's command line: everything goes over standard input."""

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
from shardwright.launch.tuning import ALIVE_INTERVAL_S, RESOLVE_TIMEOUT_S

#: Any port: no packet is sent.
_PROBE_PORT = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class SshOptions:
    """Options of ssh. options: `Name=value` pairs of ssh_config, besides the user's own ssh_config."""

    port: int | None = None
    identity: Path | None = None
    options: tuple[str, ...] = ()

    def arguments(self, connect_timeout_s: float) -> list[str]:
        """ssh's arguments before the host: ssh never prompts, and connects only to hosts with known keys."""
        words = [f"-o{option}" for option in self.options]
        words += [
            "-oBatchMode=yes",
            "-oStrictHostKeyChecking=yes",
            f"-oConnectTimeout={max(1, int(connect_timeout_s))}",
        ]
        words += [f"-oServerAliveInterval={ALIVE_INTERVAL_S}", "-oServerAliveCountMax=3"]
        words += ["-oControlMaster=no", "-oRemoteCommand=none", "-T", "-x"]  # a shared connection is used, not made
        words += ["-p", str(self.port)] if self.port is not None else []
        words += ["-i", str(self.identity)] if self.identity is not None else []
        return words


def ssh_command(host: Host, words: Sequence[str], ssh: SshOptions, connect_timeout_s: float) -> list[str]:
    """The ssh command to run `words` on a host, in place of the login shell."""
    return ["ssh", *ssh.arguments(connect_timeout_s), "--", host.destination, f"exec {shlex.join(words)}"]


def find_reachable_address(host: Host, ssh: SshOptions) -> str:
    """This machine's address for a host: the source address of packets to it.

    ssh resolves the host's name by ssh_config. Raises LaunchError for an unknown host.
    """
    name = _resolve_host_name(host, ssh)
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


def _resolve_host_name(host: Host, ssh: SshOptions) -> str:
    """The `HostName` of a host in ssh's configuration; by default its own name."""
    try:
        process = subprocess.run(
            ["ssh", "-G", *ssh.arguments(1.0), "--", host.destination],
            capture_output=True, text=True, timeout=RESOLVE_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return host.name
    names = [line.split()[1] for line in process.stdout.splitlines() if line.startswith("hostname ")]
    return names[0] if names else host.name
