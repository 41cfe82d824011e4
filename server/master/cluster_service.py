"""The master's gRPC service for its workers: messages of daemons and executors become events."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from shardwright.errors import ShardwrightError
from shardwright.proto.v1 import worker_pb2, worker_pb2_grpc
from shardwright.protocol import log_messages, wire
from shardwright.server.black_box import Work
from shardwright.server.master import events as ev
from shardwright.server.master import recovered
from shardwright.server.master.outlets import OutgoingStream
from shardwright.server.master.shell import Master
from shardwright.server.tuning import NEW_NODE_POLL_S

Context = Any  # grpc.aio.ServicerContext: generic in ways that its stubs do not agree on


class ClusterService(worker_pb2_grpc.ClusterServicer):
    """Streams of daemons and executors."""

    def __init__(self, master: Master) -> None:
        self._master = master

    async def Supervise(self, requests: AsyncIterator[worker_pb2.SupervisorEvent], context: Context) -> None:
        messages = self._await_descriptions(requests)
        await self._stream(messages, context, self._handle_daemon_event, _to_refusal, self._lose_daemon)

    async def _await_descriptions(
        self, requests: AsyncIterator[worker_pb2.SupervisorEvent]
    ) -> AsyncIterator[worker_pb2.SupervisorEvent]:
        """A daemon's messages. That of a new node may come before the description that has it was read."""
        async for request in requests:
            until_s = time.monotonic() + 2 * self._master.description_every_s
            while (
                request.HasField("hello")
                and request.hello.node_index not in self._master.state.formation.nodes
                and time.monotonic() < until_s
            ):
                await asyncio.sleep(NEW_NODE_POLL_S)
            yield request

    def _handle_daemon_event(self, number: int, event: worker_pb2.SupervisorEvent) -> None:
        match event.WhichOneof("kind"):
            case "hello":
                hello = event.hello
                self._master.handle_event(
                    ev.DaemonJoined(
                        connection=number,
                        node=hello.node_index,
                        cluster_hash=hello.cluster_hash,
                        shardwright_version=hello.shardwright_version,
                        jax_version=hello.jax_version,
                        coordinator_address=hello.coordinator_address,
                        executor_generation=hello.executor_generation,
                        snapshot_address=hello.snapshot_address,
                        snapshot_key=hello.snapshot_key,
                    )
                )
            case "heartbeat":
                self._master.handle_event(ev.DaemonHeard(connection=number))
                if (node := self._node_of_daemon(number)) is not None and event.heartbeat.HasField("figures"):
                    self._master.figures.of(node).host = event.heartbeat.figures
            case "logs":
                if (node := self._node_of_daemon(number)) is not None:
                    logs = event.logs
                    lines = log_messages.all_from_proto(logs.lines, node)
                    self._master.logs.add(node, logs.origin, logs.first_number, lines)
            case "draining":
                asked = event.draining
                self._master.handle_event(
                    ev.DrainRequested(connection=number, reason=asked.reason, limit_s=asked.limit_s)
                )
            case "exited":
                exited = event.exited
                if (node := self._node_of_daemon(number)) is not None:
                    self._master.state.statistics.executor_exits[node] += 1
                self._master.handle_event(
                    ev.ExecutorExited(
                        connection=number,
                        generation=exited.generation,
                        exit_code=exited.exit_code,
                        last_lines=exited.last_lines,
                        coordinator_address=exited.coordinator_address,
                        works=tuple(
                            Work(work.sequence, work.session_id, work.key, work.function, work.batch)
                            for work in exited.works
                        ),
                        was_killed=exited.was_killed,
                    )
                )

    def _node_of_daemon(self, number: int) -> int | None:
        """The node whose daemon has this connection."""
        nodes = self._master.state.formation.nodes.items()
        return next((node for node, record in nodes if record.daemon == number), None)

    async def Execute(self, requests: AsyncIterator[worker_pb2.ExecutorEvent], context: Context) -> None:
        await self._stream(requests, context, self._handle_executor_event, _to_shutdown, self._lose_executor)

    def _lose_daemon(self, number: int) -> None:
        self._master.handle_event(ev.DaemonLeft(connection=number))

    def _lose_executor(self, number: int) -> None:
        if not self._master.is_closing:
            self._master.handle_event(ev.ExecutorLeft(connection=number))

    def _handle_executor_event(self, number: int, event: worker_pb2.ExecutorEvent) -> None:
        match event.WhichOneof("kind"):
            case "done":
                done = event.done
                error = wire.error_from_proto(done.error) if done.HasField("error") else None
                for trace in done.traces:
                    trace.node = self._master.state.formation.connections.get(number, 0)
                self._master.handle_event(
                    ev.CommandDone(
                        connection=number,
                        sequence=done.sequence,
                        error=error,
                        values=tuple(done.values),
                        run_s=done.run_s,
                        written_bytes=done.written_bytes,
                        traces=tuple(done.traces),
                        not_finite=tuple(done.not_finite),
                    )
                )
            case "arrived":
                arrived = event.arrived
                arrays = tuple(map(_uploaded_array, arrived.arrays))
                self._master.handle_event(
                    ev.ArraysUploaded(connection=number, session_id=arrived.session_id, arrays=arrays)
                )
            case "recent":
                commands = tuple(map(_logged_command, event.recent.commands))
                self._master.handle_event(ev.RecentReceived(connection=number, commands=commands))
            case "report":
                node = self._master.state.formation.connections.get(number, 0)
                sessions = tuple(_session_report(session, node) for session in event.report.sessions)
                self._master.handle_event(
                    ev.ReportReceived(connection=number, sequence=event.report.sequence, sessions=sessions)
                )
            case "hello":
                hello = event.hello
                self._master.handle_event(
                    ev.ExecutorJoined(
                        connection=number,
                        node=hello.node_index,
                        generation=hello.generation,
                        data_address=hello.data_address,
                        device_count=hello.device_count,
                        transfer_address=hello.transfer_address,
                        pid=hello.pid,
                        machine_code=hello.machine_code,
                        received=hello.received,
                    )
                )
                if number in self._master.state.formation.connections:  # not refused
                    self._master.figures.executor_is_new(hello.node_index)
            case "heartbeat":
                heard = event.heartbeat
                heard_of = self._master.state.formation.connections.get(number)
                if heard_of is not None and heard.HasField("figures"):
                    self._master.figures.of(heard_of).executor = heard.figures
                self._master.handle_event(
                    ev.ExecutorHeard(
                        connection=number, sequence=heard.sequence, doing=heard.doing, transfers=heard.transfers
                    )
                )
                for session_id in heard.uploading:
                    self._master.handle_event(ev.SessionTouched(session_id=session_id))

    async def _stream(
        self,
        requests: AsyncIterator[Any],
        context: Context,
        say: Callable[[int, Any], None],
        ended: Callable[[ShardwrightError], Any],
        lose: Callable[[int], None],
    ) -> None:
        """Send commands to the end; meanwhile messages of the other side are handed on.

        ended: the last command, if an error ends the stream. lose: called at its end, either way.
        """
        number, outlet = self._master.open_outgoing()
        reader = asyncio.ensure_future(self._read(requests, outlet, functools.partial(say, number)))
        try:
            while (command := await outlet.get()) is not None:
                await context.write(command)
        except ShardwrightError as error:
            await context.write(ended(error))
        finally:
            reader.cancel()
            self._master.close_outgoing(number)
            lose(number)

    @staticmethod
    async def _read(requests: AsyncIterator[Any], outlet: OutgoingStream, say: Callable[[Any], None]) -> None:
        """Hand each message on; the end of them ends the stream."""
        try:
            async for request in requests:
                say(request)
        except grpc.RpcError:
            outlet.end()  # the worker is gone
        except ShardwrightError as error:
            outlet.end(error)
        except Exception as caught:
            outlet.end(wire.to_shardwright_error(caught))
            raise
        else:
            outlet.end()


