"""What a compiler's buffer assignment takes, read from the `.hlo.pb` that XLA dumps: no message classes are needed.

Fields are those of HloProto and BufferAssignmentProto in xla/service/hlo.proto.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

_ALLOC, _FREE, _SHARE = 0, 1, 2


class Assigned(NamedTuple):
    """Bytes of a device's main memory: arguments, results that are not written over them, and of temporaries the most
    that is live at once."""

    arguments_bytes: int
    outputs_bytes: int
    live_bytes: int


def read_assignment(path: Path) -> Assigned:
    """The figures of a dumped module. Raises ValueError where the file has no (complete) buffer assignment."""
    try:
        module = _message(path.read_bytes())
        assignment = list(_fields(module[3]))
        traces = [list(_fields(value)) for number, value in assignment if number == 4]
        allocations = [_message(value) for number, value in assignment if number == 3]
        buffers = [_message(value) for number, value in assignment if number == 1]
        sizes = {each.get(1, 0): each.get(2, 0) for each in buffers if not each.get(4)}
        live = max(_most_live((_message(value) for number, value in trace if number == 1), sizes) for trace in traces)
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(f"{path} has no complete buffer assignment") from error
    main = [each for each in allocations if not each.get(8)]
    arguments = sum(each.get(2, 0) for each in main if each.get(5))
    outputs = sum(each.get(2, 0) for each in main if each.get(7) and not each.get(5))
    return Assigned(arguments, outputs, live)


def _most_live(events: Iterator[dict[int, Any]], sizes: Mapping[int, int]) -> int:
    """The most bytes allocated at once; buffers that share one are counted once, until the last of them is freed.

    sizes: of the buffers in main memory; others take none of it.
    """
    lies_in: dict[int, int] = {}
    users: dict[int, int] = {}
    live = most = 0
    for event in events:
        kind, buffer = event.get(1, _ALLOC), event.get(2, 0)
        if kind == _FREE:
            place = lies_in[buffer]
            users[place] -= 1
            live -= 0 if users[place] else sizes.get(place, 0)
            continue
        place = lies_in.get(event.get(5, 0), event.get(5, 0)) if kind == _SHARE else buffer
        lies_in[buffer] = place
        live += 0 if users.get(place) else sizes.get(place, 0)
        users[place] = users.get(place, 0) + 1
        most = max(most, live)
    return most


def _message(data: bytes) -> dict[int, Any]:
    """Fields by number; of repeated ones the last."""
    return dict(_fields(data))


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of each field of a message: numbers, or bytes of what has a length."""
    place = 0
    while place < len(data):
        key, place = _number(data, place)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, place = _number(data, place)
            yield number, value
            continue
        length, place = _number(data, place) if kind == 2 else ({1: 8, 5: 4}[kind], place)
        if place + length > len(data):
            raise IndexError(place)
        yield number, data[place : place + length]
        place += length


def _number(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        place += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, place
