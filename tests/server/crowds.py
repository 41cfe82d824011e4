"""A stranger opens sessions by the dozen beside what three others keep: seeded schedules of the master's state machine.

`python -m tests.server.crowds 100` runs the schedules of a hundred seeds and says what was lost.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from shardwright.server.limits import Limits
from shardwright.server.master import commands as do
from shardwright.server.master import events as ev
from shardwright.server.master import machine, recovered
from shardwright.server.master.sessions import Session
from shardwright.server.master.state import MasterState
from shardwright.server.master.store import StoredState
from tests.server.simulation import IDENTITY, PROGRAM, WAIT_S, World

OTHERS = ("alice", "bob", "carol")
KINDS = ("arrays", "kept", "snapshot", "loaded", "sent", "uploading")
#: Sessions that the stranger asks for at a time, and moves of a schedule.
CROWD, MOVES = 64, 60
#: Seconds that a client leaves to the end of what it was promised.
MARGIN_S = 2.0
ARRAY_BYTES = 8


@dataclass
class Resident:
    """A session of one of the others. away_s: since when it has no client; None: it has one."""

    session_id: str
    kind: str
    owner: str
    name: str
    stream: int
    next_number: int = 1
    away_s: float | None = None
    arrays: set[int] = field(default_factory=set)
    programs: set[str] = field(default_factory=set)
    snapshot: int = 0
    updates: int = 0


class _CrowdedWorld(World):
    """Without a look at every invariant after every event: there are thousands. Keeps the commands that matter here."""

    def send(self, event: ev.Event) -> list[do.Command]:
        commands = machine.handle(self.state, event, self.now_s)
        self.commands += [each for each in commands if isinstance(each, do.Compile | do.RetainOnDaemons)]
        self.orders += [each for each in commands if isinstance(each, do.ToWorkers)]
        for each in commands:
            if isinstance(each, do.StartExecutor):
                self.generation_of[each.process_id] = each.generation
            if isinstance(each, do.NameSnapshot):
                self.send(ev.SnapshotNamed(session_id=each.session_id, number=each.number))
        return commands


class Schedule:
    """One seed's. Of odd ones, a person may have all sessions, and fills the server. lost: what the others miss."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.limits = Limits(person_sessions=CROWD if seed % 2 else 0)
        self.world = _CrowdedWorld(node_count=2, limits=self.limits)
        self.lost: list[str] = []
        self.residents: list[Resident] = []
        self.crowd: set[str] = set()  # of the stranger
        self._numbers = iter(range(1, 1 << 30))
        self._program_holders: set[str] = set()

    # ---- the whole of it -----------------------------------------------------
    def run(self) -> list[str]:
        self.world.form()
        for owner in OTHERS:
            for kind in self.random.sample(KINDS, self.random.randint(1, 3)):
                self._settle_in(owner, kind)
        moves: tuple[Callable[[], None], ...] = (
            self._crowd_comes, self._crowd_comes, self._crowd_stirs, self._time_passes, self._time_passes,
            self._clients_leave, self._executors_die, self._master_dies,
        )  # fmt: skip
        self.world.take(do.RetainOnDaemons)
        for _ in range(MOVES):
            self.random.choice(moves)()
            self._look()
            self._come_back_in_time()
        self._crowd_comes()
        self._all_come_back()
        self._find_room()
        return self.lost

    def _send(self, event: ev.Event) -> list[do.Command]:
        commands = self.world.send(event)
        self._compile()
        return commands

    def _compile(self) -> None:
        for order in self.world.take(do.Compile):
            self.world.send(ev.CompileFinished(plan_id=order.plan_id, program=PROGRAM))
        self.world.all_done()

    # ---- the others ------------------------------------------------------------
    def _settle_in(self, owner: str, kind: str) -> None:
        named = kind in ("kept", "snapshot") or (kind in ("loaded", "sent") and self.random.random() < 0.5)
        number = next(self._numbers)
        resident = Resident(
            session_id=f"{owner}-{kind}", kind=kind, owner=owner, name=f"{owner}-{kind}" if named else "", stream=number
        )
        self.residents.append(resident)
        self._send(
            ev.SessionRequested(
                call=next(self._numbers), session_id=resident.session_id, owner=owner, person=owner, name=resident.name
            )
        )
        self._connect(resident)
        getattr(self, f"_fill_{kind}")(resident)
        self._compile()

    def _connect(self, resident: Resident) -> None:
        resident.stream, resident.away_s = next(self._numbers), None
        self._send(ev.StepsOpened(stream=resident.stream, session_id=resident.session_id, person=resident.owner))

    def _fill_arrays(self, resident: Resident) -> None:
        self._put(resident, 1)
        self._put(resident, 2)

    def _fill_kept(self, resident: Resident) -> None:
        self._fill_arrays(resident)
        self._fill_loaded(resident)
        self._step(resident, (1, 2), (3, 4), kept=ev.Kept(description=b"w", array_ids=(3,), updates=1))
        resident.arrays, resident.updates = {2, 3, 4}, 1

    def _fill_snapshot(self, resident: Resident) -> None:
        self._fill_kept(resident)
        self._step(resident, (3, 4), (), snapshot=ev.SnapshotStepInfo(is_restore=False))
        resident.snapshot = resident.next_number - 1

    def _fill_loaded(self, resident: Resident) -> None:
        self._fill_sent(resident)
        self._send(ev.LoadRequested(call=next(self._numbers), session_id=resident.session_id, plan_id="plan"))
        resident.programs.add("plan")

    def _fill_sent(self, resident: Resident) -> None:
        """A program, and no more: it is being planned, say."""
        self._program_holders.add(resident.session_id)
        self._send(ev.ProgramsSent(session_id=resident.session_id))

    def _fill_uploading(self, resident: Resident) -> None:
        """Its first array is on its way, for as long as it takes."""

    def _put(self, resident: Resident, array_id: int) -> None:
        array = ev.UploadedArray(array_id=array_id, size_bytes=ARRAY_BYTES, devices=range(1 << 20))
        for node in range(self.world.node_count):
            self._send(
                ev.ArraysUploaded(
                    connection=self.world.executor_connection(node), session_id=resident.session_id, arrays=(array,)
                )
            )
        resident.arrays.add(array_id)

    def _step(self, resident: Resident, arguments: tuple[int, ...], outputs: tuple[int, ...], **more: object) -> None:
        number, resident.next_number = resident.next_number, resident.next_number + 1
        step = {"executable_id": "plan", "stream": resident.stream, "session_id": resident.session_id} | more
        self._send(ev.StepRequested(number=number, arguments=arguments, outputs=outputs, **step))  # type: ignore[arg-type]

    def _clients_leave(self) -> None:
        """Their processes end, or their network does."""
        for resident in self.residents:
            if resident.away_s is None and resident.kind != "uploading" and self.random.random() < 0.7:
                self._send(ev.StepsClosed(stream=resident.stream))
                resident.away_s = self.world.now_s

    def _come_back_in_time(self) -> None:
        for resident in self.residents:
            if resident.away_s is not None and self.world.now_s - resident.away_s > self._promise_s(resident) / 2:
                self._come_back(resident)

    def _promise_s(self, resident: Resident) -> float:
        return self.limits.named_grace_s if resident.name else self.limits.grace_s

    def _come_back(self, resident: Resident) -> None:
        """The same process, or another one that has the name."""
        if resident.session_id in self.world.state.sessions:
            self._connect(resident)

    def _all_come_back(self) -> None:
        for resident in self.residents:
            if resident.name:
                call = next(self._numbers)
                commands = self._send(
                    ev.SessionRequested(
                        call=call, session_id=resident.session_id, owner=resident.owner, person=resident.owner,
                        name=resident.name,
                    )
                )  # fmt: skip
                if not any(isinstance(each, do.Answer) and each.call == call for each in commands):
                    self.lost.append(f"{resident.session_id} cannot be taken up")
                if resident.updates and resident.arrays:
                    resident.arrays = {3}
            self._look()

    # ---- the stranger ------------------------------------------------------------
    def _crowd_comes(self) -> None:
        for _ in range(CROWD):
            number = next(self._numbers)
            session_id = f"stranger-{number}"
            name = session_id if self.random.random() < 0.1 else ""
            asked = ev.SessionRequested(
                call=number, session_id=session_id, owner="stranger", person="stranger", name=name
            )
            self._send(asked)
            self.crowd.add(session_id)
            if self.random.random() < 0.3:
                self._send(ev.StepsOpened(stream=next(self._numbers), session_id=session_id, person="stranger"))
        self.crowd &= self.world.state.sessions.keys()
        if len(self.crowd) > self.limits.most_person_sessions:
            self.lost.append(f"the room of others: the stranger has {len(self.crowd)} sessions")

    def _crowd_stirs(self) -> None:
        """Some of its sessions close, load programs, put arrays."""
        for session_id in sorted(self.crowd & self.world.state.sessions.keys()):
            choice = self.random.random()
            if choice < 0.1:
                self._send(ev.SessionClosed(call=next(self._numbers), session_id=session_id))
            elif choice < 0.2:
                self._put(Resident(session_id, "", "stranger", "", 0), self.random.randint(1, 9))
            elif choice < 0.3:
                self._send(ev.LoadRequested(call=next(self._numbers), session_id=session_id, plan_id="plan"))

    # ---- time, executors, the master ---------------------------------------------
    def _time_passes(self) -> None:
        """Less than anybody was promised: they come back in time."""
        soonest_s = min(
            (
                self._promise_s(each) - (self.world.now_s - each.away_s)
                for each in self.residents
                if each.away_s is not None
            ),
            default=float("inf"),
        )
        seconds = min(self.random.choice((1.0, 4.0, 12.0, 45.0)), soonest_s - MARGIN_S)
        for _ in range(max(int(seconds / 2), 1)):
            for resident in self.residents:
                if resident.kind == "uploading":  # as executors say with their signs of life
                    self._send(ev.SessionTouched(session_id=resident.session_id))
            self.world.passes(2.0)
            self._compile()

    def _executors_die(self) -> None:
        """All arrays are gone; what was snapshotted, sent and loaded is not."""
        for node in range(self.world.node_count):
            self.world.executor_dies(node)
        for resident in self.residents:
            resident.arrays.clear()
        self.world.orders.clear()
        for _ in range(40):
            self.world.passes(0.5)
            if self.world.state.formation.phase == "starting":
                break
        for node in range(self.world.node_count):
            self.world.executor_joins(node)
        self._compile()

    def _master_dies(self) -> None:
        """Another one takes up its executors, or starts others."""
        old, world = self.world.state, self.world
        rows = tuple(map(recovered.row_of, old.sessions.values()))
        contents = dict(old.sessions)
        stored = StoredState(generation=old.formation.generation, team=old.formation.team, sessions=rows)
        members = tuple(record.member for record in old.formation.nodes.values())
        world.state = MasterState.create(members, IDENTITY, self.limits, wait_s=WAIT_S, now_s=world.now_s)
        recovered.restore(world.state, stored, world.now_s)
        for session in world.state.sessions.values():
            if session.session_id in self._program_holders:
                world.send(ev.ProgramsSent(session_id=session.session_id))
            for executable in session.executables.values():
                executable.program, executable.state = PROGRAM, "loading"
        self.residents = [each for each in self.residents if each.kind != "arrays" or each.arrays]  # others are empty
        for resident in self.residents:
            resident.away_s = world.now_s
        self._crowd_comes()  # first of all
        if self.random.random() < 0.5:
            self._adopt(old, contents)
        else:
            self._start_anew()
        self._compile()
        for resident in self.residents:
            if self.random.random() < 0.5:
                self._come_back(resident)

    def _adopt(self, old: MasterState, contents: dict[str, Session]) -> None:
        world = self.world
        reports = tuple(_report_of(session) for session in contents.values())
        for node in range(world.node_count):
            world.daemon_joins(node, executor_generation=old.formation.generation)
            world.send(
                ev.ExecutorJoined(
                    connection=world.executor_connection(node), node=node, generation=old.formation.generation,
                    data_address=f"host:{9000 + node}", device_count=4, received=old.sequence,
                )
            )  # fmt: skip
        (order,) = [each for each in world.orders if isinstance(each, do.ReportOnWorkers)]
        world.orders.remove(order)
        for node in range(world.node_count):
            connection = world.executor_connection(node)
            world.send(ev.ReportReceived(connection=connection, sequence=order.sequence, sessions=reports))

    def _start_anew(self) -> None:
        for resident in self.residents:
            resident.arrays.clear()
        for node in range(self.world.node_count):
            self.world.daemon_joins(node)
        for node in range(self.world.node_count):
            self.world.executor_joins(node)

    # ---- what is there ---------------------------------------------------------
    def _look(self) -> None:
        machine.check_invariants(self.world.state)
        for resident in self.residents:
            self.lost += [f"{resident.session_id}: {what}" for what in self._misses(resident)]
        for retain in self.world.take(do.RetainOnDaemons):
            snapshots = dict(retain.sessions)
            for resident in self.residents:
                if resident.snapshot and snapshots.get(resident.session_id, CROWD) > resident.snapshot:
                    self.lost.append(f"{resident.session_id}: its snapshot may be dropped")
        self.residents = [each for each in self.residents if each.session_id in self.world.state.sessions]

    def _misses(self, resident: Resident) -> Iterator[str]:
        session = self.world.state.sessions.get(resident.session_id)
        if session is None:
            yield "the session is gone"
            return
        if not session.is_unreported and not resident.arrays <= session.arrays.keys():
            yield f"arrays {resident.arrays - session.arrays.keys()} are gone"
        if not resident.programs <= session.executables.keys():
            yield "a program is gone"
        if session.snapshots.complete < resident.snapshot:
            yield "its snapshot is gone"
        if (
            resident.arrays
            and not session.is_unreported
            and (session.kept.updates if session.kept else 0) < resident.updates
        ):
            yield "kept updates are gone"

    def _find_room(self) -> None:
        """Whoever comes now finds a place, whatever the stranger has, unless the stranger may have all."""
        if self.limits.person_sessions:
            return
        call = next(self._numbers)
        refused = [
            each
            for each in self._send(ev.SessionRequested(call=call, session_id="new", owner="dave", person="dave"))
            if isinstance(each, do.Fail)
        ]
        if refused:
            self.lost.append(f"room for dave: {refused[0].error}")


def _report_of(session: Session) -> ev.SessionReport:
    """What an executor says of a session of the master before."""
    arrays = tuple(
        ev.UploadedArray(array_id=array_id, size_bytes=size, devices=range(1 << 20))
        for array_id, size in session.arrays.items()
    )
    steps = tuple(ev.StepRecord(number=number, error=outcome.error) for number, outcome in session.outcomes.items())
    loaded = tuple(plan_id for plan_id, each in session.executables.items() if each.state == "loaded")
    return ev.SessionReport(
        session_id=session.session_id, arrays=arrays, executables=loaded, steps=steps, kept=session.kept
    )


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    lost = {seed: losses for seed in range(count) if (losses := Schedule(seed).run())}
    for seed, losses in lost.items():
        print(f"seed {seed}: {'; '.join(losses[:3])}")
    print(f"{count} schedules, something lost in {len(lost)}")
    sys.exit(1 if lost else 0)


if __name__ == "__main__":
    main()
