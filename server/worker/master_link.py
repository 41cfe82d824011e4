"""An executor's stream to its master: its lease is the executor's longest wait for a restarted one."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

import grpc

from shardwright.errors import ServerUnavailableError, WorkerLostError
from shardwright.proto.v1 import worker_pb2, worker_pb2_grpc
from shardwright.server.runtime.command_log import CommandLog
from shardwright.server.security import Protection
from shardwright.server.tuning import LINK_RETRY_S

Outbox = queue.SimpleQueue[worker_pb2.ExecutorEvent | None]


class MasterLink:
    """`put` may be called by any thread, before `run` as well. lease_s: 0: the executor ends with its master."""

    def __init__(self, address: str, protection: Protection, log: CommandLog, *, lease_s: float) -> None:
        self._address = address
        self._protection = protection
        self._log = log
        self._lease_s = lease_s
        self._lock = threading.Lock()
        self._outbox: Outbox = queue.SimpleQueue()

    def put(self, event: worker_pb2.ExecutorEvent) -> None:
        """Tell the master. Without one the event gets lost: the report to the next master has it."""
        if event.HasField("done"):
            self._log.finish(event.done)
        with self._lock:
            self._outbox.put(event)

    def run(self, hello: worker_pb2.ExecutorHello, handle: Callable[[worker_pb2.ExecutorCommand], None]) -> None:
        """Take commands until the master, or the lease, ends. Raises WorkerLostError, grpc.RpcError."""
        until_s = None
        while True:
            with self._lock:
                self._outbox.put(None)  # ends the iterator of the stream before
                outbox = self._outbox = queue.SimpleQueue()
                hello.received = self._log.received
                outbox.put(worker_pb2.ExecutorEvent(hello=hello))
            try:
                self._protection.check_listener(self._address)
                with self._protection.channel(self._address) as channel:
                    stub = worker_pb2_grpc.ClusterStub(channel)  # type: ignore[no-untyped-call]
                    for command in stub.Execute(iter(outbox.get, None), metadata=self._protection.metadata):
                        until_s = None
                        self._take(command, handle)
            except grpc.RpcError as error:
                if not self._lease_s or error.code() is grpc.StatusCode.UNAUTHENTICATED:
                    raise
            except ServerUnavailableError:  # another user's server, where ours was
                if not self._lease_s:
                    raise
            if not self._lease_s:
                return
            until_s = until_s or time.monotonic() + self._lease_s
            if time.monotonic() > until_s:
                raise WorkerLostError(f"there was no master for {self._lease_s:g} s")
            time.sleep(LINK_RETRY_S)

    def _take(self, command: worker_pb2.ExecutorCommand, handle: Callable[[worker_pb2.ExecutorCommand], None]) -> None:
        kind = command.WhichOneof("kind")
        if kind == "shutdown":
            raise WorkerLostError(command.shutdown.reason)
        if kind == "send_recent":
            self.put(worker_pb2.ExecutorEvent(recent=self._log.recent(command.send_recent.after)))
            return
        self._log.take(command)
        if kind != "skip":
            handle(command)
