"""What the master's state holds besides sessions: what is under way, clocks, a drain, an adoption, suspects."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from shardwright.errors import ServerDrainingError, ShardwrightError
from shardwright.server.master import commands as do
from shardwright.server.master import events as ev
from shardwright.server.tuning import CLEARING_SUCCESSES, LONGEST_PAUSE_S


@dataclass(slots=True)
class Pending:
    """A broadcast that not every node has answered: `waiting` nodes, and what the others said.

    failed_s: when the first node reported an error; the divergence clock.
    sent_s, limit_s, usual_s, cancelled_s: the watchdog's; by its clock. ended_by: the operator who wants no
    wait. verdict: the error that the watchdog gave the command.
    """

    command: do.ToWorkers
    waiting: set[int]
    sent_s: float
    limit_s: float
    usual_s: float = 0.0
    cancelled_s: float | None = None
    ended_by: str = ""
    verdict: ShardwrightError | None = None
    error: ShardwrightError | None = None
    failed_s: float | None = None
    values: tuple[Any, ...] = ()
    run_s: float = 0.0
    written_bytes: int = 0
    traces: tuple[Any, ...] = ()
    not_finite: tuple[Any, ...] = ()


@dataclass(slots=True)
class AwakeClock:
    """Seconds during which the master ran: a stopped master must not take its peers for dead when it goes on."""

    now_s: float = 0.0
    _seen_s: float | None = None

    def advance(self, now_s: float) -> None:
        if self._seen_s is not None:
            self.now_s += min(now_s - self._seen_s, LONGEST_PAUSE_S)
        self._seen_s = now_s


@dataclass(slots=True)
class Watchdog:
    """ended_s: when the last head got its answer. reported: the head that was named, and whether it was cancelled."""

    clock: AwakeClock
    ended_s: float = 0.0
    reported: tuple[int, bool] = (0, False)


@dataclass(slots=True)
class Drain:
    """nodes: those that leave; None: the whole server. active_s: when something last ran. is_complete: they may go."""

    reason: str
    nodes: frozenset[int] | None
    since_s: float
    until_s: float
    active_s: float
    is_complete: bool = False

    @property
    def subject(self) -> str:
        """What ends, and why: `the server is ending (SIGTERM)`."""
        if self.nodes is None:
            return f"the server is ending ({self.reason})"
        numbers = ", ".join(map(str, sorted(self.nodes)))
        return f"node{'s' * (len(self.nodes) > 1)} {numbers} will leave ({self.reason})"

    def error(self, now_s: float) -> ServerDrainingError:
        left_s = max(self.until_s - now_s, 0.0)
        return ServerDrainingError(
            f"{self.subject}: no new step begins",
            remedy=f"saves and reads of arrays still work, for {left_s:.0f} s at most: save now, and connect again or "
            "restore once it is back",
        )


@dataclass(slots=True)
class Adoption:
    """reports: by node. source: the node asked for its log; top: the last command of any executor."""

    reports: dict[int, tuple[ev.SessionReport, ...]] = field(default_factory=dict)
    source: int | None = None
    top: int = 0
    is_reporting: bool = False


@dataclass(frozen=True, slots=True)
class HeldBack:
    """An end that another one may explain. until_s: when it is taken in without."""

    event: ev.ExecutorExited | ev.ExecutorLeft
    until_s: float


@dataclass(frozen=True, slots=True)
class Suspect:
    """kind: "step", "load" or "dataset". key: of its program, or of the dataset."""

    session_id: str
    kind: str
    key: str


@dataclass(frozen=True, slots=True)
class Charge:
    """A suspect at a death. what: in words; number: of the step."""

    suspect: Suspect
    what: str
    number: int = 0


@dataclass(slots=True)
class Record:
    """deaths: generations that ended with it. last_s: when the last of them did. needed: successes that clear it."""

    what: str
    deaths: set[int]
    last_s: float
    needed: int = CLEARING_SUCCESSES
    successes: int = 0


@dataclass(slots=True)
class Quarantine:
    """generation: of the executors that were lost last; under_way: its commands, by number; is_explained: whether an
    executor has said what it was busy with. stopped: errors. seen: what was stopped, by (owner, kind, key).
    next_trial: the step on trial that waits to be alone: session, number.
    """

    records: dict[Suspect, Record] = field(default_factory=dict)
    stopped: dict[Suspect, ShardwrightError] = field(default_factory=dict)
    seen: dict[tuple[str, str, str], Record] = field(default_factory=dict)
    generation: int = 0
    is_explained: bool = False
    under_way: dict[int, Charge] = field(default_factory=dict)
    next_trial: tuple[str, int] | None = None
