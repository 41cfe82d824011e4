"""Runs the server process of one node beside its master's; nothing of the master is loaded."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path

from shardwright.clusters.cluster import Cluster
from shardwright.errors import ShardwrightError
from shardwright.server.health import Health
from shardwright.server.limits import Limits
from shardwright.server.logs import LogWriter
from shardwright.server.options import NO_PORTS, Ports
from shardwright.server.own_node import NodeLock
from shardwright.server.security import Protection
from shardwright.server.signals import Stops, watch_notice
from shardwright.server.worker.daemon import Daemon

_log = logging.getLogger("shardwright.server")

#: How a server ends: exit code, and the error to print, if any.
Ending = tuple[int, ShardwrightError | None]


async def run_worker(
    cluster: Cluster,
    index: int,
    limits: Limits,
    *,
    wait_s: float,
    notice: str | None = None,
    log: LogWriter | None = None,
    ports: Ports = NO_PORTS,
) -> Ending:
    """Serve one node until its master or a signal ends it. notice: see `watch_notice`."""
    address = cluster.master.address
    daemon = Daemon(cluster, index, address, Protection.of(cluster), limits, wait_s, log)
    Stops(daemon.drain, daemon.ask_to_stop)
    _log.info("node %d, %d devices; dialing the master at %s", index, cluster.nodes[index].device_count, address)
    health = Health()
    daemon.on_ready = health.publish_ready
    await health.serve(ports.health)
    async with watching(notice, daemon.drain):
        ending = await daemon.run()
    await health.close()
    return ending.code, ending.error


async def run_own_node(cluster: Cluster, limits: Limits, directory: str, *, log: LogWriter | None = None) -> Ending:
    """Serve the node of a master that has a state directory, until the master is away for longer than the grace."""
    lock = NodeLock(Path(directory))
    try:
        daemon = Daemon(cluster, 0, cluster.master.address, Protection.of(cluster), limits, limits.grace_s, log)
        Stops(daemon.drain, daemon.ask_to_stop)
        ending = await daemon.run()
        return ending.code, ending.error
    finally:
        del lock


@contextlib.asynccontextmanager
async def watching(notice: str | None, drain: Callable[[str], object]) -> AsyncIterator[None]:
    watcher = None if notice is None else asyncio.ensure_future(watch_notice(notice, drain))
    try:
        yield
    finally:
        if watcher is not None:
            watcher.cancel()


def run_to_end(main: Coroutine[None, None, Ending]) -> int:
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
