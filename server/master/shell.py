"""The master's shell: brings events to `MasterState` and carries out its commands.

Everything here runs on one asyncio loop. gRPC handlers (`service.py`) hold
`Call`s and `OutgoingStream`s; commands reach them by number.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from shardwright.clusters.cluster import Cluster
from shardwright.errors import PlanError, ServerUnavailableError, SessionError, ShardwrightError
from shardwright.proto.v1 import master_pb2, worker_pb2
from shardwright.protocol import wire
from shardwright.server.limits import Limits
from shardwright.server.master import events as ev
from shardwright.server.master.content_store import ContentStore, PlanRecord
from shardwright.server.master.executables import compile_program, load_messages, peers_of
from shardwright.server.master.formation import Identity, Member
from shardwright.server.master.planning import FairQueue, PlannerPool, core_count
from shardwright.server.master.programs import StoredProgram
from shardwright.server.master.state import MasterState
from shardwright.server.versions import jax_version, shardwright_version
from shardwright.xla import Cancellation, CompileService

TICK_S = 0.5

_log = logging.getLogger("shardwright.server")


class OutgoingStream:
    """Messages on their way to one peer, written in order by its gRPC handler."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Any] = asyncio.Queue()

    def put(self, message: Any) -> None:
        self._queue.put_nowait(message)

    def end(self, error: ShardwrightError | None = None) -> None:
        """No more messages; the handler ends the stream with `error`, where given."""
        self._queue.put_nowait(_EndOfStream(error))

    async def get(self) -> Any:
        """The next message, or None at the end; raises the error the stream is to end with."""
        message = await self._queue.get()
        if isinstance(message, _EndOfStream):
            if message.error is not None:
                raise message.error
            return None
        return message


@dataclass(frozen=True, slots=True)
class _EndOfStream:
    error: ShardwrightError | None


