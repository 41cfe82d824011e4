"""Runs one server process from start to end: a master with its node."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc.aio
from grpc_health.v1 import health as grpc_health
from grpc_reflection.v1alpha import reflection

from shardwright.clusters.cluster import Cluster, join_address
from shardwright.errors import ServerUnavailableError
from shardwright.proto.v1 import (
    master_pb2,
    master_pb2_grpc,
    operators_pb2,
    operators_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from shardwright.protocol import wire
from shardwright.server.access import Access, AioAccessInterceptor, AioSessionInterceptor
from shardwright.server.handlers import AioProtocolInterceptor
from shardwright.server.health import Health
from shardwright.server.limits import Limits
from shardwright.server.logs import LogWriter
from shardwright.server.master.cluster_service import ClusterService
from shardwright.server.master.cluster_watch import ClusterSource, watch_cluster
from shardwright.server.master.ledger import Contents
from shardwright.server.master.operator_service import OperatorService
from shardwright.server.master.planning import core_count
from shardwright.server.master.service import MasterService
from shardwright.server.master.shell import Master
from shardwright.server.master.store import StateStore
from shardwright.server.metrics import MetricsEndpoint
from shardwright.server.options import NO_PORTS, Ports
from shardwright.server.own_node import OwnNode
from shardwright.server.run_node import Ending, watching
from shardwright.server.security import Protection
from shardwright.server.signals import Stops
from shardwright.server.tuning import CALLS_END_S, NODE_END_S, THREADS_BESIDE
from shardwright.server.worker import state as st
from shardwright.server.worker.daemon import Daemon

_log = logging.getLogger("shardwright.server")


class _StopRequest:
    """Somebody asked this process to stop at once: a signal, or (embedded) the end of stdin."""

    def __init__(self) -> None:
        self.exit_code: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def ask(self, exit_code: int) -> None:
        """The first to ask decides."""
        if not self.exit_code.done():
            self.exit_code.set_result(exit_code)


@dataclass(frozen=True, slots=True)
class KeptState:
    """Of a master that may be started again. directory: its state's; node_command: starts `run_own_node`."""

    directory: Path
    node_command: Sequence[str]


async def run_master(
    cluster: Cluster,
    limits: Limits,
    *,
    wait_s: float,
    notice: str | None = None,
    log: LogWriter | None = None,
    ports: Ports = NO_PORTS,
    source: ClusterSource | None = None,
    kept_state: KeptState | None = None,
) -> Ending:
    """Serve task 0 until a signal or an error ends it. notice: see `watch_notice`. log: this process'.

    source: where an elastic cluster's description is read again. kept_state: where its state outlives it.
    """
    if kept_state is None:
        master = Master(cluster, limits, wait_s=wait_s, log=log)
        return await _serve(master, wait_s, _StopRequest(), lambda address: None, notice, ports, source)
    store = StateStore(kept_state.directory, cluster.content_hash)
    try:
        master = Master(cluster, limits, wait_s=wait_s, log=log, store=store)
        state = master.state
        contents = await asyncio.to_thread(Contents, store.loaded, state.team, state.formation.nodes_of)
        master.take_over(store.loaded, contents)
        own_node = OwnNode(kept_state.node_command, store.directory)
        return await _serve(master, wait_s, _StopRequest(), lambda address: None, notice, ports, source, own_node)
    finally:
        store.close()


async def run_embedded(
    devices: int,
    limits: Limits,
    dataset_modules: tuple[str, ...] = (),
    *,
    log: LogWriter | None = None,
    ports: Ports = NO_PORTS,
) -> Ending:
    """Serve `devices` CPU devices to the process at the other end of stdin and stdout.

    Prints one line of JSON, `{"address", "token"}`, once it listens; ends with stdin.
    """
    cluster = replace(Cluster.local(devices), token=secrets.token_urlsafe(32), dataset_modules=dataset_modules)
    limits = replace(limits, person_sessions=limits.person_sessions or limits.sessions)  # its client's alone
    stop = _StopRequest()

    def read_stdin() -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            stop.ask(0)

    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), read_stdin)

    def announce(address: str) -> None:
        print(json.dumps({"address": address, "token": cluster.token}), flush=True)

    master = Master(cluster, limits, wait_s=300.0, log=log)
    return await _serve(master, 300.0, stop, announce, ports=ports)


