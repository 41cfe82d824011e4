"""The state of the master as data: `machine.py` says what becomes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from shardwright.errors import ShardwrightError
from shardwright.server.limits import Limits
from shardwright.server.master import commands as do
from shardwright.server.master.commands import Commands
from shardwright.server.master.formation import Formation
from shardwright.server.master.nodes import Identity, Member
from shardwright.server.master.people import People
from shardwright.server.master.records import Adoption, AwakeClock, Drain, HeldBack, Pending, Quarantine, Watchdog
from shardwright.server.master.roster import Roster
from shardwright.server.master.sessions import Session
from shardwright.server.master.statistics import Statistics


@dataclass(slots=True)
class MasterState:
    """`check_invariants` of `machine.py` holds between any two events."""

    formation: Formation
    limits: Limits
    people: People
    sessions: dict[str, Session] = field(default_factory=dict)
    pending: dict[int, Pending] = field(default_factory=dict)
    sequence: int = 0
    watchdog: Watchdog = field(default_factory=lambda: Watchdog(AwakeClock()))
    drain: Drain | None = None
    adoption: Adoption | None = None  # while executors of a master before may come back
    has_adopted: bool = False
    known: int = 0  # all executors have carried out the command of this number
    recovered_sessions: int = 0  # of a master before this one
    lost: dict[str, str] = field(default_factory=dict)  # why sessions of it are not there, by id
    lost_names: dict[str, str] = field(default_factory=dict)  # their ids, by name, until its user was told
    statistics: Statistics = field(default_factory=Statistics)
    quarantine: Quarantine = field(default_factory=Quarantine)
    held_back: list[HeldBack] = field(default_factory=list)  # ends of executors that others may explain
    team: tuple[int, ...] = ()  # nodes that programs are planned for
    wanted_since_s: float | None = None  # since when others could take part, and what is in the way
    held_up_by: str = ""
    now_s: float = 0.0  # when the last event came

    @classmethod
    def create(
        cls,
        members: tuple[Member, ...],
        identity: Identity,
        limits: Limits,
        *,
        wait_s: float,
        now_s: float = 0.0,
        roster: Roster | None = None,
    ) -> MasterState:
        formation = Formation(members, identity, limits, wait_s=wait_s, now_s=now_s, roster=roster)
        return cls(formation=formation, limits=limits, people=People(limits), team=formation.team)

    def broadcast(self, make: Callable[[int], do.ToWorkers]) -> Commands:
        """Have all nodes carry out a command; `make` gets its sequence number."""
        self.sequence += 1
        command = make(self.sequence)
        self.pending[self.sequence] = Pending(
            command=command,
            waiting=set(self.formation.team),
            sent_s=self.watchdog.clock.now_s,
            limit_s=self.limits.load_s if isinstance(command, do.LoadOnWorkers) else self.limits.step_s,
        )
        return [command]

    def is_pending(self, kind: type[do.ToWorkers], session_id: str) -> bool:
        """Whether a command of this kind for a session is under way."""
        return any(
            isinstance(item.command, kind) and item.command.session_id == session_id  # type: ignore[union-attr]
            for item in self.pending.values()
        )

    def release_on_workers(
        self, session: Session, array_ids: tuple[int, ...], error: ShardwrightError | None
    ) -> Commands:
        """Free arrays of a session; with an error, whoever waits for them is told why they are gone."""
        return self.broadcast(
            lambda sequence: do.ReleaseOnWorkers(
                sequence=sequence, session_id=session.session_id, array_ids=array_ids, error=error
            )
        )
