"""The master's gRPC service for clients: each method turns messages into events and waits for their outcome."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import grpc

from shardwright.clusters.access_tokens import Caller
from shardwright.cost.profiles import hardware_profile
from shardwright.errors import (
    ArrayError,
    AuthenticationError,
    CheckpointError,
    DatasetError,
    OptionError,
    ShardwrightError,
    StateStoreError,
)
from shardwright.log_lines import SESSION_DIGITS, about, fields
from shardwright.proto.v1 import master_pb2, master_pb2_grpc
from shardwright.protocol import plan_messages, wire
from shardwright.protocol.session_secrets import MAX_NAME, id_of, is_name, named_secret, new_salt, new_secret
from shardwright.server.access import Access, token_of
from shardwright.server.black_box import dataset_key
from shardwright.server.handlers import abort_aio
from shardwright.server.master import commands as do
from shardwright.server.master import drain, named, recovered, status, teams
from shardwright.server.master import events as ev
from shardwright.server.master.content_store import PlanRecord
from shardwright.server.master.executables import dump_texts, load_result
from shardwright.server.master.operator_service import find_session_id, operator_of
from shardwright.server.master.outlets import OutgoingStream
from shardwright.server.master.programs import IncomingProgram, StoredProgram
from shardwright.server.master.sessions import Session, unknown_session
from shardwright.server.master.shell import Master
from shardwright.server.tuning import PROGRESS_S
from shardwright.server.versions import jax_version, shardwright_version
from shardwright.tuning import CHUNK_BYTES

Context = Any  # grpc.aio.ServicerContext: generic in ways that its stubs do not agree on

_log = logging.getLogger("shardwright.server")


def _with_typed_errors(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """End a call that raises with our error in its trailing metadata."""

    @functools.wraps(method)
    async def wrapper(self: Any, request: Any, context: Context) -> Any:
        try:
            with about(call=method.__name__, session=getattr(request, "session_id", "")):
                return await method(self, request, context)
        except (asyncio.CancelledError, grpc.RpcError):
            raise
        except Exception as caught:
            if not isinstance(caught, ShardwrightError):
                _log.exception("%s failed: %s", method.__name__, caught, extra=fields(call=method.__name__))
            await abort_aio(context, wire.to_shardwright_error(caught))

    return wrapper


class MasterService(master_pb2_grpc.MasterServicer):
    def __init__(self, master: Master, access: Access) -> None:
        self._master = master
        self._access = access

    # ---- sessions ----------------------------------------------------------
    @_with_typed_errors
    async def OpenSession(
        self, request: master_pb2.OpenSessionRequest, context: Context
    ) -> master_pb2.OpenSessionReply:
        master = self._master
        known = self._find_named(request.name)
        salt = "" if not request.name else new_salt() if known is None else known.salt
        secret = named_secret(token_of(context.invocation_metadata()), salt, request.name) if salt else new_secret()
        asked = ev.SessionRequested(
            call=0,
            session_id=id_of(secret),
            owner=self._caller(context).name,
            name=request.name,
            salt=salt,
            person=self._access.person_of(context),
        )
        master.planners.warm()
        call = master.call(lambda number: replace(asked, call=number))
        try:
            await call.answer()
            await master.settle()
        except (StateStoreError, asyncio.CancelledError):  # cancelled: the client gave up waiting for the workers
            if known is None:
                master.call(lambda number: ev.SessionClosed(call=number, session_id=asked.session_id))
            raise
        session = master.state.sessions.get(asked.session_id)
        if session is None:
            raise unknown_session(asked.session_id, master.state.lost)
        limits, cluster, how = master.limits, master.cluster, "opened" if known is None else "taken up"
        text, about_it = "session %s %s by %s, client %s", fields(session=session.session_id)
        _log.info(text, session.label, how, context.peer(), request.client_version[:40], extra=about_it)
        profile = hardware_profile(cluster.hardware)
        reply = master_pb2.OpenSessionReply(
            session_id=session.session_id,
            session_secret=secret,
            server_version=shardwright_version(),
            jax_version=jax_version(),
            cluster_name=cluster.name,
            platform=cluster.platform,
            nodes=self._nodes(),
            chunk_bytes=CHUNK_BYTES,
            max_pending_steps=limits.pending_steps,
            grace_s=limits.grace_s,
            read_back_bytes=limits.read_back_bytes,
            is_elastic=cluster.is_elastic,
            compute_capability=profile.compute_capability,
            cudnn_version=profile.cudnn_version,
        )
        if known is not None:
            _describe_taken_up(session, reply)
        return reply

    def _find_named(self, name: str) -> Session | None:
        """Raises OptionError on what can be no name."""
        if name and not is_name(name):
            remedy = f"use 1 to {MAX_NAME} printable characters"
            raise OptionError(f"no session can be named {name[:MAX_NAME]!r}", where="name", remedy=remedy)
        return named.find(self._master.state, name)

    def _nodes(self) -> list[master_pb2.Node]:
        """Those of the team."""
        return [self._node(index) for index in self._master.state.formation.team]

    def _node(self, index: int) -> master_pb2.Node:
        formation = self._master.state.formation
        devices = formation.devices.get(index, range(0))
        address = formation.nodes[index].data_address
        return master_pb2.Node(index=index, data_address=address, first_device=devices.start, device_count=len(devices))

    @_with_typed_errors
    async def CloseSession(
        self, request: master_pb2.CloseSessionRequest, context: Context
    ) -> master_pb2.CloseSessionReply:
        call = self._master.call(lambda number: ev.SessionClosed(call=number, session_id=request.session_id))
        await call.answer()
        await self._master.settle()
        return master_pb2.CloseSessionReply()

    def _require_session(self, session_id: str) -> None:
        if session_id not in self._master.state.sessions:
            raise unknown_session(session_id, self._master.state.lost)
        self._master.handle_event(ev.SessionTouched(session_id=session_id))

    # ---- programs and plans ------------------------------------------------
    @_with_typed_errors
    async def UploadProgram(
        self, requests: AsyncIterator[master_pb2.UploadProgramRequest], context: Context
    ) -> master_pb2.UploadProgramReply:
        master, incoming = self._master, IncomingProgram(self._master.limits.program_bytes)
        messages = aiter(requests)
        request: master_pb2.UploadProgramRequest | None = await anext(messages, None)
        session_id = "" if request is None else request.session_id
        self._require_session(session_id)
        with master.programs.arrival(session_id) as came, master.freed.noting_failure():
            while request is not None:
                self._require_session(session_id)
                came(len(request.chunk))
                await asyncio.to_thread(incoming.feed, request.chunk)  # it may unpack to a thousand times as much
                request = await master.unless_it_ends(session_id, anext(messages, None))
            program = await asyncio.to_thread(incoming.finish)
        self._require_session(session_id)
        master.programs.put(session_id, program.program_id, program, len(program.gzip))
        master.handle_event(ev.ProgramsSent(session_id=session_id))
        statistics = master.state.statistics
        statistics.programs += 1
        statistics.program_bytes += len(program.gzip)
        if self._master.ledger is not None:
            await self._master.ledger.put_program(session_id, program)
        return master_pb2.UploadProgramReply(program_id=program.program_id)

    @_with_typed_errors
    async def PlanProgram(self, request: master_pb2.PlanProgramRequest, context: Context) -> None:
        self._require_session(request.session_id)
        program = self._master.programs.get(request.session_id, request.program_id)
        plan_messages.plan_options(request)  # refuse wrong options before a planner is asked
        team = self._master.state.team
        plan_id = _plan_id(request, team)
        record = self._master.plans.hold(request.session_id, plan_id)
        if record is None:  # or what the session has of a search that it interrupted: nobody else gets that
            own_id = hashlib.sha256(f"{plan_id} of {request.session_id}".encode()).hexdigest()
            record = self._master.plans.hold(request.session_id, own_id)
            plan_id = plan_id if record is None else own_id
        if record is None:
            if (refused := drain.refusal_of_new(self._master.state)) is not None:
                raise refused
            with about(plan=plan_id):
                record, was_interrupted = await self._plan(request, program, context)
            plan_id = own_id if was_interrupted else plan_id
            self._require_session(request.session_id)
            self._require_team(record)
            self._master.plans.put(request.session_id, plan_id, record, len(record.json_gzip))
        if self._master.ledger is not None:
            await self._master.ledger.put_plan(request.session_id, plan_id, record)
        await context.write(master_pb2.PlanProgramReply(result=master_pb2.PlanResult(plan_id=plan_id)))
        for chunk in wire.chunks(record.json_gzip):
            await context.write(master_pb2.PlanProgramReply(plan_chunk=chunk))

    @_with_typed_errors
    async def InterruptPlanning(
        self, request: master_pb2.InterruptPlanningRequest, context: Context
    ) -> master_pb2.InterruptPlanningReply:
        self._require_session(request.session_id)
        return master_pb2.InterruptPlanningReply(searches=self._master.planners.interrupt(request.session_id))

    async def _plan(
        self, request: master_pb2.PlanProgramRequest, program: StoredProgram, context: Context
    ) -> tuple[PlanRecord, bool]:
        """A new plan, and whether its search was interrupted."""
        team = self._master.state.team
        with self._master.planning(request.session_id) as outlet:
            task = asyncio.ensure_future(self._master.planners.plan(request, program, outlet.put))
            task.add_done_callback(lambda _: outlet.end())
            keeper = asyncio.ensure_future(self._keep_alive(request.session_id))
            try:
                while (progress := await outlet.get()) is not None:
                    await context.write(master_pb2.PlanProgramReply(progress=progress))
                plan_json, was_interrupted = await task
            finally:
                task.cancel()
                keeper.cancel()
        record = await asyncio.to_thread(PlanRecord.of, plan_json.decode(), program, request.first_device, team)
        return record, was_interrupted

    def _require_team(self, record: PlanRecord) -> None:
        """Raises ClusterChangedError where a plan is for other nodes than there are."""
        if record.team != self._master.state.team:
            raise teams.cluster_changed_error()

    async def _keep_alive(self, session_id: str) -> None:
        """A session does not expire while it waits for a plan."""
        while True:
            self._master.handle_event(ev.SessionTouched(session_id=session_id))
            await asyncio.sleep(min(self._master.limits.grace_s, self._master.limits.evict_idle_s) / 3)

    @_with_typed_errors
    async def LoadPlan(self, request: master_pb2.LoadPlanRequest, context: Context) -> None:
        self._require_session(request.session_id)
        self._require_team(self._master.plans.get(request.session_id, request.plan_id))
        started_s = asyncio.get_running_loop().time()
        call = self._master.call(
            lambda number: ev.LoadRequested(call=number, session_id=request.session_id, plan_id=request.plan_id)
        )
        phase, waiting, is_answered = "emit and compile", asyncio.ensure_future(call.next()), False
        try:
            while True:
                done, _ = await asyncio.wait([waiting], timeout=PROGRESS_S)
                if done:
                    command = waiting.result()
                    if isinstance(command, do.Answer):
                        is_answered = True
                        break
                    phase, waiting = command.phase, asyncio.ensure_future(call.next())
                elapsed_s = asyncio.get_running_loop().time() - started_s
                progress = master_pb2.LoadProgress(phase=phase, elapsed_s=elapsed_s)
                await context.write(master_pb2.LoadPlanReply(progress=progress))
        finally:
            waiting.cancel()
            if not is_answered:
                self._master.abandon_load(call, request.session_id, request.plan_id)
        await self._master.settle()
        result = load_result(command.value)
        await context.write(master_pb2.LoadPlanReply(result=result))

    @_with_typed_errors
    async def UnloadPlan(self, request: master_pb2.UnloadPlanRequest, context: Context) -> master_pb2.UnloadPlanReply:
        call = self._master.call(
            lambda number: ev.UnloadRequested(
                call=number, session_id=request.session_id, executable_id=request.executable_id
            )
        )
        await call.answer()
        return master_pb2.UnloadPlanReply()

    @_with_typed_errors
    async def DumpPlan(self, request: master_pb2.DumpPlanRequest, context: Context) -> None:
        self._require_session(request.session_id)
        for program, form, text in dump_texts(self._master.require_compiled(request.session_id, request.plan_id)):
            for chunk in wire.chunks(text):
                await context.write(master_pb2.DumpPlanReply(program=program, form=form, chunk=chunk))

    # ---- steps -------------------------------------------------------------
    @_with_typed_errors
    async def RunSteps(self, requests: AsyncIterator[master_pb2.RunStepsRequest], context: Context) -> None:
        master = self._master
        await context.send_initial_metadata(wire.STREAM_IS_OPEN)
        number, outlet = master.open_outgoing()
        person = self._access.person_of(context)
        reader = asyncio.ensure_future(self._read_steps(number, person, outlet, requests))
        try:
            while (reply := await outlet.get()) is not None:
                await context.write(reply)
        finally:
            reader.cancel()
            master.close_outgoing(number)
            master.handle_event(ev.StepsClosed(stream=number))

    async def _read_steps(
        self, stream: int, person: str, outlet: OutgoingStream, requests: AsyncIterator[master_pb2.RunStepsRequest]
    ) -> None:
        is_open = False
        try:
            async for request in requests:
                name, protection = request.session_id, _protection(request.protection)
                if not is_open:
                    live = tuple(request.live_arrays)
                    opened = ev.StepsOpened(
                        stream=stream, session_id=name, live=live, person=person, protection=protection
                    )
                    self._master.handle_event(opened)
                    is_open = True
                elif request.HasField("protection"):
                    self._master.handle_event(
                        ev.ProtectionChanged(stream=stream, session_id=name, protection=protection)
                    )
                if request.number:
                    self._master.handle_event(_step(stream, request))
        except grpc.RpcError:
            outlet.end()  # the client is gone
        except Exception as caught:
            outlet.end(wire.to_shardwright_error(caught))
        else:
            outlet.end()

    @_with_typed_errors
    async def CancelSteps(
        self, request: master_pb2.CancelStepsRequest, context: Context
    ) -> master_pb2.CancelStepsReply:
        call = self._master.call(
            lambda number: ev.StepsCancelled(call=number, session_id=request.session_id, numbers=tuple(request.numbers))
        )
        done: do.Cancellation = await call.answer()
        return master_pb2.CancelStepsReply(cancelled=done.cancelled, running=done.running)

    @_with_typed_errors
    async def WaitForSave(
        self, request: master_pb2.WaitForSaveRequest, context: Context
    ) -> master_pb2.WaitForSaveReply:
        call = self._master.call(
            lambda number: ev.SaveAwaited(call=number, session_id=request.session_id, number=request.number)
        )
        written_bytes, save_s = await call.answer()
        return master_pb2.WaitForSaveReply(written_bytes=written_bytes, save_s=save_s)

    @_with_typed_errors
    async def ReleaseArrays(
        self, request: master_pb2.ReleaseArraysRequest, context: Context
    ) -> master_pb2.ReleaseArraysReply:
        call = self._master.call(
            lambda number: ev.ReleaseRequested(
                call=number,
                session_id=request.session_id,
                array_ids=tuple(request.array_ids),
                after_step=request.after_step,
            )
        )
        await call.answer()
        return master_pb2.ReleaseArraysReply()

    # ---- status ------------------------------------------------------------
    @_with_typed_errors
    async def Status(self, request: master_pb2.StatusRequest, context: Context) -> master_pb2.StatusReply:
        nodes = [self._node(index) for index in self._master.state.formation.nodes]
        return status.report(self._master, nodes, self._caller(context))

    # ---- operators -----------------------------------------------------------
    @_with_typed_errors
    async def EndSession(self, request: master_pb2.EndSessionRequest, context: Context) -> master_pb2.EndSessionReply:
        session, operator = self._find_session(request.session), operator_of(self._caller(context))
        _log.info("session %s is closed by %s", session.label, operator, extra=fields(session=session.session_id))
        call = self._master.call(
            lambda number: ev.SessionClosed(call=number, session_id=session.session_id, operator=operator)
        )
        await call.answer()
        await self._master.settle()
        return master_pb2.EndSessionReply(session_id=session.session_id[:SESSION_DIGITS], owner=session.owner)

    def _find_session(self, digits: str) -> Session:
        """The one session whose id begins so."""
        session = self._master.state.sessions.get(find_session_id(self._master.state, digits))
        if session is None:
            raise unknown_session(digits)
        return session

    @_with_typed_errors
    async def Drain(self, request: master_pb2.DrainRequest, context: Context) -> master_pb2.DrainReply:
        if not request.reason:
            raise OptionError("no reason for the drain", where="reason", remedy="say why, for clients and for the log")
        self._master.drain(f"{operator_of(self._caller(context))}: {request.reason}")
        return master_pb2.DrainReply(limit_s=self._master.limits.drain_s)

    def _caller(self, context: Context) -> Caller:
        caller = self._access.caller(context.invocation_metadata())
        if caller is None:  # its token was taken back since the call began
            raise AuthenticationError("the call carries no valid token", remedy="ask an operator for a new one")
        return caller


def _describe_taken_up(session: Session, reply: master_pb2.OpenSessionReply) -> None:
    """What a client finds that takes up another one's session."""
    reply.is_taken_up, reply.last_step = True, named.last_number(session)
    reply.next_array_id = named.next_array_id(session)
    reply.was_kept = session.kept is not None
    reply.snapshot = session.snapshots.complete
    for kept, target in (
        (named.kept_now(session), reply.kept),
        (session.snapshots.kept, reply.snapshot_kept),
    ):
        if kept is not None:
            target.CopyFrom(recovered.to_message(kept))


