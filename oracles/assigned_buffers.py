"""Bytes of a module's buffer assignment, parsed from XLA's `.hlo.pb` dump without protobuf classes.

Field numbers: HloProto and BufferAssignmentProto in xla/service/hlo.proto.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

_ALLOC, _FREE, _SHARE = 0, 1, 2


class AssignedBytes(NamedTuple):
    """Bytes in a device's main memory: arguments, results not aliased to arguments, peak of the live temporaries."""

    arguments_bytes: int
    outputs_bytes: int
    live_bytes: int


def read_assignment(path: Path) -> AssignedBytes:
    """Parse a dumped module. Raises ValueError on a missing or incomplete buffer assignment."""
    try:
        module = _parse_message(path.read_bytes())
        assignment = list(_parse_fields(module[3]))
        traces = [list(_parse_fields(value)) for number, value in assignment if number == 4]
        allocations = [_parse_message(value) for number, value in assignment if number == 3]
        buffers = [_parse_message(value) for number, value in assignment if number == 1]
        sizes = {buffer.get(1, 0): buffer.get(2, 0) for buffer in buffers if not buffer.get(4)}
        live = max(
            _peak_live_bytes((_parse_message(value) for number, value in trace if number == 1), sizes)
            for trace in traces
        )
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(f"{path} has no complete buffer assignment") from error
    main = [allocation for allocation in allocations if not allocation.get(8)]
    arguments = sum(allocation.get(2, 0) for allocation in main if allocation.get(5))
    outputs = sum(allocation.get(2, 0) for allocation in main if allocation.get(7) and not allocation.get(5))
    return AssignedBytes(arguments, outputs, live)


def _peak_live_bytes(events: Iterator[dict[int, Any]], sizes: Mapping[int, int]) -> int:
    """Peak of the bytes allocated at once; buffers that share an allocation count once, until the last is freed.

    sizes: bytes of each buffer in main memory.
    """
    allocation_of: dict[int, int] = {}
    users: dict[int, int] = {}
    live = peak = 0
    for event in events:
        kind, buffer = event.get(1, _ALLOC), event.get(2, 0)
        if kind == _FREE:
            allocation = allocation_of[buffer]
            users[allocation] -= 1
            live -= 0 if users[allocation] else sizes.get(allocation, 0)
            continue
        allocation = allocation_of.get(event.get(5, 0), event.get(5, 0)) if kind == _SHARE else buffer
        allocation_of[buffer] = allocation
        live += 0 if users.get(allocation) else sizes.get(allocation, 0)
        users[allocation] = users.get(allocation, 0) + 1
        peak = max(peak, live)
    return peak


def _parse_message(data: bytes) -> dict[int, Any]:
    """Fields by number; the last value of a repeated field."""
    return dict(_parse_fields(data))


def _parse_fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of each field of a message; a value is an integer, or bytes if length-delimited."""
    position = 0
    while position < len(data):
        key, position = _parse_varint(data, position)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, position = _parse_varint(data, position)
            yield number, value
            continue
        length, position = _parse_varint(data, position) if kind == 2 else ({1: 8, 5: 4}[kind], position)
        if position + length > len(data):
            raise IndexError(position)
        yield number, data[position : position + length]
        position += length


def _parse_varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, position
