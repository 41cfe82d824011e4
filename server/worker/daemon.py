"""A worker's daemon: the gRPC and process shell around `DaemonState`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from typing import Any

import grpc
import grpc.aio

from shardwright.clusters.cluster import Cluster, join_address
from shardwright.errors import ServerUnavailableError, ShardwrightError
from shardwright.log_lines import about
from shardwright.proto.v1 import worker_pb2, worker_pb2_grpc
from shardwright.protocol import wire
from shardwright.server.limits import Limits
from shardwright.server.logs import LogWriter
from shardwright.server.security import Protection, free_port
from shardwright.server.tuning import CONNECT_S, LET_GO_S, REPORT_S
from shardwright.server.versions import jax_version, shardwright_version
from shardwright.server.worker import state as st
from shardwright.server.worker.child import ExecutorChild, executor_environment
from shardwright.server.worker.host_memory import host_memory
from shardwright.server.worker.reports import Reports
from shardwright.server.worker.snapshot_service import SnapshotServer
from shardwright.server.worker.snapshot_store import half_of_memory

_log = logging.getLogger("shardwright.server")


async def _await_connection(channel: grpc.aio.Channel) -> None:
    """Wait for a connection; TimeoutError after the first failed attempt."""
    state = channel.get_state(try_to_connect=True)
    while state is not grpc.ChannelConnectivity.READY:
        if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            raise TimeoutError
        await channel.wait_for_state_change(state)
        state = channel.get_state()


class Daemon:
    """Runs one node until it is told to end; `run` returns how.

    Keeps the Supervise stream to the master open, starts and ends the executor.
    """

    def __init__(
        self,
        cluster: Cluster,
        index: int,
        master_address: str,
        protection: Protection,
        limits: Limits,
        wait_s: float,
        log: LogWriter | None = None,
    ) -> None:
        self._cluster = cluster
        self._node = cluster.nodes[index]
        self._protection = protection
        self._limits = limits
        self._state = st.DaemonState(master_address=master_address, wait_s=wait_s)
        self._outbox: asyncio.Queue[worker_pb2.SupervisorEvent] = asyncio.Queue()
        self._child: ExecutorChild | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._exit: asyncio.Future[st.Exit] = asyncio.get_running_loop().create_future()
        snapshot_bytes = limits.snapshot_bytes or half_of_memory()
        self._snapshots = SnapshotServer(self._node.ip, protection, limit_bytes=snapshot_bytes)
        self.on_ready: Callable[[bool], None] = lambda is_ready: None
        self._was_ready = False
        self._reports = Reports(self._snapshots, log)

    async def run(self) -> st.Exit:
        """Dial, serve, and return what the process is to exit with; its executor is gone by then."""
        with about(process="daemon", node=self._node.index):
            self._carry_out([st.Dial(delay_s=0.0)])
            try:
                return await asyncio.shield(self._exit)
            finally:
                for task in list(self._tasks):
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)
                self._snapshots.close()

    def ask_to_stop(self, exit_code: int) -> None:
        self._handle_event(st.ExitRequested(exit_code=exit_code))

    def drain(self, reason: str) -> None:
        """End, with exit code 0, once the master has let what runs end."""
        self._handle_event(st.DrainRequested(reason=reason))

    # ---- events in, commands out -------------------------------------------
    def _handle_event(self, event: st.Event) -> None:
        self._carry_out(self._state.handle(event, asyncio.get_running_loop().time()))
        if self._state.is_ready != self._was_ready:
            self._was_ready = self._state.is_ready
            self.on_ready(self._was_ready)

    def _carry_out(self, commands: list[st.Command]) -> None:
        for command in commands:
            match command:
                case st.Dial(delay_s=delay_s):
                    self._spawn_task(self._supervise(delay_s))
                case st.SayHello(generation=generation):
                    self._outbox.put_nowait(worker_pb2.SupervisorEvent(hello=self._hello(generation)))
                case st.Spawn(start=start):
                    self._spawn(start)
                case st.KillExecutor():
                    if self._child is not None:
                        self._child.kill()
                case st.ReportExit(child=child):
                    self._report_exit(child)
                case st.AskToDrain(reason=reason):
                    self._ask_to_drain(reason)
                case st.Log(text=text):
                    _log.log(logging.INFO if self._node.index else logging.DEBUG, "%s", text)
                case st.Exit():
                    if not self._exit.done():
                        self._exit.set_result(command)

    def _spawn_task(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _spawn(self, start: st.StartRequested) -> None:
        self._child = ExecutorChild(start, self._handle_event)
        config = {
            "node": self._node.index,
            "host": self._node.ip,
            "device_count": self._node.device_count,
            "platform": self._cluster.platform,
            "log_level": logging.getLevelName(logging.getLogger("shardwright").getEffectiveLevel()).lower(),
            "master_address": self._state.master_address,
            "read_back_bytes": self._limits.read_back_bytes,
            "put_limit_bytes": self._limits.session_array_bytes,
            "person_bytes": self._limits.person_upload_bytes(host_memory()[0]),
            "transfer_wait_s": self._limits.transfer_wait_s,
            "dataset_modules": self._cluster.dataset_modules,
            "protection": self._protection.to_json(),
            **asdict(start),
        }
        self._spawn_task(self._child.run(executor_environment(self._cluster, self._node), config))

    def _hello(self, generation: int) -> worker_pb2.DaemonHello:
        return worker_pb2.DaemonHello(
            node_index=self._node.index,
            cluster_hash=self._cluster.content_hash,
            shardwright_version=shardwright_version(),
            jax_version=jax_version(),
            coordinator_address=self._coordinator_address(),
            executor_generation=generation,
            snapshot_address=self._snapshots.address,
            snapshot_key=self._snapshots.key,
        )

    def _coordinator_address(self) -> str:
        return join_address(self._node.ip, free_port(self._node.ip))

    def _ask_to_drain(self, reason: str) -> None:
        limit_s = self._limits.drain_s
        _log.warning("node %d ends (%s), once what runs has ended, within %g s", self._node.index, reason, limit_s)
        self._outbox.put_nowait(
            worker_pb2.SupervisorEvent(draining=worker_pb2.Draining(reason=reason, limit_s=limit_s))
        )
        asyncio.get_running_loop().call_later(limit_s + LET_GO_S, self._handle_event, st.DrainExpired())

    def _report_exit(self, child: st.ChildExited) -> None:
        exited = worker_pb2.ExecutorExited(
            generation=child.generation,
            exit_code=child.exit_code,
            last_lines=child.last_lines,
            coordinator_address=self._coordinator_address(),
            works=[worker_pb2.ExecutorWork(**asdict(work)) for work in child.works],
            was_killed=child.was_killed,
        )
        self._outbox.put_nowait(worker_pb2.SupervisorEvent(exited=exited))

    # ---- the stream --------------------------------------------------------
    async def _supervise(self, delay_s: float) -> None:
        """One attempt: open the stream, pass messages until it ends, say why it ended."""
        await asyncio.sleep(delay_s)
        error: ShardwrightError
        try:
            self._protection.check_listener(self._state.master_address)
            async with self._protection.aio_channel(self._state.master_address) as channel:
                await self._converse(channel)
            error = ShardwrightError("the master closed the stream")
        except grpc.RpcError as caught:
            error = wire.error_from_rpc(caught)
        except TimeoutError:
            error = ShardwrightError("the master does not answer")
        except ServerUnavailableError as caught:
            error = caught
        self._handle_event(st.ConnectionLost(error=error))

    async def _converse(self, channel: grpc.aio.Channel) -> None:
        await asyncio.wait_for(_await_connection(channel), CONNECT_S)
        stub = worker_pb2_grpc.ClusterStub(channel)  # type: ignore[no-untyped-call]
        stream = stub.Supervise(metadata=self._protection.metadata)
        while not self._outbox.empty():  # what an older stream left behind
            self._outbox.get_nowait()
        self._handle_event(st.ConnectionOpened())
        self._reports.begin()
        sender = asyncio.ensure_future(self._send(stream))
        try:
            async for command in stream:
                self._handle_command(command)
        finally:
            sender.cancel()

    async def _send(self, stream: Any) -> None:
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            while True:
                with contextlib.suppress(TimeoutError):
                    await stream.write(await asyncio.wait_for(self._outbox.get(), REPORT_S))
                for report in self._reports.due():
                    await stream.write(report)

    def _handle_command(self, command: worker_pb2.SupervisorCommand) -> None:
        match command.WhichOneof("kind"):
            case "start":
                start = command.start
                self._handle_event(
                    st.StartRequested(
                        generation=start.generation,
                        coordinator_address=start.coordinator_address,
                        process_count=start.process_count,
                        process_id=start.process_id,
                        data_port=start.data_port,
                        lease_s=start.lease_s,
                    )
                )
            case "stop":
                self._handle_event(st.StopRequested(generation=command.stop.generation))
            case "retain":
                self._snapshots.retain(command.retain)
            case "refused":
                self._handle_event(st.NodeRefused(error=wire.error_from_proto(command.refused.error)))
            case "shutdown":
                shutdown = command.shutdown
                self._handle_event(st.MasterEnded(reason=shutdown.reason, is_failure=shutdown.is_failure))