def _plan_id(request: master_pb2.PlanProgramRequest, team: tuple[int, ...]) -> str:
    """The same program and options give the same plan on the same nodes, whether anybody waits for it or not."""
    anonymous = master_pb2.PlanProgramRequest()
    anonymous.CopyFrom(request)
    anonymous.session_id = ""
    anonymous.in_background = False
    return hashlib.sha256(anonymous.SerializeToString(deterministic=True) + str(team).encode()).hexdigest()


def _protection(message: master_pb2.Protection) -> ev.Protection:
    return ev.Protection(is_wanted=message.is_wanted, is_ready=message.is_ready, snapshot=message.snapshot)


def _step(stream: int, request: master_pb2.RunStepsRequest) -> ev.StepRequested:
    return ev.StepRequested(
        stream=stream,
        session_id=request.session_id,
        number=request.number,
        executable_id=request.executable_id,
        arguments=tuple(request.arguments),
        outputs=tuple(request.outputs),
        inline=tuple((array.array_id, len(array.data)) for array in request.inline_arguments),
        released=tuple(request.released),
        files=_files(request),
        moved_bytes=_output_bytes_of_move(request),
        snapshot=_snapshot(request),
        batch=_batch(request),
        timeout_s=request.timeout_s,
        generation=request.generation,
        restores=request.restores,
        resendable=tuple(request.resendable),
        name="".join(c for c in request.name[:80] if c.isprintable()),
        kept=recovered.from_message(request.kept) if request.HasField("kept") else None,
        payload=request,
    )


