"""gRPC health of a server process, for probes: at the master's own port, and at a plain one where that is asked for.

| service             | SERVING while                                                                            |
|---------------------|------------------------------------------------------------------------------------------|
| `live`              | the process answers: a hang of the cluster is the watchdog's to end                      |
| ``, and the master's| the master would run a step now: no node is missing, no hang, no drain                   |
| ``, of a worker     | its daemon is with the master, its executor runs, and it does not drain                  |

Probes of Kubernetes speak no TLS, and a worker has no gRPC port that they could know: `--health-port` is for them.
"""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from shardwright.errors import ServerUnavailableError
from shardwright.server.security import Protection

#: The service for liveness.
LIVE_SERVICE = "live"

_STATUSES = health_pb2.HealthCheckResponse


class Health:
    """names: of the services that `publish_ready` speaks of. Use it on the event loop."""

    def __init__(self, *names: str) -> None:
        self._names = ("", *names)
        self._servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._tasks: set[asyncio.Future[None]] = set()
        self._plain: grpc.aio.Server | None = None
        self._publish(LIVE_SERVICE, True)
        self.publish_ready(False)

    def add_to(self, server: grpc.aio.Server) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    def publish_ready(self, is_ready: bool) -> None:
        for name in self._names:
            self._publish(name, is_ready)

    async def serve(self, address: str | None) -> None:
        """Answer at host:port too, without TLS. Raises ServerUnavailableError where that cannot be opened."""
        if address is None:
            return
        at = urlsplit(f"//{address}")
        self._plain = grpc.aio.server()
        self.add_to(self._plain)
        try:
            Protection().bind(self._plain, at.hostname or "127.0.0.1", at.port or 0)
        except ServerUnavailableError as error:
            raise ServerUnavailableError(
                error.message, where="--health-port", remedy="give another port, or an address of this machine"
            ) from None
        await self._plain.start()

    async def close(self) -> None:
        if self._plain is not None:
            await self._plain.stop(grace=None)

    def _publish(self, name: str, is_well: bool) -> None:
        task = asyncio.ensure_future(self._servicer.set(name, _STATUSES.SERVING if is_well else _STATUSES.NOT_SERVING))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
