"""Who listens on this machine: before a secret is sent to a port, it can be asked whose it is."""

from __future__ import annotations

import ipaddress
import os
import sys
from collections.abc import Iterator
from pathlib import Path

_LISTENING = "0A"  # of the state column in /proc/net/tcp


def belongs_to_others(host: str, port: int) -> bool:
    """Whether another user of this machine listens at a loopback address: he may wait there for a token of ours.

    As Linux says; elsewhere, and where nobody listens, False.
    """
    owners = [(address, owner) for address, at, owner in _listening_sockets() if at == port]
    names = ("127.0.0.1", "::1") if host.lower() == "localhost" else (host,)
    wanted = {ipaddress.ip_address(name) for name in names}
    there = [owner for address, owner in owners if address in wanted] or [
        owner for address, owner in owners if address.is_unspecified
    ]
    return any(owner != os.geteuid() for owner in there)


def _listening_sockets() -> Iterator[tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int, int]]:
    """(address, port, user) of each listening TCP socket of this machine."""
    for table in ("tcp", "tcp6"):
        try:
            lines = Path("/proc/net", table).read_text(encoding="ascii").splitlines()[1:]
        except (OSError, UnicodeDecodeError):
            continue
        for line in lines:
            _, local, _, state, _, _, _, owner, *_ = line.split()
            if state == _LISTENING:
                address, _, port = local.partition(":")
                yield _address_of(bytes.fromhex(address)), int(port, 16), int(owner)


def _address_of(words: bytes) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An address as the kernel prints it: in words of four bytes, each in this machine's order."""
    if sys.byteorder == "little":
        words = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
    address = ipaddress.ip_address(words)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