async def _serve(
    master: Master,
    wait_s: float,
    stop: _StopRequest,
    announce: Callable[[str], None],
    notice: str | None = None,
    ports: Ports = NO_PORTS,
    source: ClusterSource | None = None,
    own_node: OwnNode | None = None,
) -> Ending:
    cluster, limits = master.cluster, master.limits
    protection = Protection.of(cluster)
    # Plans and compilations hold a thread each, one a core at most: uploads must not wait behind them.
    threads = ThreadPoolExecutor(2 * core_count() + THREADS_BESIDE, thread_name_prefix="work")
    asyncio.get_running_loop().set_default_executor(threads)
    Stops(master.drain, stop.ask)
    health = Health(master_pb2.DESCRIPTOR.services_by_name["Master"].full_name)
    master.on_ready = health.publish_ready
    server = _grpc_server(master, protection, health)
    node = cluster.master
    address = join_address(node.ip, protection.bind(server, node.ip, node.port))
    endpoint = None if ports.metrics is None else MetricsEndpoint(master, ports.metrics)
    await health.serve(ports.health)
    await server.start()
    others = [str(worker.index) for worker in cluster.workers if worker.index]
    _log.info("master listening on %s%s", address, f"; waiting for workers {', '.join(others)}" if others else "")
    announce(address)
    daemon = Daemon(cluster, 0, address, protection, limits, wait_s) if node.device_count and not own_node else None
    daemon_task = asyncio.ensure_future(daemon.run()) if daemon is not None else None
    node_task = asyncio.ensure_future(own_node.run()) if own_node is not None and node.device_count else None
    clock = asyncio.ensure_future(master.run())
    watch = None
    if source is not None:
        master.description_every_s = source.every_s
        watch = asyncio.ensure_future(watch_cluster(source, cluster, master.change_cluster))
    waits: list[asyncio.Future[Any]] = [stop.exit_code, master.halted, master.drained, clock]
    waits += [task for task in (daemon_task, node_task) if task is not None]
    try:
        async with watching(notice, master.drain):
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if own_node is not None and node_task is not None and node_task.done():
            return node_task.result(), ServerUnavailableError(
                "the daemon of this node does not run", where=str(own_node.log_path), remedy="its last lines say why"
            )
        return _ending(stop, master, daemon_task, clock)
    finally:
        clock.cancel()
        for task in (watch, node_task):
            if task is not None:
                task.cancel()
        await master.close(
            "the master has stopped, as it was asked to" if master.drained.done() else "the master is stopping"
        )
        if daemon is not None and daemon_task is not None:
            daemon.ask_to_stop(0)
            await daemon_task
        if own_node is not None and node_task is not None:
            await own_node.wait_for_end(NODE_END_S)
        await server.stop(grace=CALLS_END_S)
        await health.close()
        if endpoint is not None:
            endpoint.close()


def _ending(
    stop: _StopRequest, master: Master, daemon: asyncio.Future[st.Exit] | None, clock: asyncio.Future[None]
) -> Ending:
    if stop.exit_code.done():
        return stop.exit_code.result(), None
    if master.drained.done():
        return 0, None
    if master.halted.done():
        halt = master.halted.result()
        return 1 if halt.is_final else st.EXIT_TRY_AGAIN, halt.error
    if daemon is not None and daemon.done():
        ending = daemon.result()
        return ending.code, ending.error
    clock.result()  # raises what went wrong: a defect
    return 1, None


def _grpc_server(master: Master, protection: Protection, health: Health) -> grpc.aio.Server:
    access = Access(protection)
    server = grpc.aio.server(
        interceptors=[AioAccessInterceptor(access), AioProtocolInterceptor(), AioSessionInterceptor()],
        options=wire.CHANNEL_OPTIONS,
        maximum_concurrent_rpcs=master.limits.max_streams,
    )
    master_pb2_grpc.add_MasterServicer_to_server(MasterService(master, access), server)  # type: ignore[no-untyped-call]
    worker_pb2_grpc.add_ClusterServicer_to_server(ClusterService(master), server)  # type: ignore[no-untyped-call]
    operators_pb2_grpc.add_OperatorsServicer_to_server(OperatorService(master, access), server)  # type: ignore[no-untyped-call]
    health.add_to(server)
    names = [
        service.full_name
        for pb2 in (master_pb2, worker_pb2, operators_pb2)
        for service in pb2.DESCRIPTOR.services_by_name.values()
    ]
    reflection.enable_server_reflection([*names, grpc_health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    return server
