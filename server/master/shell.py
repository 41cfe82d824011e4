"""The master's shell: brings events to the state machine and carries out its commands.

Everything here runs on one asyncio loop. gRPC handlers (`service.py`) hold
`Call`s and `OutgoingStream`s (`outlets.py`); commands reach them by number.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from shardwright.clusters.cluster import Cluster
from shardwright.errors import PlanError, ResourceLimitError, ServerUnavailableError, SessionError, ShardwrightError
from shardwright.log_lines import about, fields
from shardwright.proto.v1 import master_pb2, worker_pb2
from shardwright.protocol import wire
from shardwright.server.free_memory import FreeMemory
from shardwright.server.limits import Limits
from shardwright.server.log_store import LogStore, RecentLines
from shardwright.server.logs import LogWriter
from shardwright.server.master import commands as do
from shardwright.server.master import events as ev
from shardwright.server.master import machine, recovered, watchdog
from shardwright.server.master.content_store import ContentStore, PlanRecord
from shardwright.server.master.executables import compile_program
from shardwright.server.master.figures import Figures
from shardwright.server.master.ledger import Contents, Ledger
from shardwright.server.master.nodes import Identity, Member
from shardwright.server.master.outlets import Call, OutgoingStream
from shardwright.server.master.planning import FairQueue, PlannerPool, core_count
from shardwright.server.master.programs import StoredProgram
from shardwright.server.master.roster import Roster, elasticity_of
from shardwright.server.master.state import MasterState
from shardwright.server.master.store import StateStore, StoredState
from shardwright.server.master.teams import cluster_changed_error
from shardwright.server.master.worker_messages import orders_of
from shardwright.server.tuning import TICK_S
from shardwright.server.versions import jax_version, shardwright_version
from shardwright.xla import Cancellation, CompileService

T = TypeVar("T")

_log = logging.getLogger("shardwright.server")


class Master:
    """State machine, library and children of one master.

    halted: gets what ends the server. drained: is done when a drain is complete.
    """

    def __init__(
        self,
        cluster: Cluster,
        limits: Limits,
        *,
        wait_s: float,
        log: LogWriter | None = None,
        store: StateStore | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.cluster = cluster
        self.description_every_s = 0.0  # seconds between two looks at a description of the cluster; 0: none
        self.log = log
        self.logs = LogStore((node.index for node in cluster.nodes), RecentLines() if log is None else log.recent)
        self.figures = Figures()
        self.started_s = loop.time()
        self.limits = limits
        self.programs: ContentStore[StoredProgram] = ContentStore(
            "program",
            limits.programs_per_session,
            session_bytes=limits.session_program_bytes,
            person_bytes=limits.person_program_bytes,
            total_bytes=limits.all_program_bytes,
            person_of=self._person_of,
        )
        self.plans: ContentStore[PlanRecord] = ContentStore(
            "plan",
            limits.programs_per_session,
            session_bytes=limits.session_program_bytes,
            person_bytes=limits.person_program_bytes,
            total_bytes=limits.all_program_bytes,
            person_of=self._person_of,
        )
        self.freed = FreeMemory()
        self.halted: asyncio.Future[do.Halt] = loop.create_future()
        self.drained: asyncio.Future[None] = loop.create_future()
        self.on_ready: Callable[[bool], None] = lambda is_ready: None
        members = _members_of(cluster)
        identity = Identity(
            cluster_hash=cluster.content_hash, shardwright_version=shardwright_version(), jax_version=jax_version()
        )
        roster = None
        if cluster.is_elastic:
            roster = Roster((member.index for member in members), elasticity_of(cluster, limits), loop.time())
        self.state = MasterState.create(members, identity, limits, wait_s=wait_s, now_s=loop.time(), roster=roster)
        self._team = self.state.team
        self.planners = PlannerPool(cluster, self.state.statistics.plans)
        self._compiler = CompileService(cluster.device_count, cluster.platform, gpu_ids=cluster.master.gpu_ids)
        self._compiled: dict[str, ev.ProgramInfo] = {}
        self.compile_queue = FairQueue(core_count())
        self._compilations: dict[str, Cancellation] = {}  # under way, by plan
        self._tasks: set[asyncio.Task[None]] = set()
        self._outlets: dict[int, OutgoingStream] = {}
        self._plannings: dict[OutgoingStream, str] = {}  # → session
        self._ends: dict[asyncio.Future[None], str] = {}  # → session; is done at its end
        self._calls: dict[int, Call] = {}
        self._last_number = 0
        self._was_ready = False
        self.is_closing = False
        self._loop = loop
        self.ledger: Ledger | None = None
        if store is not None:
            self._carry_out(recovered.restore(self.state, store.loaded, loop.time()))
            if self.state.team != self._team:
                self._team = self.state.team
                self.planners.change_cluster(cluster.team(self._team))
            self.ledger = Ledger(store, self.state, self.handle_event, loop.call_soon_threadsafe)

    def take_over(self, stored: StoredState, contents: Contents) -> None:
        """Give the sessions of a master before their programs again, and compile what they had loaded."""
        for session_id, kind, item_id in stored.holds:
            program, plan = contents.programs.get(item_id), contents.plans.get(item_id)
            try:
                if kind == "program" and program is not None:
                    self.programs.put(session_id, item_id, program, len(program.gzip))
                    self.handle_event(ev.ProgramsSent(session_id=session_id))
                elif kind == "plan" and plan is not None:
                    self.plans.put(session_id, item_id, plan, len(plan.json_gzip))
            except ResourceLimitError as error:  # the limits are others than before
                _log.warning("session %s goes without a %s of before: %s", session_id[:8], kind, error.message)
                contents.plans.pop(item_id, None)
        for session in self.state.sessions.values():
            for plan_id in list(session.executables):
                compiled = contents.compiled.get(plan_id)
                if compiled is not None:
                    self._compiled[plan_id] = session.executables[plan_id].program = compiled
                    session.executables[plan_id].state = "loading"
                elif plan_id in contents.plans:
                    self._compile(do.Compile(plan_id=plan_id, session_id=session.session_id))
                else:
                    del session.executables[plan_id]
        assert self.ledger is not None
        self.ledger.drop_plans([row.plan_id for row in stored.plans if row.plan_id not in contents.plans])
        if stored.sessions:
            _log.info("recovered %d sessions of a master before", len(stored.sessions))

    async def settle(self) -> None:
        """Return once what was decided so far survives this process. Raises StateStoreError."""
        if self.ledger is not None:
            await self.ledger.settle()

    async def run(self) -> None:
        """Let time pass for the state machine; never returns."""
        while True:
            await asyncio.sleep(TICK_S)
            self.handle_event(ev.Tick())
            self._tell_health()
            if self.ledger is not None:
                self.ledger.write()
            if self.cluster.has_people:
                self.state.people.memory_bytes = self.figures.device_memory_bytes(self.state.formation.team)
            await asyncio.to_thread(self.freed.give_back)

    def change_cluster(self, cluster: Cluster) -> None:
        """The cluster file names other nodes."""
        tasks = ", ".join(str(node.index) for node in cluster.workers)
        _log.info("the cluster file was edited: it has nodes %s", tasks)
        self.cluster = cluster
        self._compiler.device_count = max(self._compiler.device_count, cluster.device_count)
        self.handle_event(ev.MembersChanged(members=_members_of(cluster)))

    def drain(self, reason: str) -> None:
        """Begin nothing new, let what runs end; then `drained` is done."""
        self.handle_event(ev.DrainRequested(reason=reason, limit_s=self.limits.drain_s))
        self._tell_health()

    @contextmanager
    def planning(self, session_id: str) -> Iterator[OutgoingStream]:
        """Progress of a planning; it ends with an error where the session ends, or the server is about to."""
        outlet = OutgoingStream()
        self._plannings[outlet] = session_id
        try:
            yield outlet
        finally:
            del self._plannings[outlet]

    async def unless_it_ends(self, session_id: str, result: Awaitable[T]) -> T:
        """What comes of it; raises SessionError at the end of the session."""
        end, coming = self._loop.create_future(), asyncio.ensure_future(result)
        self._ends[end] = session_id
        try:
            await asyncio.wait((coming, end), return_when=asyncio.FIRST_COMPLETED)
            if not coming.done():
                raise SessionError("the session ended", remedy="open a new session")
            return coming.result()
        finally:
            coming.cancel()
            del self._ends[end]

    def _person_of(self, session_id: str) -> str:
        session = self.state.sessions.get(session_id)
        return "" if session is None else session.person.name

    async def close(self, reason: str) -> None:
        """Tell every daemon and every client to end, and end our children."""
        self.is_closing = True
        is_failure = self.halted.done()
        stopping = ServerUnavailableError(reason, remedy="connect again once the server is back")
        daemons = {record.daemon for record in self.state.formation.nodes.values()}
        for number, outlet in self._outlets.items():
            if number in daemons:
                outlet.put(
                    worker_pb2.SupervisorCommand(shutdown=worker_pb2.Shutdown(reason=reason, is_failure=is_failure))
                )
                outlet.end()
            else:
                outlet.end(stopping)
        for number in list(self._calls):
            self._to_call(do.Fail(call=number, error=stopping))
        for task in self._tasks:
            task.cancel()
        for cancellation in self._compilations.values():
            cancellation.cancel()
        self.planners.close()
        if self.ledger is not None:
            self.ledger.close()
        await asyncio.to_thread(self._compiler.close)

    # ---- numbers for the shell's streams and calls --------------------------
    def open_outgoing(self) -> tuple[int, OutgoingStream]:
        self._last_number += 1
        outlet = self._outlets[self._last_number] = OutgoingStream()
        return self._last_number, outlet

    def close_outgoing(self, number: int) -> None:
        self._outlets.pop(number, None)

    def call(self, make: Callable[[int], ev.Event]) -> Call:
        """Hand an event with a fresh call number to the state machine."""
        self._last_number += 1
        number = self._last_number
        call = self._calls[number] = Call(number)
        self.handle_event(make(number))
        return call

    def abandon_load(self, call: Call, session_id: str, plan_id: str) -> None:
        """Its client is gone, or has its answer."""
        self._calls.pop(call.number, None)
        self.handle_event(ev.LoadAbandoned(call=call.number, session_id=session_id, plan_id=plan_id))

    # ---- events in, commands out -------------------------------------------
    def handle_event(self, event: ev.Event) -> None:
        self._carry_out(machine.handle(self.state, event, self._loop.time()))
        if self.state.team != self._team:
            teams = (self._team, self.state.team)  # a client may still ask for a plan of the team before
            self._team = self.state.team
            dropped = self.plans.drop(lambda record: record.team not in teams)
            if self.ledger is not None:
                self.ledger.drop_plans(dropped)
            self._forget_unheld()
            for outlet in self._plannings:
                outlet.end(cluster_changed_error())
            self.planners.change_cluster(self.cluster.team(self._team))
        if (self.state.formation.phase == "ready") != self._was_ready:
            self._tell_health()

    def _carry_out(self, commands: Iterable[do.Command]) -> None:
        for command in commands:
            act = partial(_COMMAND_HANDLERS[type(command)], self, command)
            if self.ledger is not None and _must_be_stored(command):
                self.ledger.after(act)
            else:
                act()

    def _tell_health(self) -> None:
        """Ready means that a step would run now: no hang, no drain, all executors there."""
        is_ready = self.state.formation.phase == "ready" and watchdog.summarize(self.state) in ("ready", "degraded")
        if is_ready != self._was_ready:
            self._was_ready = is_ready
            self.on_ready(is_ready)

    def _order(self, command: do.ToWorkers | do.AbortOnWorkers) -> None:
        """Tell executors."""
        for message, nodes in orders_of(command, self.state.formation):
            if message.sequence:
                message.known = self.state.known
            for connection, node in self.state.formation.connections.items():
                if nodes is None or node in nodes:
                    self._to_peer(connection, message)

    def _ask_for_recent(self, command: do.AskForRecent) -> None:
        order = worker_pb2.SendRecent(after=command.after)
        self._to_peer(command.connection, worker_pb2.ExecutorCommand(send_recent=order))

    def _redeliver(self, command: do.Redeliver) -> None:
        for each in command.commands:
            message = each.payload
            if each.is_load:
                message = worker_pb2.ExecutorCommand(sequence=each.sequence, skip=worker_pb2.SkipCommand())
            self._to_peer(command.connection, message)

    def _name_snapshot(self, command: do.NameSnapshot) -> None:
        if self.ledger is None:
            self.handle_event(ev.SnapshotNamed(session_id=command.session_id, number=command.number))
        else:
            self.ledger.write()

    def _retain_on_daemons(self, command: do.RetainOnDaemons) -> None:
        sessions = command.sessions if self.ledger is None else self.ledger.with_ended(command.sessions)
        retain = worker_pb2.RetainSnapshots(
            sessions=[worker_pb2.KeptSession(session_id=name, number=number) for name, number in sessions],
            generation=command.generation,
            sequence=command.sequence,
        )
        message = worker_pb2.SupervisorCommand(retain=retain)
        for record in self.state.formation.nodes.values():
            if record.daemon is not None:
                self._to_peer(record.daemon, message)

    def _start_executor(self, command: do.StartExecutor) -> None:
        start = worker_pb2.StartExecutor(
            generation=command.generation,
            coordinator_address=command.coordinator_address,
            process_count=command.process_count,
            process_id=command.process_id,
            data_port=command.data_port,
            lease_s=self.limits.grace_s if self.ledger is not None else 0.0,
        )
        self._to_peer(command.connection, worker_pb2.SupervisorCommand(start=start))

    def _stop_executor(self, command: do.StopExecutor) -> None:
        stop = worker_pb2.StopExecutor(generation=command.generation)
        self._to_peer(command.connection, worker_pb2.SupervisorCommand(stop=stop))

    def _to_peer(self, number: int, message: Any) -> None:
        if number in self._outlets:
            self._outlets[number].put(message)

    def _end_outgoing(self, command: do.Refuse | do.EndStream) -> None:
        number = command.connection if isinstance(command, do.Refuse) else command.stream
        if number in self._outlets:
            self._outlets[number].end(command.error)

    def _disconnect(self, command: do.Disconnect) -> None:
        if command.connection in self._outlets:
            self._outlets[command.connection].end()

    def _to_call(self, command: do.Progress | do.Answer | do.Fail) -> None:
        if command.call in self._calls:
            self._calls[command.call].put(command)
            if not isinstance(command, do.Progress):
                del self._calls[command.call]

    def _send_notice(self, command: do.Notice) -> None:
        reply = master_pb2.RunStepsReply(waiting_for=command.text, resend=command.resend)
        if command.lost is not None:
            reply.lost.CopyFrom(wire.error_to_proto(command.lost))
        if command.snapshot is not None:
            end = command.snapshot
            reply.snapshot.number, reply.snapshot.kept_bytes = end.number, end.kept_bytes
            reply.snapshot.store_s = end.store_s
            if end.error is not None:
                reply.snapshot.error.CopyFrom(wire.error_to_proto(end.error))
        self._to_peer(command.stream, reply)

    def _send_drain_notice(self, command: do.DrainNotice) -> None:
        is_over = not command.reason
        notice = master_pb2.DrainNotice(reason=command.reason, left_s=command.left_s, is_over=is_over)
        self._to_peer(command.stream, master_pb2.RunStepsReply(drain=notice))

    def _drain_began(self, command: do.DrainBegan) -> None:
        for outlet in self._plannings:
            outlet.end(command.error)

    def _drained(self, command: do.Drained) -> None:
        if command.nodes is None:
            if not self.drained.done():
                self.drained.set_result(None)
            return
        for node in command.nodes:
            daemon = self.state.formation.nodes[node].daemon
            if daemon is not None:
                self._to_peer(
                    daemon, worker_pb2.SupervisorCommand(shutdown=worker_pb2.Shutdown(reason="it has drained"))
                )

    def _reply_step(self, command: do.ReplyStep) -> None:
        reply = master_pb2.RunStepsReply(
            number=command.number,
            values=command.values,
            run_s=command.run_s,
            traces=command.traces,
            not_finite=command.not_finite,
        )
        if command.error is not None:
            reply.error.CopyFrom(wire.error_to_proto(command.error))
            self._log_failure(command, command.error)
        self._to_peer(command.stream, reply)

    def _log_failure(self, command: do.ReplyStep, error: ShardwrightError) -> None:
        sessions = self.state.sessions.values()
        session = next((other.session_id for other in sessions if other.stream == command.stream), "")
        about_it = fields(session=session, step=command.number)
        _log.info("step %d of session %s failed: %s", command.number, session[:8], error.message, extra=about_it)

    def _session_ended(self, command: do.SessionEnded) -> None:
        ended = SessionError("the session ended", remedy="open a new session")
        for outlet, session_id in self._plannings.items():
            if session_id == command.session_id:
                outlet.end(ended)
        for end, session_id in self._ends.items():
            if session_id == command.session_id and not end.done():
                end.set_result(None)
        self.freed.note()
        _log.info("session %s ended", command.session_id[:8], extra=fields(session=command.session_id))
        self.programs.drop_session(command.session_id)
        self.plans.drop_session(command.session_id)
        self._forget_unheld()

    def _forget_unheld(self) -> None:
        self._compiled = {plan_id: facts for plan_id, facts in self._compiled.items() if self.plans.is_held(plan_id)}

    def _log_line(self, command: do.Log) -> None:
        if not self.is_closing:  # that workers leave is no news then
            level = logging.WARNING if command.is_warning else logging.INFO
            about_it = {"session": command.session, "step": command.step} if command.session else {}
            _log.log(level, "%s", command.text, extra=fields(**about_it))

    def _look_again(self, command: do.LookAgain) -> None:
        def look() -> None:
            if not self.is_closing:
                self.handle_event(ev.Tick())

        self._loop.call_later(command.delay_s, look)

    def _halt(self, command: do.Halt) -> None:
        if not self.halted.done():
            self.halted.set_result(command)

    # ---- compiling ---------------------------------------------------------
    def require_compiled(self, session_id: str, plan_id: str) -> ev.ProgramInfo:
        """Of a plan that the session has loaded. Raises PlanError."""
        self.plans.get(session_id, plan_id)
        if plan_id not in self._compiled:
            raise PlanError(f"the plan {plan_id[:12]} is not loaded", remedy="load it first")
        return self._compiled[plan_id]

    def _compile(self, command: do.Compile) -> None:
        if command.plan_id in self._compilations:
            return
        cancellation = self._compilations[command.plan_id] = Cancellation()
        task = self._loop.create_task(self._compile_plan(command, cancellation))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _cancel_compile(self, command: do.CancelCompile) -> None:
        cancellation = self._compilations.pop(command.plan_id, None)
        if cancellation is not None:
            cancellation.cancel()

    async def _compile_plan(self, command: do.Compile, cancellation: Cancellation) -> None:
        plan_id, error = command.plan_id, None
        program = self._compiled.get(plan_id)
        try:
            if program is None:
                record = self.plans.get(command.session_id, plan_id)
                program = await self._compile_in_turn(command, record, cancellation)
                if self.ledger is not None:
                    await self.ledger.put_program_info(program)
        except Exception as caught:
            error = wire.to_shardwright_error(caught)
        if self._compilations.get(plan_id) is not cancellation:
            return  # nobody waits for it
        del self._compilations[plan_id]
        if program is not None:
            self._compiled[plan_id] = program
        self.handle_event(ev.CompileFinished(plan_id=plan_id, program=program, error=error))

    async def _compile_in_turn(
        self, command: do.Compile, record: PlanRecord, cancellation: Cancellation
    ) -> ev.ProgramInfo:
        def moved(position: int) -> None:
            self._tell_loads(command.plan_id, f"queue, position {position}")

        async with self.compile_queue.place(command.session_id, moved):
            cancellation.check()
            self._tell_loads(command.plan_id, "emit and compile")
            nodes_of = self.state.formation.nodes_of
            with about(session=command.session_id, plan=command.plan_id), self.state.statistics.compilations.timed():
                began_s = self._loop.time()
                program = await asyncio.to_thread(
                    compile_program, command.plan_id, record, self._compiler, nodes_of, cancellation
                )
                _log.info("compiled in %.1f s", self._loop.time() - began_s)
                return program

    def _tell_loads(self, plan_id: str, phase: str) -> None:
        """Tell all who wait for a plan how far it is."""
        for session in self.state.sessions.values():
            executable = session.executables.get(plan_id)
            for call in executable.waiting_calls if executable is not None else ():
                self._to_call(do.Progress(call=call, phase=phase))


def _must_be_stored(command: do.Command) -> bool:
    """Whether what it tells must be in the store first: after a restart nobody may know better than the master."""
    return isinstance(command, do.StartExecutor | do.RetainOnDaemons)


def _members_of(cluster: Cluster) -> tuple[Member, ...]:
    return tuple(
        Member(index=node.index, address=node.address, device_count=node.device_count, data_port=node.data_port or 0)
        for node in cluster.workers
    )


_COMMAND_HANDLERS: dict[type[do.Command], Callable[[Master, Any], None]] = {
    do.RunOnWorkers: Master._order,
    do.AbortOnWorkers: Master._order,
    do.ReplyStep: Master._reply_step,
    do.Notice: Master._send_notice,
    do.DrainNotice: Master._send_drain_notice,
    do.DrainBegan: Master._drain_began,
    do.Drained: Master._drained,
    do.OpenOnWorkers: Master._order,
    do.CloseOnWorkers: Master._order,
    do.LoadOnWorkers: Master._order,
    do.UnloadOnWorkers: Master._order,
    do.WriteOnWorkers: Master._order,
    do.FinishOnWorkers: Master._order,
    do.StoreOnWorkers: Master._order,
    do.RetainOnDaemons: Master._retain_on_daemons,
    do.NameSnapshot: Master._name_snapshot,
    do.ReportOnWorkers: Master._order,
    do.AskForRecent: Master._ask_for_recent,
    do.Redeliver: Master._redeliver,
    do.ReleaseOnWorkers: Master._order,
    do.StartExecutor: Master._start_executor,
    do.StopExecutor: Master._stop_executor,
    do.Refuse: Master._end_outgoing,
    do.Disconnect: Master._disconnect,
    do.EndStream: Master._end_outgoing,
    do.Progress: Master._to_call,
    do.Answer: Master._to_call,
    do.Fail: Master._to_call,
    do.SessionEnded: Master._session_ended,
    do.Compile: Master._compile,
    do.CancelCompile: Master._cancel_compile,
    do.LookAgain: Master._look_again,
    do.Log: Master._log_line,
    do.Halt: Master._halt,
}