def _output_bytes_of_move(request: master_pb2.RunStepsRequest) -> tuple[int, ...] | None:
    """Of each output of a move. Raises ArrayError where its lists do not fit together."""
    if not request.HasField("move"):
        return None
    sources = [part for array in request.move.arrays for part in array.sources]
    targets = [part for array in request.move.arrays for part in array.targets]
    if (len(sources), len(targets)) != (len(request.arguments), len(request.outputs)):
        raise ArrayError("a move says of each of its arrays how it lies before and after")
    return tuple(wire.layout_from_proto(part.layout).size_bytes for part in targets)


def _snapshot(request: master_pb2.RunStepsRequest) -> ev.SnapshotStepInfo | None:
    """Of a snapshot, or the restore of one. Raises ArrayError where its lists do not fit together."""
    if request.HasField("snapshot"):
        if request.outputs:
            raise ArrayError("a snapshot makes no array")
        return ev.SnapshotStepInfo(is_restore=False)
    if request.HasField("restore_snapshot"):
        layouts = [wire.layout_from_proto(layout) for layout in request.restore_snapshot.layouts]
        if len(layouts) != len(request.outputs) or request.arguments:
            raise ArrayError("the restore of a snapshot says of each of its arrays how it lies")
        stored = request.restore_snapshot.stored
        if stored and len(stored) != len(layouts):
            raise ArrayError("the restore of a snapshot says of each of its arrays how it was stored")
        if any(len(array.ids) != len(array.parts) or not array.ids for array in stored):
            raise ArrayError("a stored array names each of its parts, and says how it lies")
        return ev.SnapshotStepInfo(is_restore=True, output_bytes=tuple(layout.size_bytes for layout in layouts))
    return None


