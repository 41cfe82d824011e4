"""Lines of logs on the wire."""

from __future__ import annotations

from collections.abc import Iterable

from shardwright.log_lines import LEVELS, LogLine
from shardwright.proto.v1 import operators_pb2


def to_proto(line: LogLine) -> operators_pb2.LogLine:
    return operators_pb2.LogLine(
        time_s=line.time_s,
        level=line.level,
        process=line.process,
        node=line.node or 0,
        pid=line.pid,
        session=line.session,
        step=line.step,
        plan=line.plan,
        call=line.call,
        message=line.message,
        traceback=line.traceback,
        output=line.output,
    )


def from_proto(message: operators_pb2.LogLine) -> LogLine:
    """A level that is none of ours counts as "info"."""
    return LogLine(
        time_s=message.time_s,
        level=message.level if message.level in LEVELS else "info",
        process=message.process,
        node=message.node,
        pid=message.pid,
        session=message.session,
        step=message.step,
        plan=message.plan,
        call=message.call,
        message=message.message,
        traceback=message.traceback,
        output=message.output,
    )


def all_from_proto(messages: Iterable[operators_pb2.LogLine], node: int) -> list[LogLine]:
    """Lines that the daemon of this node sent."""
    lines = []
    for message in messages:
        message.node = node
        lines.append(from_proto(message))
    return lines
