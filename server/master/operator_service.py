"""The master's gRPC service for operators: lines of all logs from one place."""

from __future__ import annotations

import asyncio
from typing import Any

from shardwright.errors import OptionError
from shardwright.log_lines import LEVELS
from shardwright.proto.v1 import operators_pb2, operators_pb2_grpc
from shardwright.protocol import log_messages
from shardwright.server.handlers import abort_aio
from shardwright.server.log_store import LogStore, Query

#: Seconds between two looks for new lines.
_FOLLOW_S = 0.3
#: Lines in one message.
_MOST_LINES = 500


class OperatorService(operators_pb2_grpc.OperatorsServicer):
    def __init__(self, logs: LogStore) -> None:
        self._logs = logs

    async def ReadLogs(self, request: operators_pb2.ReadLogsRequest, context: Any) -> None:
        if request.level and request.level not in LEVELS:
            error = OptionError(f"{request.level!r} is no level", where="level", remedy=f"one of {', '.join(LEVELS)}")
            await abort_aio(context, error)
        query = Query(
            node=request.node if request.HasField("node") else None,
            session=request.session,
            level=request.level or LEVELS[0],
        )
        lines, _ = self._logs.after(0, query)
        seen, has_gap = self._logs.last, False  # lines of long ago are gone always
        lines = lines[-request.tail :] if request.tail else lines
        while True:
            for start in range(0, len(lines), _MOST_LINES):
                messages = [log_messages.to_proto(line) for line in lines[start : start + _MOST_LINES]]
                await context.write(operators_pb2.ReadLogsReply(lines=messages, has_gap=has_gap))
                has_gap = False
            if not request.follow:
                return
            await asyncio.sleep(_FOLLOW_S)
            lines, is_late = self._logs.after(seen, query)
            seen, has_gap = self._logs.last, has_gap or is_late
