"""The master's gRPC service for its workers: messages of daemons and executors become events."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from shardwright.errors import ShardwrightError
from shardwright.proto.v1 import worker_pb2, worker_pb2_grpc
from shardwright.protocol import wire
from shardwright.server.master import events as ev
from shardwright.server.master.shell import Master, OutgoingStream

Context = Any  # grpc.aio.ServicerContext: generic in ways that its stubs do not agree on


class ClusterService(worker_pb2_grpc.ClusterServicer):
    """Streams of daemons and executors."""

    def __init__(self, master: Master) -> None:
        self._master = master

    async def Supervise(self, requests: AsyncIterator[worker_pb2.SupervisorEvent], context: Context) -> None:
        await self._stream(requests, context, self._handle_daemon_event, _to_refusal, ev.DaemonLeft)

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
                    )
                )
            case "heartbeat":
                self._master.handle_event(ev.DaemonHeard(connection=number))
            case "draining":
                asked = event.draining
                self._master.handle_event(
                    ev.DrainRequested(connection=number, reason=asked.reason, limit_s=asked.limit_s)
                )
            case "exited":
                exited = event.exited
                self._master.handle_event(
                    ev.ExecutorExited(
                        connection=number,
                        generation=exited.generation,
                        exit_code=exited.exit_code,
                        last_lines=exited.last_lines,
                        coordinator_address=exited.coordinator_address,
                    )
                )

    async def Execute(self, requests: AsyncIterator[worker_pb2.ExecutorEvent], context: Context) -> None:
        await self._stream(requests, context, self._handle_executor_event, _to_shutdown, ev.ExecutorLeft)

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
                arrays = tuple(
                    ev.UploadedArray(
                        array_id=array.array_id,
                        size_bytes=array.logical_bytes,
                        devices=range(array.first_device, array.first_device + array.device_count),
                    )
                    for array in arrived.arrays
                )
                self._master.handle_event(
                    ev.ArraysUploaded(connection=number, session_id=arrived.session_id, arrays=arrays)
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
                    )
                )
            case "heartbeat":
                heard = event.heartbeat
                self._master.handle_event(
                    ev.ExecutorHeard(
                        connection=number, sequence=heard.sequence, doing=heard.doing, transfers=heard.transfers
                    )
                )

    async def _stream(
        self,
        requests: AsyncIterator[Any],
        context: Context,
        say: Callable[[int, Any], None],
        ended: Callable[[ShardwrightError], Any],
        left: type[ev.DaemonLeft | ev.ExecutorLeft],
    ) -> None:
        """Send commands to the end; meanwhile messages of the other side are handed on.

        ended: the last command, if an error ends the stream. left: the event at its end, either way.
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
            self._master.handle_event(left(connection=number))

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


def _to_refusal(error: ShardwrightError) -> worker_pb2.SupervisorCommand:
    return worker_pb2.SupervisorCommand(refused=worker_pb2.Refused(error=wire.error_to_proto(error)))


def _to_shutdown(error: ShardwrightError) -> worker_pb2.ExecutorCommand:
    return worker_pb2.ExecutorCommand(shutdown=worker_pb2.Shutdown(reason=error.message))
