"""Hosts, their slots, and the placement of ranks: a pure function of the hosts."""

from __future__ import annotations

import functools
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardwright.clusters.cluster import is_loopback
from shardwright.errors import OptionError
from shardwright.input_files import read_input_text

_HOST = re.compile(r"(?:(?P<user>[^@\s:]+)@)?(?P<name>\[[0-9A-Fa-f:.%\w]+\]|[A-Za-z0-9_][A-Za-z0-9_.-]*)")
_HOSTS_HELP = "write host1:4,host2:4"
_LINES_HELP = "write `host slots=4`, one a line"


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A machine of a job. name: for ssh. slots: maximum number of ranks. user: for ssh."""

    name: str
    slots: int = 1
    user: str = ""

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise OptionError(f"host {self.name!r} has {self.slots} slots", remedy="give each host at least one")

    def __str__(self) -> str:
        return f"{self.name}:{self.slots}"

    @property
    def destination(self) -> str:
        """ssh's destination: `user@name`."""
        return f"{self.user}@{self.name}" if self.user else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One rank's place.

    local_rank, local_size: among the ranks of its host. cross_rank, cross_size: among the hosts with this local rank
    (Horovod's definition).
    """

    rank: int
    host: Host
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


def parse_hosts(text: str, where: str) -> tuple[Host, ...]:
    """Hosts of `host1:4,user@host2:4,[fe80::1]:2`; a host without slots has one.

    where: the option's name, for errors. Raises OptionError.
    """
    items = [item.strip() for item in text.split(",")]
    return _check_distinct([_parse_host(item, where) for item in items], where)


def read_hosts_file(path: Path, where: str, slots: int = 1) -> tuple[Host, ...]:
    """Hosts of a file: `host1 slots=4`, `host1:4` or `host1` a line; `#` begins a comment. Raises OptionError.

    slots: of a host without a number.
    """
    try:
        lines = read_input_text(path).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise OptionError(f"{path} cannot be read ({reason})", where=where, remedy="check the path") from None
    hosts = parse_host_lines(lines, str(path), slots)
    if not hosts:
        raise OptionError(f"{path} names no host", where=where, remedy=_LINES_HELP)
    return hosts


def parse_host_lines(lines: Sequence[str], where: str, slots: int = 1) -> tuple[Host, ...]:
    """Hosts of lines `host1 slots=4`, `host1:4` or `host1`; `#` begins a comment. where: the file.

    slots: of a host without a number.

    Raises OptionError.
    """
    hosts = []
    for number, line in enumerate(lines, start=1):
        words = line.split("#")[0].split()
        place = f"{where}:{number}"
        if len(words) == 2 and words[1].startswith("slots="):
            host = _parse_host(words[0], place)
            hosts.append(replace(host, slots=_parse_slots(words[1].removeprefix("slots="), words[0], place)))
        elif len(words) == 1:
            hosts.append(_parse_host(words[0], place, slots))
        elif words:
            raise OptionError(f"{line.strip()!r} is no host", where=place, remedy=_LINES_HELP)
    return _check_distinct(hosts, where)


def _parse_host(item: str, where: str, default_slots: int = 1) -> Host:
    match = _HOST.match(item)
    rest = item[match.end() :] if match else ""
    if match is None or (rest and not rest.startswith(":")):
        raise OptionError(f"{item!r} is no host", where=where, remedy=_HOSTS_HELP)
    slots = _parse_slots(rest[1:], item, where) if rest else default_slots
    return Host(name=match["name"].strip("[]"), slots=slots, user=match["user"] or "")


def _parse_slots(text: str, item: str, where: str) -> int:
    if not re.fullmatch(r"0*[1-9]\d{0,5}", text):
        raise OptionError(
            f"{item!r}: {text!r} is no number of slots", where=where, remedy=f"{_HOSTS_HELP}, with whole numbers from 1"
        )
    return int(text)


def _check_distinct(hosts: Sequence[Host], where: str) -> tuple[Host, ...]:
    names = [host.name for host in hosts]
    for name in names:
        if names.count(name) > 1:
            raise OptionError(f"host {name!r} is named twice", where=where, remedy="name it once, with all its slots")
    return tuple(hosts)


def place_ranks(hosts: Sequence[Host], size: int, where: str = "-np") -> tuple[Placement, ...]:
    """Place the ranks 0 to `size` - 1, host by host in the given order. Raises OptionError for too few slots."""
    slots = sum(host.slots for host in hosts)
    if size > slots:
        raise OptionError(
            f"{size} processes do not fit the {slots} slots of {', '.join(map(str, hosts))}",
            where=where,
            remedy=f"ask for {slots} at most, or give the hosts more slots (host:slots)",
        )
    counts: list[int] = []
    for host in hosts:
        counts.append(min(host.slots, size - sum(counts)))
    placements: list[Placement] = []
    for index, (host, count) in enumerate(zip(hosts, counts, strict=True)):
        for local_rank in range(count):
            holders = [other for other, number in enumerate(counts) if number > local_rank]
            placements.append(
                Placement(
                    rank=len(placements),
                    host=host,
                    local_rank=local_rank,
                    local_size=count,
                    cross_rank=holders.index(index),
                    cross_size=len(holders),
                )
            )
    return tuple(placements)


def first_address(hosts: Sequence[Host]) -> str:
    """Rank 0's host, the first, as the others reach it: loopback, where all are this machine."""
    if all(is_this_machine(host.name) for host in hosts):
        return "127.0.0.1"
    return socket.gethostname() if is_loopback(hosts[0].name) else hosts[0].name


@functools.cache
def is_this_machine(name: str) -> bool:
    """Whether a host's name or address is this machine's, by binding a socket to it."""
    if is_loopback(name) or name == socket.gethostname():
        return True
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True
