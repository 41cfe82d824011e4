"""What a daemon tells the master unasked: signs of life, with figures of its machine, and lines of its log."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterator

import psutil

from shardwright.proto.v1 import operators_pb2, worker_pb2
from shardwright.protocol import log_messages
from shardwright.server.logs import LogWriter
from shardwright.server.tuning import HEARTBEAT_S, MOST_LINES_REPORTED
from shardwright.server.worker.host_memory import host_memory
from shardwright.server.worker.snapshot_service import SnapshotServer

_log = logging.getLogger("shardwright.server")


class Reports:
    """log: of a daemon whose process is not the master's; its lines, and those of its executor, are reported."""

    def __init__(self, snapshots: SnapshotServer, log: LogWriter | None) -> None:
        self._snapshots = snapshots
        self._log = log
        self._origin = secrets.token_hex(8)
        self._process = psutil.Process()
        self._sent_line = 0
        self._heartbeat_s = 0.0

    def begin(self) -> None:
        """The connection is another one, perhaps to another master: all lines are sent again."""
        self._sent_line, self._heartbeat_s = 0, time.monotonic()

    def due(self) -> Iterator[worker_pb2.SupervisorEvent]:
        """What there is to say now."""
        now_s = time.monotonic()
        if now_s - self._heartbeat_s >= HEARTBEAT_S:
            self._heartbeat_s = now_s
            heartbeat = worker_pb2.Heartbeat()
            try:
                heartbeat.figures.CopyFrom(self._figures())
            except (psutil.Error, OSError) as error:  # that the daemon lives counts more
                _log.debug("no figures of this machine: %s", error)
            yield worker_pb2.SupervisorEvent(heartbeat=heartbeat)
        lines = self._new_lines()
        if lines is not None:
            yield worker_pb2.SupervisorEvent(logs=lines)

    def _new_lines(self) -> operators_pb2.LogLines | None:
        if self._log is None:
            return None
        first, lines = self._log.recent.after(self._sent_line, MOST_LINES_REPORTED)
        if not lines:
            return None
        self._sent_line = first + len(lines) - 1
        messages = [log_messages.to_proto(line) for line in lines]
        return operators_pb2.LogLines(origin=self._origin, first_number=first, lines=messages)

    def _figures(self) -> operators_pb2.HostFigures:
        store = self._snapshots.store
        total, available = host_memory()
        return operators_pb2.HostFigures(
            memory_bytes=total,
            available_bytes=available,
            resident_bytes=self._process.memory_info().rss,
            snapshot_bytes=store.held_bytes,
            snapshot_limit_bytes=store.limit_bytes,
            dropped_lines=self._log.dropped if self._log is not None else 0,
        )