class Call:
    """A call that waits for the state machine: phases, then a value or an error."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._queue: asyncio.Queue[ev.Progress | ev.Answer | ev.Fail] = asyncio.Queue()

    def put(self, command: ev.Progress | ev.Answer | ev.Fail) -> None:
        self._queue.put_nowait(command)

    async def next(self) -> ev.Progress | ev.Answer:
        """The next phase, or the answer; raises the error the call failed with."""
        command = await self._queue.get()
        if isinstance(command, ev.Fail):
            raise command.error
        return command

    async def answer(self) -> Any:
        while isinstance(command := await self.next(), ev.Progress):
            pass
        return command.value


class Master:
    """State machine, library and children of one master.

    halted: gets what ends the server. drained: is done when a drain is complete.
    """

    def __init__(self, cluster: Cluster, limits: Limits, *, wait_s: float) -> None:
        loop = asyncio.get_running_loop()
        self.cluster = cluster
        self.limits = limits
        self.programs: ContentStore[StoredProgram] = ContentStore(
            "program",
            limits.programs_per_session,
            session_bytes=limits.session_program_bytes,
            total_bytes=limits.all_program_bytes,
        )
        self.plans: ContentStore[PlanRecord] = ContentStore(
            "plan",
            limits.programs_per_session,
            session_bytes=limits.session_program_bytes,
            total_bytes=limits.all_program_bytes,
        )
        self.planners = PlannerPool(cluster)
        self.halted: asyncio.Future[ev.Halt] = loop.create_future()
        self.drained: asyncio.Future[None] = loop.create_future()
        self.on_ready: Callable[[bool], None] = lambda is_ready: None
        members = tuple(
            Member(
                index=node.index, address=node.address, device_count=node.device_count, data_port=node.data_port or 0
            )
            for node in cluster.workers
        )
        identity = Identity(
            cluster_hash=cluster.content_hash, shardwright_version=shardwright_version(), jax_version=jax_version()
        )
        self.state = MasterState.create(members, identity, limits, wait_s=wait_s, now_s=loop.time())
        self._compiler = CompileService(cluster.device_count, cluster.platform, gpu_ids=cluster.master.gpu_ids)
        self._compiled: dict[str, ev.ProgramInfo] = {}
        self._compile_queue = FairQueue(core_count())
        self._compilations: dict[str, Cancellation] = {}  # under way, by plan
        self._tasks: set[asyncio.Task[None]] = set()
        self._outlets: dict[int, OutgoingStream] = {}
        self._plannings: dict[OutgoingStream, str] = {}  # → session
        self._calls: dict[int, Call] = {}
        self._last_number = 0
        self._was_ready = False
        self._is_closing = False
        self._loop = loop

    async def run(self) -> None:
        """Let time pass for the state machine; never returns."""
        while True:
            await asyncio.sleep(TICK_S)
            self.handle_event(ev.Tick())
            self._tell_health()

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

    async def close(self, reason: str) -> None:
        """Tell every daemon and every client to end, and end our children."""
        self._is_closing = True
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
            self._to_call(ev.Fail(call=number, error=stopping))
        for task in self._tasks:
            task.cancel()
        for cancellation in self._compilations.values():
            cancellation.cancel()
        self.planners.close()
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

    @staticmethod
    def new_session_id() -> str:
        return secrets.token_hex(16)

    # ---- events in, commands out -------------------------------------------
    def handle_event(self, event: ev.Event) -> None:
        for command in self.state.handle(event, self._loop.time()):
            _COMMAND_HANDLERS[type(command)](self, command)
        if (self.state.formation.phase == "ready") != self._was_ready:
            self._tell_health()

    def _tell_health(self) -> None:
        """Ready means that a step would run now: no hang, no drain, all executors there."""
        is_ready = self.state.formation.phase == "ready" and self.state.summary in ("ready", "degraded")
        if is_ready != self._was_ready:
            self._was_ready = is_ready
            self.on_ready(is_ready)

    def _to_workers(self, *messages: worker_pb2.ExecutorCommand, nodes: Collection[int] | None = None) -> None:
        """To all executors, or those of some nodes."""
        for connection, node in self.state.formation.connections.items():
            outlet = self._outlets.get(connection)
            if outlet is not None and (nodes is None or node in nodes):
                for message in messages:
                    outlet.put(message)

    def _run_on_workers(self, command: ev.RunOnWorkers) -> None:
        message = worker_pb2.ExecutorCommand(sequence=command.sequence)
        message.run.step.CopyFrom(command.step.payload)
        if command.step.moved_bytes is not None or command.step.snapshot is not None:
            message.run.peers.extend(peers_of(self.state.formation))
        self._to_workers(message)

    def _open_on_workers(self, command: ev.OpenOnWorkers) -> None:
        order = worker_pb2.OpenWorkerSession(session_id=command.session_id)
        self._to_workers(worker_pb2.ExecutorCommand(sequence=command.sequence, open=order))

    def _close_on_workers(self, command: ev.CloseOnWorkers) -> None:
        order = worker_pb2.CloseWorkerSession(session_id=command.session_id)
        self._to_workers(worker_pb2.ExecutorCommand(sequence=command.sequence, close=order))

    def _unload_on_workers(self, command: ev.UnloadOnWorkers) -> None:
        order = worker_pb2.UnloadProgram(session_id=command.session_id, executable_id=command.executable_id)
        self._to_workers(worker_pb2.ExecutorCommand(sequence=command.sequence, unload=order))

    def _write_on_workers(self, command: ev.WriteOnWorkers) -> None:
        order = worker_pb2.WriteCheckpoint(session_id=command.session_id, number=command.number)
        self._to_workers(worker_pb2.ExecutorCommand(sequence=command.sequence, write_checkpoint=order))

    def _finish_on_workers(self, command: ev.FinishOnWorkers) -> None:
        order = worker_pb2.FinishCheckpoint(
            session_id=command.session_id, number=command.number, is_commit=command.is_commit
        )
        self._to_workers(worker_pb2.ExecutorCommand(sequence=command.sequence, finish_checkpoint=order))

    def _store_on_workers(self, command: ev.StoreOnWorkers) -> None:
        order = worker_pb2.StoreSnapshot(
            session_id=command.session_id,
            number=command.number,
            complete=command.complete,
            peers=peers_of(self.state.formation),
        )
        self._to_workers(worker_pb2.ExecutorCommand(sequence=command.sequence, store_snapshot=order))

    def _retain_on_daemons(self, command: ev.RetainOnDaemons) -> None:
        kept = [worker_pb2.KeptSession(session_id=name, number=number) for name, number in command.sessions]
        message = worker_pb2.SupervisorCommand(retain=worker_pb2.RetainSnapshots(sessions=kept))
        for record in self.state.formation.nodes.values():
            if record.daemon is not None:
                self._to_peer(record.daemon, message)

    def _abort_on_workers(self, command: ev.AbortOnWorkers) -> None:
        order = worker_pb2.AbortStep(sequence=command.sequence, error=wire.error_to_proto(command.error))
        self._to_workers(worker_pb2.ExecutorCommand(abort=order), nodes=command.nodes)

    def _release_on_workers(self, command: ev.ReleaseOnWorkers) -> None:
        order = worker_pb2.ReleaseWorkerArrays(session_id=command.session_id, array_ids=command.array_ids)
        if command.error is not None:
            order.error.CopyFrom(wire.error_to_proto(command.error))
        self._to_workers(worker_pb2.ExecutorCommand(sequence=command.sequence, release=order))

    def _load_on_workers(self, command: ev.LoadOnWorkers) -> None:
        for order in load_messages(command, self.state.formation):
            self._to_workers(order.message, nodes=order.nodes)

    def _start_executor(self, command: ev.StartExecutor) -> None:
        start = worker_pb2.StartExecutor(
            generation=command.generation,
            coordinator_address=command.coordinator_address,
            process_count=command.process_count,
            process_id=command.process_id,
            data_port=command.data_port,
        )
        self._to_peer(command.connection, worker_pb2.SupervisorCommand(start=start))

    def _stop_executor(self, command: ev.StopExecutor) -> None:
        stop = worker_pb2.StopExecutor(generation=command.generation)
        self._to_peer(command.connection, worker_pb2.SupervisorCommand(stop=stop))

    def _to_peer(self, number: int, message: Any) -> None:
        if number in self._outlets:
            self._outlets[number].put(message)

    def _end_outgoing(self, command: ev.Refuse | ev.EndStream) -> None:
        number = command.connection if isinstance(command, ev.Refuse) else command.stream
        if number in self._outlets:
            self._outlets[number].end(command.error)

    def _disconnect(self, command: ev.Disconnect) -> None:
        if command.connection in self._outlets:
            self._outlets[command.connection].end()

    def _to_call(self, command: ev.Progress | ev.Answer | ev.Fail) -> None:
        if command.call in self._calls:
            self._calls[command.call].put(command)
            if not isinstance(command, ev.Progress):
                del self._calls[command.call]

    def _send_notice(self, command: ev.Notice) -> None:
        reply = master_pb2.RunStepsReply(waiting_for=command.text)
        if command.lost is not None:
            reply.lost.CopyFrom(wire.error_to_proto(command.lost))
        if command.snapshot is not None:
            end = command.snapshot
            reply.snapshot.number, reply.snapshot.kept_bytes = end.number, end.kept_bytes
            reply.snapshot.store_s = end.store_s
            if end.error is not None:
                reply.snapshot.error.CopyFrom(wire.error_to_proto(end.error))
        self._to_peer(command.stream, reply)

    def _send_drain_notice(self, command: ev.DrainNotice) -> None:
        is_over = not command.reason
        notice = master_pb2.DrainNotice(reason=command.reason, left_s=command.left_s, is_over=is_over)
        self._to_peer(command.stream, master_pb2.RunStepsReply(drain=notice))

    def _drain_began(self, command: ev.DrainBegan) -> None:
        for outlet in self._plannings:
            outlet.end(command.error)

    def _drained(self, command: ev.Drained) -> None:
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

    def _reply_step(self, command: ev.ReplyStep) -> None:
        reply = master_pb2.RunStepsReply(
            number=command.number,
            values=command.values,
            run_s=command.run_s,
            traces=command.traces,
            not_finite=command.not_finite,
        )
        if command.error is not None:
            reply.error.CopyFrom(wire.error_to_proto(command.error))
        self._to_peer(command.stream, reply)

    def _session_ended(self, command: ev.SessionEnded) -> None:
        ended = SessionError("the session ended", remedy="open a new session")
        for outlet, session_id in self._plannings.items():
            if session_id == command.session_id:
                outlet.end(ended)
        self.programs.drop_session(command.session_id)
        self.plans.drop_session(command.session_id)
        self._compiled = {plan_id: facts for plan_id, facts in self._compiled.items() if self.plans.is_held(plan_id)}

    def _log_line(self, command: ev.Log) -> None:
        if not self._is_closing:  # that workers leave is no news then
            _log.log(logging.WARNING if command.is_warning else logging.INFO, "%s", command.text)

    def _halt(self, command: ev.Halt) -> None:
        if not self.halted.done():
            self.halted.set_result(command)

    # ---- compiling ---------------------------------------------------------
    def require_compiled(self, session_id: str, plan_id: str) -> ev.ProgramInfo:
        """Of a plan that the session has loaded. Raises PlanError."""
        self.plans.get(session_id, plan_id)
        if plan_id not in self._compiled:
            raise PlanError(f"the plan {plan_id[:12]} is not loaded", remedy="load it first")
        return self._compiled[plan_id]

    def _compile(self, command: ev.Compile) -> None:
        if command.plan_id in self._compilations:
            return
        cancellation = self._compilations[command.plan_id] = Cancellation()
        task = self._loop.create_task(self._compile_plan(command, cancellation))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _cancel_compile(self, command: ev.CancelCompile) -> None:
        cancellation = self._compilations.pop(command.plan_id, None)
        if cancellation is not None:
            cancellation.cancel()

    async def _compile_plan(self, command: ev.Compile, cancellation: Cancellation) -> None:
        plan_id, error = command.plan_id, None
        program = self._compiled.get(plan_id)
        try:
            if program is None:
                record = self.plans.get(command.session_id, plan_id)
                program = await self._compile_in_turn(command, record, cancellation)
        except Exception as caught:
            error = wire.to_shardwright_error(caught)
        if self._compilations.get(plan_id) is not cancellation:
            return  # nobody waits for it
        del self._compilations[plan_id]
        if program is not None:
            self._compiled[plan_id] = program
        self.handle_event(ev.CompileFinished(plan_id=plan_id, program=program, error=error))

    async def _compile_in_turn(
        self, command: ev.Compile, record: PlanRecord, cancellation: Cancellation
    ) -> ev.ProgramInfo:
        def moved(position: int) -> None:
            self._tell_loads(command.plan_id, f"queue, position {position}")

        async with self._compile_queue.place(command.session_id, moved):
            cancellation.check()
            self._tell_loads(command.plan_id, "emit and compile")
            nodes_of = self.state.formation.nodes_of
            return await asyncio.to_thread(
                compile_program, command.plan_id, record, self._compiler, nodes_of, cancellation
            )

    def _tell_loads(self, plan_id: str, phase: str) -> None:
        """Tell all who wait for a plan how far it is."""
        for session in self.state.sessions.values():
            executable = session.executables.get(plan_id)
            for call in executable.waiting_calls if executable is not None else ():
                self._to_call(ev.Progress(call=call, phase=phase))


_COMMAND_HANDLERS: dict[type[ev.Command], Callable[[Master, Any], None]] = {
    ev.RunOnWorkers: Master._run_on_workers,
    ev.AbortOnWorkers: Master._abort_on_workers,
    ev.ReplyStep: Master._reply_step,
    ev.Notice: Master._send_notice,
    ev.DrainNotice: Master._send_drain_notice,
    ev.DrainBegan: Master._drain_began,
    ev.Drained: Master._drained,
    ev.OpenOnWorkers: Master._open_on_workers,
    ev.CloseOnWorkers: Master._close_on_workers,
    ev.LoadOnWorkers: Master._load_on_workers,
    ev.UnloadOnWorkers: Master._unload_on_workers,
    ev.WriteOnWorkers: Master._write_on_workers,
    ev.FinishOnWorkers: Master._finish_on_workers,
    ev.StoreOnWorkers: Master._store_on_workers,
    ev.RetainOnDaemons: Master._retain_on_daemons,
    ev.ReleaseOnWorkers: Master._release_on_workers,
    ev.StartExecutor: Master._start_executor,
    ev.StopExecutor: Master._stop_executor,
    ev.Refuse: Master._end_outgoing,
    ev.Disconnect: Master._disconnect,
    ev.EndStream: Master._end_outgoing,
    ev.Progress: Master._to_call,
    ev.Answer: Master._to_call,
    ev.Fail: Master._to_call,
    ev.SessionEnded: Master._session_ended,
    ev.Compile: Master._compile,
    ev.CancelCompile: Master._cancel_compile,
    ev.Log: Master._log_line,
    ev.Halt: Master._halt,
}
