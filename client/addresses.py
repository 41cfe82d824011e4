"""Server addresses in users' spelling."""

from __future__ import annotations

import ipaddress
import os
import re

from shardwright.clusters.cluster import join_address
from shardwright.errors import OptionError

_LOOPBACK = "127.0.0.1"
_HOST = re.compile(r"[A-Za-z0-9_.-]+")
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/?#]*)")


def read_address(written: str | int, *, where: str = "address") -> str:
    """`host:port` (an IPv6 address in brackets) from a user's address; a bare port means this machine.

    Raises OptionError, named `where`, with the correct spelling.
    """
    if isinstance(written, int) and not isinstance(written, bool):
        return join_address(_LOOPBACK, read_port(written, where=where))
    if not isinstance(written, str):
        raise OptionError(
            f"{written!r} is no address",
            where=where,
            remedy='write "host:port", or the port of a server on this machine',
        )
    text = written.strip()
    if text.isascii() and text.isdigit():
        return join_address(_LOOPBACK, read_port(text, where=where))
    url = _URL.match(text)
    if url is not None:
        raise OptionError(f"{text!r} is a URL, not an address", where=where, remedy=f'write "{url[2] or "host:port"}"')
    host, port = _split_address(text, where)
    return join_address(host, read_port(port, where=where))


def read_host(written: str, *, where: str) -> str:
    """A host name or IP address without brackets. Raises OptionError."""
    host = written.strip()
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not _HOST.fullmatch(host) and not _is_ipv6(host):
        raise OptionError(
            f"{written!r} is neither a host name nor an IP address", where=where, remedy="write the address alone"
        )
    return host


def read_port(written: str | int, *, where: str) -> int:
    """A valid port of a server. Raises OptionError."""
    text = str(written).strip()
    port = int(text) if text.isascii() and text.isdigit() and len(text) < 8 else 0
    if not 1 <= port <= 65535:
        raise OptionError(f"{text!r} is no port", where=where, remedy="write a number between 1 and 65535")
    return port


def _split_address(text: str, where: str) -> tuple[str, str]:
    host, separator, port = text.rpartition(":")
    if text.count(":") > 1 and not text.startswith("["):
        if port.isdigit() and _is_ipv6(host):
            raise OptionError(
                f"{text!r} is an IPv6 address without brackets", where=where, remedy=f'write "[{host}]:{port}"'
            )
        raise OptionError(f"{text!r} is no address with a port", where=where, remedy='write "[IPv6 address]:port"')
    if not text or not separator or text.endswith("]"):
        raise OptionError(
            f"{text!r} has no port", where=where, remedy=f'write "{text or "host"}:2222", with the port of the server'
        )
    if not host:
        raise OptionError(f"{text!r} has no host", where=where, remedy=f'write "{_LOOPBACK}{text}" for this machine')
    return read_host(host, where=where), port


def _is_ipv6(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).version == 6
    except ValueError:
        return False


def address_from_environment() -> str | None:
    """`$SERVER_IP:$SERVER_PORT`, of this machine where only the port is set; None without both.

    Raises OptionError where only the host is set.
    """
    host, port = os.environ.get("SERVER_IP") or _LOOPBACK, os.environ.get("SERVER_PORT")
    if not port:
        if not os.environ.get("SERVER_IP"):
            return None
        raise OptionError("no port in the environment", where="SERVER_PORT", remedy="set SERVER_PORT as well")
    return join_address(read_host(host, where="SERVER_IP"), read_port(port, where="SERVER_PORT"))
