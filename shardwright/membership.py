"""Who takes part in a job whose hosts come and go: a pure state machine, events in, decisions out.

A member is one process on a slot of a host. Hosts come from outside (a discovery script, an edited hosts file); which
of their slots are used follows from four rules:

- at most `max_size` members; who is there stays, and free slots are filled in the order in which hosts were found;
- a host on which a member fails waits before it is used again, twice as long after each further failure;
- after `max_failures` failures in a row a host is left out, by name; after `cooldown_s` it gets one more try;
- a host that has gone from the list, or has fewer slots, has its youngest members retired.

Members are numbered from 0 and a number is never used again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.errors import OptionError


# ---- events ----
@dataclass(frozen=True, slots=True)
class HostsFound:
    """The hosts that may be used now, with their slots, in order of preference: all of them, not the new ones."""

    slots: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class MemberFailed:
    """A member was lost: its process failed or hung."""

    member: int


@dataclass(frozen=True, slots=True)
class HostFailed:
    """A host was lost, or cannot be reached: its members are lost with it, at once, as one failure."""

    host: str


@dataclass(frozen=True, slots=True)
class MemberLeft:
    """A member ended as it should: it has finished, or was retired."""

    member: int


@dataclass(frozen=True, slots=True)
class TimePassed:
    """A wait may be over: `deadline_s` says when to send this."""


Event = HostsFound | MemberFailed | HostFailed | MemberLeft | TimePassed


# ---- decisions ----
@dataclass(frozen=True, slots=True)
class Admit:
    """Start a member on a host."""

    member: int
    host: str


@dataclass(frozen=True, slots=True)
class Retire:
    """A member is to leave: its host or slot is no longer there. `MemberLeft` or `MemberFailed` follows."""

    member: int


@dataclass(frozen=True, slots=True)
class Wait:
    """A host is not used for some seconds after a failure; failures: how many in a row."""

    host: str
    seconds: float
    failures: int


@dataclass(frozen=True, slots=True)
class LeaveOut:
    """A host failed too often. seconds: until it gets one more try; None: never."""

    host: str
    seconds: float | None
    failures: int


@dataclass(frozen=True, slots=True)
class TooFew:
    """There are fewer members than the least. hopeless: no host that was found will ever be used again."""

    size: int
    min_size: int
    hopeless: bool


@dataclass(frozen=True, slots=True)
class Enough:
    """There are as many members as the least again."""

    size: int


Decision = Admit | Retire | Wait | LeaveOut | TooFew | Enough


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a membership keeps to.

    min_size, max_size: of members; max_size None: all slots. max_failures: in a row, until a host is left out.
    first_wait_s, longest_wait_s: after the first failure, and at most. cooldown_s: until a host that was left out gets
    one more try, None for never. steady_s: failures that lie further apart are not in a row.
    """

    min_size: int = 1
    max_size: int | None = None
    max_failures: int = 3
    first_wait_s: float = 1.0
    longest_wait_s: float = 60.0
    cooldown_s: float | None = None
    steady_s: float = 300.0

    def __post_init__(self) -> None:
        if self.min_size < 1:
            raise OptionError(f"{self.min_size} members", where="min_size", remedy="a whole number from 1")
        if self.max_size is not None and self.max_size < self.min_size:
            raise OptionError(
                f"at most {self.max_size} members, and at least {self.min_size}",
                where="max_size",
                remedy="a number that is not below min_size",
            )
        if self.max_failures < 1:
            raise OptionError(f"{self.max_failures} failures", where="max_failures", remedy="a whole number from 1")
        for name in ("first_wait_s", "longest_wait_s", "cooldown_s", "steady_s"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise OptionError(f"{value} seconds", where=name, remedy="a number from 0")

    def wait_s(self, failures: int) -> float:
        """Seconds that a host waits after so many failures in a row: `first_wait_s · 2^(failures − 1)`."""
        doubled: float = self.first_wait_s * 2.0 ** min(failures - 1, 60)
        return min(doubled, self.longest_wait_s)


@dataclass(slots=True)
class _Record:
    """A host's failures. closed_until_s: it is not used before; None: it is open. left_out: it failed too often."""

    failures: int = 0
    failed_at_s: float = 0.0
    closed_until_s: float | None = None
    left_out: bool = False


class Membership:
    """The members of one job."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._slots: dict[str, int] = {}
        self._order: dict[str, None] = {}
        self._records: dict[str, _Record] = {}
        self._hosts: dict[int, str] = {}
        self._retired: set[int] = set()
        self._next = 0
        self._said: TooFew | None = None

    # ---- what is ----
    @property
    def members(self) -> dict[int, str]:
        """The host of each member that takes part, or is about to; those that are to leave are not among them."""
        return {member: host for member, host in self._hosts.items() if member not in self._retired}

    @property
    def left_out(self) -> tuple[str, ...]:
        """Hosts that have failed too often."""
        return tuple(host for host, record in self._records.items() if record.left_out)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Hosts in the order in which they were first found."""
        return tuple(self._order)

    @property
    def deadline_s(self) -> float | None:
        """When the next wait is over; None where nothing waits."""
        waiting = [
            record.closed_until_s
            for host, record in self._records.items()
            if host in self._slots and record.closed_until_s not in (None, float("inf"))
        ]
        return min((until for until in waiting if until is not None), default=None)

    def is_open(self, host: str) -> bool:
        """Whether a host was found and does not wait."""
        record = self._records.get(host)
        return host in self._slots and (record is None or record.closed_until_s is None)

    # ---- what happens ----
    def handle(self, event: Event, now_s: float) -> list[Decision]:
        """What follows from an event. Unknown members and hosts change nothing."""
        self._reopen(now_s)
        decisions: list[Decision] = []
        match event:
            case HostsFound(slots):
                self._slots = {host: count for host, count in slots.items() if count > 0}
                self._order.update(dict.fromkeys(self._slots))
            case MemberFailed(member) if member in self._hosts:
                host = self._hosts.pop(member)
                if member not in self._retired:
                    decisions += self._fail(host, now_s)
                self._retired.discard(member)
            case HostFailed(host):
                for member in [member for member, other in self._hosts.items() if other == host]:
                    del self._hosts[member]
                    self._retired.discard(member)
                decisions += self._fail(host, now_s)
            case MemberLeft(member):
                self._hosts.pop(member, None)
                self._retired.discard(member)
        decisions += self._retire()
        decisions += self._admit()
        return decisions + self._compare_with_least()

    def _reopen(self, now_s: float) -> None:
        for record in self._records.values():
            if record.closed_until_s is not None and now_s >= record.closed_until_s:
                record.closed_until_s = None
                record.left_out = False  # one more failure in a row closes it again

    def _fail(self, host: str, now_s: float) -> list[Decision]:
        record = self._records.setdefault(host, _Record())
        if now_s - record.failed_at_s > self._limits.steady_s:
            record.failures = 0
        record.failures += 1
        record.failed_at_s = now_s
        if record.failures < self._limits.max_failures:
            seconds = self._limits.wait_s(record.failures)
            record.closed_until_s = max(now_s + seconds, record.closed_until_s or 0.0)
            return [Wait(host, seconds, record.failures)]
        again = record.left_out
        record.left_out = True
        cooldown_s = self._limits.cooldown_s
        record.closed_until_s = float("inf") if cooldown_s is None else now_s + cooldown_s
        return [] if again else [LeaveOut(host, cooldown_s, record.failures)]

    def _retire(self) -> list[Decision]:
        """Members of hosts that are gone, and the youngest of hosts that have fewer slots."""
        excess: list[int] = []
        for host in dict.fromkeys(self._hosts.values()):
            on_host = sorted(member for member, other in self.members.items() if other == host)
            excess += on_host[self._slots.get(host, 0) :]
        self._retired.update(excess)
        return [Retire(member) for member in sorted(excess)]

    def _admit(self) -> list[Decision]:
        """Fill free slots. A member that is to leave holds its slot until it has left."""
        admitted: list[Decision] = []
        most = self._limits.max_size
        for host in self._order:
            if not self.is_open(host):
                continue
            taken = list(self._hosts.values()).count(host)
            free = self._slots[host] - taken
            for _ in range(free if most is None else min(free, most - len(self._hosts))):
                self._hosts[self._next] = host
                admitted.append(Admit(self._next, host))
                self._next += 1
        return admitted

    def _compare_with_least(self) -> list[Decision]:
        """Say when members become too few, when that becomes hopeless, and when they are enough again."""
        size, least = len(self.members), self._limits.min_size
        if size >= least:
            if self._said is None:
                return []
            self._said = None
            return [Enough(size)]
        said = TooFew(size, least, hopeless=self._is_hopeless())
        news = self._said is None or said.hopeless != self._said.hopeless
        self._said = said
        return [said] if news else []

    def _is_hopeless(self) -> bool:
        """Whether every host that was found is left out for good."""
        closed = [self._records[host] for host in self._slots if host in self._records]
        return bool(self._slots) and [record.closed_until_s for record in closed] == [float("inf")] * len(self._slots)
