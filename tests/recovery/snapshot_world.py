"""A world for the snapshot protocol: its pure parts as they are, between a disk, networks and processes that may fail.

Real: the master's state and its ledger, the daemons' stores, the client's journal and protection. Played: the disk, the
streams (each in order, none beside another), executors, which copy and store as `runtime/snapshots.py` does, and the
thread that recovers a client. An array is a number, the same on all devices; each node holds a shard of its own.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import cast

from shardwright.client.journal import ReleasedArrays, SentStep
from shardwright.client.protection import Snapshot
from shardwright.client.step_result import StepResult
from shardwright.errors import ShardwrightError, SnapshotLostError, WorkerLostError
from shardwright.proto.v1 import master_pb2
from shardwright.server.master import commands as do
from shardwright.server.master import events as ev
from shardwright.server.master import machine, named, recovered
from shardwright.server.master.ledger import Ledger
from shardwright.server.master.nodes import Member
from shardwright.server.master.shell import _must_be_stored
from shardwright.server.master.state import MasterState
from shardwright.server.master.store import StateStore
from shardwright.server.worker.snapshot_store import PartKey
from tests.recovery.snapshot_parts import COPIES, LAYOUT, LIMITS, NODES, Client, Daemon, Disk, Executor, to_event
from tests.server.simulation import IDENTITY, WAIT_S


class World:
    """All of it. Methods are what may happen next; each does nothing where it cannot."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.disk = Disk()
        self.daemons = [Daemon(node) for node in range(NODES)]
        self.executors: dict[int, Executor] = {}
        self.clients: dict[str, Client] = {}
        self.state: MasterState | None = None
        self.late: deque[Callable[[], object]] = deque()  # offers that daemons carry out though nobody waits any more
        self.contents: dict[tuple[str, int], dict[int, int]] = {}  # of each snapshot: its arrays' values
        self.holders: dict[tuple[str, int, PartKey], set[Daemon]] = {}  # that have stored a part whole
        self.sessions = 0
        self._numbers = 0
        self._calls: dict[int, tuple[str, Client]] = {}
        self.restores = self.completed = self._stores = 0
        self.start_master()

    def number(self) -> int:
        self._numbers += 1
        return self._numbers

    # ---- the master ------------------------------------------------------------------------

    def start_master(self) -> None:
        if self.state is not None:
            return
        members = tuple(Member(index=node, address=f"host:{node}", device_count=1) for node in range(NODES))
        self.state = MasterState.create(members, IDENTITY, LIMITS, wait_s=WAIT_S, now_s=self.now_s)
        stored = self.disk.loaded
        commands = recovered.restore(self.state, stored, self.now_s) if stored.generation or stored.sessions else []
        self.ledger = Ledger(cast(StateStore, self.disk), self.state, self.handle, self._soon(self.state))
        self.carry_out(commands)

    def _soon(self, state: MasterState) -> Callable[[Callable[[], None]], None]:
        return lambda act: act() if self.state is state else None

    def end_master(self, written: int, cut: int) -> None:
        """written: changes on their way to the disk that reach it. cut: orders on their way that do not arrive."""
        if self.state is None:
            return
        self.state = None
        self.disk.lose(written)
        self._calls.clear()
        for daemon in self.daemons:
            daemon.connection = 0
            daemon.inbox.clear()
        for executor in self.executors.values():
            executor.connection = 0
            executor.outbox.clear()
            for _ in range(min(cut, len(executor.inbox))):
                executor.inbox.pop()
                executor.log.pop()
        for client in list(self.clients.values()):
            self._break(client)

    def handle(self, event: ev.Event) -> None:
        if self.state is not None:
            commands = machine.handle(self.state, event, self.now_s)
            self.carry_out(commands)

    def carry_out(self, commands: list[do.Command]) -> None:
        """As `Master` in `shell.py` does."""
        for command in commands:
            act = partial(self._act, command)
            if _must_be_stored(command):
                self.ledger.after(act)
            else:
                act()

    def _act(self, command: do.Command) -> None:
        assert self.state is not None
        match command:
            case do.RunOnWorkers() | do.OpenOnWorkers() | do.CloseOnWorkers() | do.StoreOnWorkers():
                self._order(command)
            case do.ReleaseOnWorkers() | do.ReportOnWorkers():
                self._order(command)
            case do.NameSnapshot():
                self.ledger.write()
            case do.RetainOnDaemons():
                sessions = tuple(self.ledger.with_ended(command.sessions))
                for daemon in self.daemons:
                    if daemon.connection:
                        daemon.inbox.append(replace(command, sessions=sessions))
            case do.StartExecutor() | do.StopExecutor():
                for daemon in self.daemons:
                    if daemon.connection == command.connection:
                        daemon.inbox.append(command)
            case do.AskForRecent():
                self._send_recent(command)
            case do.Redeliver():
                self._redeliver(command)
            case do.Notice() | do.ReplyStep() | do.EndStream():
                for client in self.clients.values():
                    if client.stream == command.stream:
                        client.inbox.append(command)
            case do.Answer() | do.Fail():
                self._answer(command)

    def _order(self, order: do.ToWorkers) -> None:
        assert self.state is not None
        formation = self.state.formation
        known = {daemon.node: daemon for daemon in self.daemons if daemon.connection}
        peers = tuple(known.get(node) if formation.nodes[node].daemon else None for node in formation.team)
        for executor in self.executors.values():
            if executor.connection in formation.connections:
                executor.inbox.append((order, peers))
                executor.log.append((order, peers))

    def _send_recent(self, ask: do.AskForRecent) -> None:
        executor = next(each for each in self.executors.values() if each.connection == ask.connection)
        late = tuple(
            ev.LoggedCommand(sequence=each[0].sequence, payload=each)
            for each in executor.log
            if each[0].sequence > ask.after
        )
        executor.outbox.append(ev.RecentReceived(connection=ask.connection, commands=late))

    def _redeliver(self, command: do.Redeliver) -> None:
        executor = next(each for each in self.executors.values() if each.connection == command.connection)
        late = [each.payload for each in command.commands]
        executor.inbox.extend(late)
        executor.log += late

    def tick(self) -> None:
        if self.state is None:
            return
        self.now_s += 0.5
        for connection in list(self.state.formation.connections):
            self.handle(ev.ExecutorHeard(connection=connection))
        for record in self.state.formation.nodes.values():
            if record.daemon is not None:
                self.handle(ev.DaemonHeard(connection=record.daemon))
        for name in list(self.state.sessions):
            self.handle(ev.SessionTouched(session_id=name))
        self.handle(ev.Tick())
        self.ledger.write()

    # ---- daemons ---------------------------------------------------------------------------

    def join_daemon(self, node: int) -> None:
        daemon = self.daemons[node]
        if self.state is None or daemon.connection or not daemon.is_alive:
            return
        daemon.connection = self.number()
        executor = self.executors.get(node)
        hello = ev.DaemonJoined(
            connection=daemon.connection, node=node, cluster_hash="h", shardwright_version="1", jax_version="2",
            coordinator_address=f"host:{node}", executor_generation=executor.generation if executor else 0,
        )  # fmt: skip
        self.handle(hello)

    def break_daemon(self, node: int) -> None:
        """Its connection to the master."""
        connection, self.daemons[node].connection = self.daemons[node].connection, 0
        self.daemons[node].inbox.clear()
        if connection:
            self.handle(ev.DaemonLeft(connection=connection))

    def hear_daemon(self, node: int) -> None:
        """A daemon reads the master's next message."""
        daemon = self.daemons[node]
        if not daemon.inbox:
            return
        match daemon.inbox.popleft():
            case do.RetainOnDaemons(generation=generation, sequence=sequence, sessions=sessions):
                daemon.store.retain(dict(sessions), order=(generation, sequence))
            case do.StopExecutor(generation=generation):
                if node in self.executors and self.executors[node].generation == generation:
                    self.end_executor(node)
            case do.StartExecutor(generation=generation):
                if node in self.executors:
                    self.end_executor(node)
                self.executors[node] = Executor(node, generation)
                self.join_executor(node)

    def end_daemon(self, node: int) -> None:
        """And its executor with it; another one is started at once."""
        daemon, self.daemons[node] = self.daemons[node], Daemon(node)
        daemon.is_alive = False
        executor = self.executors.pop(node, None)
        if daemon.connection:
            self.handle(ev.DaemonLeft(connection=daemon.connection))
        if executor is not None and executor.connection:
            self.handle(ev.ExecutorLeft(connection=executor.connection))

    # ---- executors -------------------------------------------------------------------------

    def join_executor(self, node: int) -> None:
        executor = self.executors.get(node)
        if self.state is None or executor is None or executor.connection:
            return
        executor.connection = self.number()
        self.handle(
            ev.ExecutorJoined(
                connection=executor.connection, node=node, generation=executor.generation, device_count=1,
                data_address=f"host:{9000 + node}",
                received=max((order.sequence for order, _ in executor.log), default=0),
            )
        )  # fmt: skip
        if executor.connection not in self.state.formation.connections:
            executor.connection = 0  # refused
            self.end_executor(node)

    def end_executor(self, node: int) -> None:
        executor = self.executors.pop(node, None)
        daemon = self.daemons[node]
        if executor is None:
            return
        if executor.connection:
            self.handle(ev.ExecutorLeft(connection=executor.connection))
        if daemon.connection:
            self.handle(
                ev.ExecutorExited(
                    connection=daemon.connection, generation=executor.generation, exit_code=-9, last_lines="",
                    coordinator_address=f"host:{node}",
                )
            )  # fmt: skip

    def work(self, node: int) -> None:
        """An executor carries out its next order."""
        executor = self.executors.get(node)
        if executor is None or not executor.inbox:
            return
        order, peers = executor.inbox.popleft()
        match order:
            case do.StoreOnWorkers():
                executor.storing.append(self._store(executor, order, peers))
                return
            case do.ReportOnWorkers():
                reports = tuple(self._report(executor, name) for name in executor.arrays)
                report = ev.ReportReceived(connection=executor.connection, sequence=order.sequence, sessions=reports)
                executor.outbox.append(report)
                return
            case do.OpenOnWorkers(session_id=name):
                executor.arrays.setdefault(name, {})
            case do.CloseOnWorkers(session_id=name):
                for table in (executor.arrays, executor.steps, executor.copied, executor.stored, executor.kept):
                    cast(dict[str, object], table).pop(name, None)
            case do.ReleaseOnWorkers(session_id=name, array_ids=ids):
                for array_id in ids:
                    executor.arrays.get(name, {}).pop(array_id, None)
            case do.RunOnWorkers(step=step):
                self._run(executor, step)
                error = executor.steps[step.session_id][step.number].error
                self._done(executor, order.sequence, error)
                return
        self._done(executor, order.sequence)

    def _done(self, executor: Executor, sequence: int, error: ShardwrightError | None = None) -> None:
        if executor.connection:
            executor.outbox.append(
                ev.CommandDone(connection=executor.connection, sequence=sequence, error=error, written_bytes=8)
            )

    def _run(self, executor: Executor, step: ev.StepRequested) -> None:
        name, error = step.session_id, None
        arrays = executor.arrays.setdefault(name, {})
        for array_id in step.released:
            arrays.pop(array_id, None)
        if step.snapshot is None:
            arrays |= dict(zip(step.outputs, step.payload, strict=True))
        elif step.snapshot.is_restore:
            try:
                arrays |= self._fetch(executor, name, step.payload, step.outputs)
            except SnapshotLostError as lost:
                error = lost
        else:
            before = executor.stored.get(name, set())
            parts = {
                (array_id, executor.node): None if array_id in before else arrays[array_id]
                for array_id in step.arguments
            }
            executor.copied[name] = step.number, parts
        is_snapshot = step.snapshot is not None and not step.snapshot.is_restore
        record = ev.StepRecord(number=step.number, error=error, is_snapshot=is_snapshot)
        executor.steps.setdefault(name, {})[step.number] = record

    def _fetch(self, executor: Executor, name: str, number: int, ids: tuple[int, ...]) -> dict[int, int]:
        fetched: dict[int, int] = {}
        for array_id in ids:
            key = (array_id, executor.node)
            held = [daemon for daemon in self.daemons if key in daemon.store.list_parts(name, number)]
            if not held:
                self.check(name, number, "it is restored")
                raise SnapshotLostError(f"the snapshot of step {number} is lost")
            fetched[array_id] = int(held[0].store.get(name, key).view("int64")[0])
        return fetched

    def _report(self, executor: Executor, name: str) -> ev.SessionReport:
        arrays = tuple(
            ev.UploadedArray(array_id=array_id, size_bytes=8, devices=range(NODES))
            for array_id in executor.arrays[name]
        )
        return ev.SessionReport(session_id=name, arrays=arrays, steps=tuple(executor.steps.get(name, {}).values()))

    def _store(self, executor: Executor, order: do.StoreOnWorkers, peers: tuple[Daemon | None, ...]) -> Iterator[None]:
        """What the snapshots' thread of an executor does, call by call; see `SnapshotWorker._keep`."""
        name, number, error = order.session_id, order.number, None
        if executor.kept.get(name) == number:
            self._done(executor, order.sequence)
            return
        copied, parts = executor.copied.pop(name, (0, {}))
        executor.stored.pop(name, None)
        try:
            if copied != number:
                raise ShardwrightError("nothing was copied for this snapshot")
            copies = 0
            for daemon in (*peers[executor.node :], *peers[: executor.node]):
                if copies == COPIES:
                    break
                offer = partial(self._offer, executor, order, daemon, parts)
                yield
                if self._is_late and daemon is not None:  # nobody waits for the answer any more
                    self.late.append(offer)
                    continue
                if daemon is None or not daemon.is_alive:
                    continue
                missing = offer()
                yield
                if daemon.is_alive and self._put(executor, name, daemon, missing, parts):
                    copies += 1
                    for key in parts:
                        self.holders.setdefault((name, number, key), set()).add(daemon)
            if not copies and parts:
                raise ShardwrightError("no daemon answers")
            executor.stored[name] = {array_id for array_id, _ in parts}
            executor.kept[name] = number
        except ShardwrightError as caught:
            error = caught
        self._done(executor, order.sequence, error)

    _is_late = False

    def _offer(
        self, executor: Executor, order: do.StoreOnWorkers, daemon: Daemon, parts: dict[PartKey, int | None]
    ) -> list[PartKey]:
        return daemon.store.offer(
            order.session_id, order.number, dict.fromkeys(parts, 8), keep=order.keep,
            order=(executor.generation, order.sequence),
        )  # fmt: skip

    def _put(
        self, executor: Executor, name: str, daemon: Daemon, missing: list[PartKey], parts: dict[PartKey, int | None]
    ) -> bool:
        for key in missing:
            value = parts[key]
            if value is None:  # the daemon lost what it had
                if key[0] not in executor.arrays.get(name, {}):
                    raise ShardwrightError("the array is gone")
                value = executor.arrays[name][key[0]]
            buffer = daemon.store.buffer(name, key)
            buffer.view("int64")[0] = value
            daemon.store.complete(name, key, buffer)
        return True

    def store(self, node: int, *, is_late: bool = False) -> None:
        """The next call to a daemon; is_late: it answers too late."""
        executor = self.executors.get(node)
        if executor is None or not executor.storing:
            return
        self._is_late = is_late
        self._stores += 1
        if next(executor.storing[0], self) is self:
            executor.storing.popleft()

    def carry_out_late_offer(self, node: int = 0) -> None:
        del node
        if self.late:
            with contextlib.suppress(ShardwrightError):  # nobody hears it
                self.late.popleft()()

    def hear_executor(self, node: int) -> None:
        executor = self.executors.get(node)
        if self.state is not None and executor is not None and executor.outbox:
            self.handle(executor.outbox.popleft())

    # ---- clients ---------------------------------------------------------------------------

    def open_client(self, session_id: str) -> None:
        """A process opens a session, or takes up the one of this name."""
        if self.state is None or session_id in self.clients:
            return
        client = self.clients[session_id] = Client(session_id)
        call = self.number()
        self._calls[call] = session_id, client
        self.handle(ev.SessionRequested(call=call, session_id=session_id, name=session_id))

    def _answer(self, command: do.Answer | do.Fail) -> None:
        session_id, client = self._calls.pop(command.call, ("", None))
        if client is None:
            return
        if isinstance(command, do.Fail):
            self._forget(session_id, client)
            return
        self.ledger.after(partial(self._opened, session_id, client))

    def _opened(self, session_id: str, client: Client) -> None:
        session = self.state.sessions.get(session_id) if self.state is not None else None
        if self.clients.get(session_id) is not client:
            return
        if session is None or session_id not in self.disk.rows:  # it could not be written
            self._forget(session_id, client)
            self.handle(ev.SessionClosed(call=0, session_id=session_id))
            return
        client.next_number, client.next_id = named.last_number(session) + 1, named.next_array_id(session)
        client.phase = "running"
        self.join_client(session_id)

    def _forget(self, session_id: str, client: Client) -> None:
        if self.clients.get(session_id) is client:
            del self.clients[session_id]

    def end_client(self, session_id: str) -> None:
        client = self.clients.pop(session_id, None)
        if client is not None and client.stream:
            self.handle(ev.StepsClosed(stream=client.stream))

    def close_session(self, session_id: str) -> None:
        if self.state is not None:
            self.end_client(session_id)
            self.handle(ev.SessionClosed(call=0, session_id=session_id))
            self.ledger.write()

    def _break(self, client: Client) -> None:
        client.stream = 0
        client.inbox.clear()
        client.outbox.clear()
        if client.phase == "opening":
            self._forget(client.session_id, client)

    def break_client(self, session_id: str) -> None:
        client = self.clients.get(session_id)
        if client is not None and client.stream:
            stream = client.stream
            self._break(client)
            self.handle(ev.StepsClosed(stream=stream))

    def join_client(self, session_id: str) -> None:
        """Its stream is opened, anew after it broke."""
        client = self.clients.get(session_id)
        if self.state is None or client is None or client.stream or client.phase == "opening":
            return
        client.stream = self.number()
        unanswered = {array_id for step, _ in client.unanswered for array_id in step.get("outputs", ())}
        client.outbox.append(
            {
                "live": tuple(array_id for array_id in client.journal.live if array_id not in unanswered),
                "opened": to_event(client.protection.message),
            }
        )
        client.outbox.extend(step for step, _ in client.unanswered)

    def hear_client(self, session_id: str) -> None:
        """The master reads a client's next message."""
        client = self.clients.get(session_id)
        if self.state is None or client is None or not client.outbox:
            return
        message, stream = client.outbox.popleft(), client.stream
        if "opened" in message:
            live, protection = message["live"], message["opened"]
            self.handle(ev.StepsOpened(stream=stream, session_id=session_id, live=live, protection=protection))
        elif "protection" in message:
            protection = message["protection"]
            self.handle(ev.ProtectionChanged(stream=stream, session_id=session_id, protection=protection))
        else:
            self.handle(ev.StepRequested(stream=stream, **message))

    def hear_master(self, session_id: str) -> None:
        """A client reads the master's next message."""
        client = self.clients.get(session_id)
        if client is None or not client.inbox:
            return
        match client.inbox.popleft():
            case do.EndStream():
                raise AssertionError("a session that was acknowledged is gone")
            case do.Notice(lost=lost, snapshot=end):
                if lost is not None:
                    self._note_loss(client)
                if end is not None and end.error is not None:
                    client.protection.fail(end.number)
                    client.tell()
                elif end is not None and client.protection.complete(end.number):
                    self.completed += 1
                    client.tell()
            case do.ReplyStep(number=number, error=error):
                if client.unanswered and client.unanswered[0][1].number == number:
                    self._take_reply(client, client.unanswered.popleft()[1], error)

    def _take_reply(self, client: Client, result: StepResult, error: ShardwrightError | None) -> None:
        if isinstance(error, WorkerLostError):
            client.protection.forget(result.number)
            if client.protection.is_on:
                self._note_loss(client)
                return  # it is sent again
        elif error is not None and client.protection.pending is not None:
            client.protection.fail(result.number)
        result.finish(error)
        if error is not None and not client.protection.is_on:
            client.journal.live.clear()

    def _note_loss(self, client: Client) -> None:
        if not client.protection.is_on:
            client.journal.live.clear()
            return
        client.is_lost_again = client.phase != "running"
        if client.phase == "running":
            client.phase = "lost"

    def _generation(self, session_id: str) -> int:
        """What a client learns of the master's status: of the executors that run."""
        state = self.state
        if state is None or state.formation.phase != "ready" or state.adoption is not None:
            return 0
        return state.formation.generation if session_id in state.sessions else 0

    def protect(self, session_id: str) -> None:
        """The client's next call turns protection on, again after a loss that took all."""
        client, generation = self.clients.get(session_id), self._generation(session_id)
        if client is None or client.phase != "running" or client.protection.is_on or not generation:
            return
        client.generation = generation
        client.protection.is_urgent = client.protection.turn_on(client.sent_steps)
        client.tell()

    def step(self, session_id: str, chosen: int, *, frees: bool) -> None:
        """A call of the client: an array from another, or from nothing; and a snapshot, if one is due."""
        client = self.clients.get(session_id)
        if client is None or client.phase != "running" or not client.protection.is_on or len(client.unanswered) > 6:
            return
        live, made = list(client.journal.live), client.next_id
        client.next_id += 1
        arguments = (live[chosen % len(live)],) if live else ()
        freed = tuple(array_id for array_id in live[:1] if (frees or len(live) > 5) and array_id not in arguments)
        value = client.values[made] = self.number()
        result = StepResult(0, "step", is_repeated=True, output_ids=(made,))
        client.send(result, arguments=arguments, outputs=(made,), moved_bytes=(8,), released=freed, payload=(value,))
        client.sent_steps += 1
        request = master_pb2.RunStepsRequest(arguments=arguments, outputs=(made,), released=freed)
        client.journal.add_step(request, result, [(made, LAYOUT)], ())
        if client.protection.is_due(client.sent_steps) and not client.protection.has_to_wait:
            self._take_snapshot(client)

    def _take_snapshot(self, client: Client) -> None:
        protection = client.protection
        if not protection.may_begin(client.sent_steps):
            return
        snapshot = protection.note_all(client.sent_steps, {})
        result = StepResult(0, "a snapshot", is_followed=True)
        client.send(result, arguments=tuple(snapshot.live), outputs=(), snapshot=ev.SnapshotStepInfo(is_restore=False))
        protection.begin(snapshot, result)
        key = client.session_id, result.number
        self.contents[key] = {array_id: client.values[array_id] for array_id in snapshot.live}
        for holder in [holder for holder in self.holders if holder[:2] == key]:
            del self.holders[holder]

    def recover(self, session_id: str) -> None:
        """The thread that recovers the client goes on."""
        client = self.clients.get(session_id)
        if client is None or client.phase == "opening" or not client.stream:
            return
        if client.phase in ("restoring", "replaying") and client.is_lost_again and not client.unanswered:
            client.phase = "lost"
        if client.phase == "lost" and not client.unanswered:
            self._begin_recovery(client)
        elif client.phase == "restoring" and client.restoring is not None and client.restoring.is_done:
            if client.restoring.error is not None:
                self._give_up(client)
            else:
                self._replay(client)
        elif client.phase == "replaying" and not client.unanswered:
            client.protection.end_recovery()
            client.phase = "running"

    def _begin_recovery(self, client: Client) -> None:
        generation = self._generation(client.session_id)
        if not generation:
            return
        client.is_lost_again, client.generation = False, generation
        base = client.protection.begin_recovery()
        if base is None:
            self._give_up(client)
            return
        client.phase = "restoring"
        client.restoring = self._send_restore(client, base)

    def _send_restore(self, client: Client, base: Snapshot) -> StepResult:
        result, ids = StepResult(0, "a restore", is_followed=True), tuple(base.live)
        info = ev.SnapshotStepInfo(is_restore=True, output_bytes=(8,) * len(ids))
        client.send(result, arguments=(), outputs=ids, snapshot=info, payload=base.number)
        self.restores += 1
        return result

    def _replay(self, client: Client) -> None:
        client.phase = "replaying"
        for entry in client.journal.entries:
            if isinstance(entry, SentStep):
                request, array_id = entry.request, entry.request.outputs[0]
                client.send(
                    entry.result, arguments=tuple(request.arguments), outputs=(array_id,), moved_bytes=(8,),
                    released=tuple(request.released), payload=(client.values[array_id],),
                )  # fmt: skip
            else:
                assert isinstance(entry, ReleasedArrays)

    def _give_up(self, client: Client) -> None:
        for result in client.protection.give_up():
            result.finish(WorkerLostError("lost"))
        client.generation, client.phase = 0, "running"
        client.tell()

    # ---- what has to hold ------------------------------------------------------------------

    def check(self, session_id: str, number: int, why: str) -> None:
        """Each part of a snapshot is with all daemons that have stored it and live."""
        for array_id, value in self.contents[session_id, number].items():
            for node in range(NODES):
                key = (array_id, node)
                holders = self.holders.get((session_id, number, key), set())
                assert holders, f"snapshot {number} of {session_id} was never whole, and {why}"
                alive = [daemon for daemon in holders if daemon.is_alive]
                held = [daemon for daemon in alive if key in daemon.store.list_parts(session_id, number)]
                assert held == alive, f"part {key} of snapshot {number} of {session_id} was dropped, and {why}"
                for daemon in held:
                    got = int(daemon.store.get(session_id, key).view("int64")[0])
                    assert got == value, f"part {key} of snapshot {number} of {session_id} is of another array"

    def check_all(self) -> None:
        for session_id, number in set(self.disk.nameable()):
            if number:
                self.check(session_id, number, "the store may name it")
        for session_id, client in self.clients.items():
            base = client.protection.base
            if base is not None and base.number:
                self.check(session_id, base.number, "its client would restore it")
            client.check_journal()

    # ---- a quiet end -----------------------------------------------------------------------

    def go_on(self) -> None:
        """Each does what it is about to do, but for the disk."""
        self.clients_go_on()
        self.daemons_go_on()
        self.executors_go_on()
        self.clients_go_on()

    def clients_go_on(self) -> None:
        for name in list(self.clients):
            self.join_client(name)
            for act in (self.hear_client, self.hear_master, self.hear_master):
                for _ in range(3):
                    act(name)
            self.recover(name)

    def daemons_go_on(self) -> None:
        for node in range(NODES):
            self.join_daemon(node)
            self.hear_daemon(node)
            self.hear_daemon(node)

    def executors_go_on(self) -> None:
        for node in range(NODES):
            self.join_executor(node)
            for act in (self.work, self.store, self.hear_executor):
                for _ in range(4):
                    act(node)

    def write_all(self) -> None:
        while self.disk.waiting:
            self.disk.end_one()

    def settle(self) -> None:
        """All that is under way comes to its end: processes are back, messages arrive, the disk writes."""
        self.start_master()
        for _ in range(400):
            before = self._progress()
            self.go_on()
            self.write_all()
            if self._progress() == before:
                formation = cast(MasterState, self.state).formation
                if formation.phase == "ready" and not any(c.phase not in ("running",) for c in self.clients.values()):
                    return
                self.tick()
        raise AssertionError(f"it does not come to rest: {self._describe()}")

    def _progress(self) -> tuple[object, ...]:
        state = cast(MasterState, self.state)
        queues = [(len(d.inbox), d.connection) for d in self.daemons]
        work = [(e.node, len(e.inbox), len(e.outbox), len(e.storing), e.connection) for e in self.executors.values()]
        people = [(c.phase, len(c.inbox), len(c.outbox), len(c.unanswered), c.stream) for c in self.clients.values()]
        return (
            self._stores,
            queues,
            work,
            people,
            state.formation.phase,
            len(state.pending),
            state.sequence,
            len(self.disk.waiting),
        )

    def _describe(self) -> str:
        return str(self._progress())
