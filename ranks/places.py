"""A process's place in its job, from the variables of `shardwright run`, of another launcher, or given."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardwright.errors import OptionError

_LAUNCH = "let the launcher set it: shardwright run -np 2 python train.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A process's place in its job.

    coordinator: `host:port` of the coordination service; where there is no launcher of ours, of the port at which rank
    0 waits for the others. meeting: where the ranks of ours meet before; "" elsewhere. job: the launcher's name for it.
    has_local, has_neighbors: whether local_…, and whether cross_… too are known; what is not is found once the ranks
    have met.
    """

    coordinator: str = ""
    meeting: str = ""
    job: str = ""
    size: int = 1
    rank: int = 0
    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0
    cross_size: int = 1
    generation: int = 0
    has_local: bool = False
    has_neighbors: bool = True

    def among(self, hosts: Sequence[int]) -> Place:
        """The place with its neighbors, from the number of each rank's host. What its launcher has said stays."""
        ranks_of: dict[int, list[int]] = {}
        for rank, host in enumerate(hosts):
            ranks_of.setdefault(host, []).append(rank)
        mine = ranks_of[hosts[self.rank]]
        local_rank = mine.index(self.rank)
        holders = [host for host, ranks in ranks_of.items() if len(ranks) > local_rank]
        if self.has_local and (self.local_rank, self.local_size) != (local_rank, len(mine)):
            # What the launcher takes for hosts is one machine, say: its ranks go host by host, as far as known.
            cross_size = -(-self.size // self.local_size)
            return replace(self, cross_rank=self.rank // self.local_size, cross_size=cross_size, has_neighbors=True)
        return replace(
            self,
            local_rank=local_rank,
            local_size=len(mine),
            cross_rank=holders.index(hosts[self.rank]),
            cross_size=len(holders),
            has_neighbors=True,
        )


def name_host() -> str:
    """Names this machine among those of a job; containers of one machine have names of their own."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}".strip()


#: Ports that the kernel gives to nobody who asks for any: jobs take theirs from here.
JOB_PORTS = range(61440, 65536)


def read_number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    """A whole number from 0 of another launcher. Raises OptionError where it is none, or missing without a default."""
    text = environment.get(name, "").strip()
    if not text and default is not None:
        return default
    if not re.fullmatch(r"\d{1,12}", text):
        raise OptionError(f"{text!r} is no whole number", where=name, remedy="its launcher sets it")
    return int(text)


def read_place(environment: Mapping[str, str]) -> Place:
    """The place that the variables of `shardwright run` describe. Raises OptionError naming the variable."""

    def number(name: str, default: int) -> int:
        text = environment.get(f"SHARDWRIGHT_{name}", str(default))
        if not re.fullmatch(r"\d+", text.strip()):
            raise OptionError(f"{text!r} is no whole number", where=f"SHARDWRIGHT_{name}", remedy=_LAUNCH)
        return int(text)

    size = number("SIZE", 1)
    if size > 1 and "SHARDWRIGHT_RANK" not in environment:
        raise OptionError(f"which of {size} ranks is this?", where="SHARDWRIGHT_RANK", remedy=_LAUNCH)
    rank = number("RANK", 0)
    place = Place(
        coordinator=environment.get("SHARDWRIGHT_COORDINATOR", ""),
        meeting=environment.get("SHARDWRIGHT_MEETING", ""),
        size=size,
        rank=rank,
        local_rank=number("LOCAL_RANK", rank),
        local_size=number("LOCAL_SIZE", size),
        cross_rank=number("CROSS_RANK", 0),
        cross_size=number("CROSS_SIZE", 1),
        generation=number("GENERATION", 0),
        has_neighbors=size == 1 or {"SHARDWRIGHT_LOCAL_RANK", "SHARDWRIGHT_LOCAL_SIZE"} <= environment.keys(),
    )
    for name in ("", "LOCAL_", "CROSS_"):
        at, count = getattr(place, f"{name.lower()}rank"), getattr(place, f"{name.lower()}size")
        if at >= count:
            where = f"SHARDWRIGHT_{name}RANK"
            raise OptionError(f"{at} is not below SHARDWRIGHT_{name}SIZE={count}", where=where, remedy=_LAUNCH)
    if size > 1:
        check_address(place.coordinator, "SHARDWRIGHT_COORDINATOR", _LAUNCH)
    return place


def make_place(rank: int | None, size: int | None, coordinator: str | None) -> Place:
    """The place that the arguments of `init` describe. Raises OptionError naming the argument."""
    if type(size) is not int or size < 1:
        raise OptionError(f"{size!r}", where="size", remedy="give rank, size and coordinator together")
    if size == 1 and rank in (None, 0):
        return Place()
    if type(rank) is not int or not 0 <= rank < size:
        raise OptionError(f"{rank!r} is no rank of {size}", where="rank", remedy="a whole number from 0, below size")
    check_address(coordinator or "", "coordinator", "host:port, of a free port of rank 0's host")
    return Place(coordinator=coordinator or "", size=size, rank=rank, has_neighbors=False)


def check_address(address: str, where: str, remedy: str) -> None:
    """Raises OptionError for what is no `host:port`."""
    match = re.fullmatch(r"[^:\s]+:(\d+)|\[[^\]\s]+\]:(\d+)", address)
    if match is None or not 0 < int(match[1] or match[2]) < 1 << 16:
        raise OptionError(f"{address!r} is no address host:port", where=where, remedy=remedy)