def _uploaded_array(array: worker_pb2.ArrayArrived) -> ev.UploadedArray:
    return ev.UploadedArray(
        array_id=array.array_id,
        size_bytes=array.logical_bytes,
        devices=range(array.first_device, array.first_device + array.device_count),
    )


def _logged_command(command: worker_pb2.ExecutorCommand) -> ev.LoggedCommand:
    is_load = command.WhichOneof("kind") in ("load", "load_pipeline")
    return ev.LoggedCommand(sequence=command.sequence, is_load=is_load, payload=command)


def _session_report(report: worker_pb2.SessionReport, node: int) -> ev.SessionReport:
    return ev.SessionReport(
        session_id=report.session_id,
        arrays=tuple(map(_uploaded_array, report.arrays)),
        executables=tuple(report.executables),
        steps=tuple(_step_record(record, node) for record in report.steps),
        kept=recovered.from_message(report.kept) if report.HasField("kept") else None,
    )


def _step_record(record: worker_pb2.StepRecord, node: int) -> ev.StepRecord:
    done = record.done
    for trace in done.traces:
        trace.node = node
    return ev.StepRecord(
        number=record.number,
        error=wire.error_from_proto(done.error) if done.HasField("error") else None,
        values=tuple(done.values),
        run_s=done.run_s,
        traces=tuple(done.traces),
        not_finite=tuple(done.not_finite),
        is_save=record.is_save,
        is_snapshot=record.is_snapshot,
        kept=recovered.from_message(record.kept) if record.HasField("kept") else None,
    )


def _to_refusal(error: ShardwrightError) -> worker_pb2.SupervisorCommand:
    return worker_pb2.SupervisorCommand(refused=worker_pb2.Refused(error=wire.error_to_proto(error)))


def _to_shutdown(error: ShardwrightError) -> worker_pb2.ExecutorCommand:
    return worker_pb2.ExecutorCommand(shutdown=worker_pb2.Shutdown(reason=error.message))
