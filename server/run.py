"""Runs one server process from start to end: a master with its node, or a worker."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from shardwright.clusters.cluster import Cluster, join_address
from shardwright.errors import ShardwrightError
from shardwright.proto.v1 import master_pb2, master_pb2_grpc, worker_pb2, worker_pb2_grpc
from shardwright.protocol import wire
from shardwright.server.handlers import AioProtocolInterceptor
from shardwright.server.limits import Limits
from shardwright.server.master.cluster_service import ClusterService
from shardwright.server.master.planning import core_count
from shardwright.server.master.service import MasterService
from shardwright.server.master.shell import Master
from shardwright.server.security import AioTokenInterceptor, Protection
from shardwright.server.signals import Stops, watch_notice
from shardwright.server.worker import state as st
from shardwright.server.worker.daemon import Daemon

#: Health service of a process that answers at all, for liveness probes: a hang is the watchdog's to end, and a cluster
#: that waits for nodes is no reason to start its master again. The others say whether a step would run now.
LIVE_SERVICE = "live"

#: Threads for short work: unpacking, writing plans down.
_THREADS_BESIDE = 8

_log = logging.getLogger("shardwright.server")

#: How a server ends: exit code, and the error to print, if any.
Ending = tuple[int, ShardwrightError | None]


class _StopRequest:
    """Somebody asked this process to stop at once: a signal, or (embedded) the end of stdin."""

    def __init__(self) -> None:
        self.exit_code: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def ask(self, exit_code: int) -> None:
        """The first to ask decides."""
        if not self.exit_code.done():
            self.exit_code.set_result(exit_code)


async def run_worker(
    cluster: Cluster, index: int, limits: Limits, *, wait_s: float, notice: str | None = None
) -> Ending:
    """Serve one node until its master or a signal ends it. notice: see `watch_notice`."""
    address = cluster.master.address
    daemon = Daemon(cluster, index, address, Protection.of(cluster), limits, wait_s)
    Stops(daemon.drain, daemon.ask_to_stop)
    _log.info("node %d, %d devices; dialing the master at %s", index, cluster.nodes[index].device_count, address)
    async with _watching(notice, daemon.drain):
        ending = await daemon.run()
    return ending.code, ending.error


async def run_master(cluster: Cluster, limits: Limits, *, wait_s: float, notice: str | None = None) -> Ending:
    """Serve task 0 until a signal or an error ends it. notice: see `watch_notice`."""
    return await _serve(cluster, limits, wait_s, _StopRequest(), lambda address: None, notice)


async def run_embedded(devices: int, limits: Limits) -> Ending:
    """Serve `devices` CPU devices to the process at the other end of stdin and stdout.

    Prints one line of JSON, `{"address", "token"}`, once it listens; ends with stdin.
    """
    cluster = replace(Cluster.local(devices), token=secrets.token_urlsafe(32))
    stop = _StopRequest()

    def read_stdin() -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            stop.ask(0)

    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), read_stdin)

    def announce(address: str) -> None:
        print(json.dumps({"address": address, "token": cluster.token}), flush=True)

    return await _serve(cluster, limits, 300.0, stop, announce)


@contextlib.asynccontextmanager
async def _watching(notice: str | None, drain: Callable[[str], object]) -> AsyncIterator[None]:
    watcher = None if notice is None else asyncio.ensure_future(watch_notice(notice, drain))
    try:
        yield
    finally:
        if watcher is not None:
            watcher.cancel()


async def _serve(
    cluster: Cluster,
    limits: Limits,
    wait_s: float,
    stop: _StopRequest,
    announce: Callable[[str], None],
    notice: str | None = None,
) -> Ending:
    protection = Protection.of(cluster)
    # Plans and compilations hold a thread each, one a core at most: uploads must not wait behind them.
    threads = ThreadPoolExecutor(2 * core_count() + _THREADS_BESIDE, thread_name_prefix="work")
    asyncio.get_running_loop().set_default_executor(threads)
    master = Master(cluster, limits, wait_s=wait_s)
    Stops(master.drain, stop.ask)
    server = _grpc_server(master, protection)
    node = cluster.master
    address = join_address(node.ip, protection.bind(server, node.ip, node.port))
    await server.start()
    others = [str(worker.index) for worker in cluster.workers if worker.index]
    _log.info("master listening on %s%s", address, f"; waiting for workers {', '.join(others)}" if others else "")
    announce(address)
    master.planners.warm()
    daemon = Daemon(cluster, 0, address, protection, limits, wait_s) if node.device_count else None
    daemon_task = asyncio.ensure_future(daemon.run()) if daemon is not None else None
    clock = asyncio.ensure_future(master.run())
    waits: list[asyncio.Future[Any]] = [stop.exit_code, master.halted, master.drained, clock]
    waits += [daemon_task] if daemon_task is not None else []
    try:
        async with _watching(notice, master.drain):
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        return _ending(stop, master, daemon_task, clock)
    finally:
        clock.cancel()
        await master.close(
            "the master has stopped, as it was asked to" if master.drained.done() else "the master is stopping"
        )
        if daemon is not None and daemon_task is not None:
            daemon.ask_to_stop(0)
            await daemon_task
        await server.stop(grace=2.0)


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


def _grpc_server(master: Master, protection: Protection) -> grpc.aio.Server:
    server = grpc.aio.server(
        interceptors=[AioTokenInterceptor(protection), AioProtocolInterceptor()],
        options=wire.CHANNEL_OPTIONS,
        maximum_concurrent_rpcs=master.limits.max_streams,
    )
    master_pb2_grpc.add_MasterServicer_to_server(MasterService(master), server)  # type: ignore[no-untyped-call]
    worker_pb2_grpc.add_ClusterServicer_to_server(ClusterService(master), server)  # type: ignore[no-untyped-call]
    servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    statuses = health_pb2.HealthCheckResponse
    background: set[asyncio.Future[None]] = set()

    def publish(name: str, is_well: bool) -> None:
        task = asyncio.ensure_future(servicer.set(name, statuses.SERVING if is_well else statuses.NOT_SERVING))
        background.add(task)
        task.add_done_callback(background.discard)

    def publish_ready(is_ready: bool) -> None:
        for name in ("", master_pb2.DESCRIPTOR.services_by_name["Master"].full_name):
            publish(name, is_ready)

    master.on_ready = publish_ready
    publish_ready(False)
    publish(LIVE_SERVICE, True)
    names = [
        service.full_name for pb2 in (master_pb2, worker_pb2) for service in pb2.DESCRIPTOR.services_by_name.values()
    ]
    reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    return server


def run(main: Coroutine[None, None, Ending]) -> int:
    """Run a server to its end and return the exit code; errors are printed as one line each."""
    error: ShardwrightError | None
    try:
        code, error = asyncio.run(main)
    except ShardwrightError as caught:
        code, error = 1, caught
    if error is not None:
        print(one_line(error), file=sys.stderr)
    return code


def one_line(error: ShardwrightError) -> str:
    where = f"{error.where}: " if error.where else ""
    remedy = f" ({error.remedy})" if error.remedy else ""
    return f"shardwright: {where}{error.message}{remedy}".replace("\n", " ")