def _batch(request: master_pb2.RunStepsRequest) -> ev.BatchStepInfo | None:
    """Of a batch that the workers read. Raises DatasetError where its lists do not fit together."""
    if not request.HasField("read_batch"):
        return None
    order = request.read_batch
    if len(order.parts) != len(request.outputs) or request.arguments or 0 in request.outputs:
        raise DatasetError("a batch names and lays out each of its arrays", where=order.dataset.function)
    layouts = [wire.layout_from_proto(part.layout) for part in order.parts]
    return ev.BatchStepInfo(
        output_bytes=tuple(layout.size_bytes for layout in layouts),
        key=dataset_key(order.dataset.function, order.dataset.options_json),
        function=order.dataset.function,
    )


def _files(request: master_pb2.RunStepsRequest) -> ev.FileStepInfo | None:
    """Of a save or a restore. Raises CheckpointError where its lists do not fit together."""
    if request.HasField("save"):
        if len(request.save.parts) != len(request.arguments) or request.outputs:
            raise CheckpointError("a save names each of its arrays, and makes none", where=request.save.directory)
        return ev.FileStepInfo(is_save=True)
    if request.HasField("restore"):
        restore = request.restore
        if len(restore.parts) != len(request.outputs) or request.arguments:
            raise CheckpointError("a restore names and lays out each of its arrays", where=restore.directory)
        layouts = [wire.layout_from_proto(part.layout) for part in restore.parts]
        return ev.FileStepInfo(is_save=False, output_bytes=tuple(layout.size_bytes for layout in layouts))
    return None
