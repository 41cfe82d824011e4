"""Figures of a buffer assignment, read from bytes as XLA dumps them."""

from __future__ import annotations

from pathlib import Path

import pytest

from oracles.assigned_buffers import AssignedBytes, read_assignment

Value = int | bytes


def message(*fields: tuple[int, Value]) -> bytes:
    """A protobuf message of numbers and of what has a length."""
    parts = []
    for number, value in fields:
        if isinstance(value, bytes):
            parts.append(varint(number << 3 | 2) + varint(len(value)) + value)
        else:
            parts.append(varint(number << 3) + varint(value))
    return b"".join(parts)


def varint(value: int) -> bytes:
    low, rest = value & 127, value >> 7
    return bytes([low | 128]) + varint(rest) if rest else bytes([low])


def buffer(number: int, size: int, *more: tuple[int, int]) -> tuple[int, bytes]:
    return 1, message((1, number), (2, size), *more)


def allocation(number: int, size: int, *more: tuple[int, int]) -> tuple[int, bytes]:
    return 3, message((1, number), (2, size), *more)


ALLOC, FREE, SHARE = 0, 1, 2


def trace(*events: tuple[int, ...]) -> tuple[int, bytes]:
    """events: kind, buffer and, of what shares another's place, that one."""
    written = [(1, message((1, kind), (2, one), *((5, other) for other in shared))) for kind, one, *shared in events]
    return 4, message(*written)


ASSIGNMENT = message(
    buffer(1, 300),
    buffer(2, 500),
    buffer(3, 300),
    buffer(4, 400),
    buffer(5, 9000, (4, 1)),  # on the chip
    allocation(0, 1000, (5, 1)),  # an argument
    allocation(1, 200, (5, 1), (7, 1)),  # one that a result is written over
    allocation(2, 50, (7, 1)),  # a result
    allocation(3, 1100),  # the heap
    allocation(4, 9000, (8, 1)),  # on the chip
    # 3 lies where 1 does and frees it when it is freed: 300 + 500, then 300 + 400
    trace((ALLOC, 1), (ALLOC, 2), (SHARE, 3, 1), (FREE, 2), (FREE, 1), (ALLOC, 4), (FREE, 4), (FREE, 3)),
    trace((ALLOC, 5), (FREE, 5)),
)


def test_what_is_live_at_once_is_counted_once(tmp_path: Path) -> None:
    path = tmp_path / "step.hlo.pb"
    path.write_bytes(message((1, b"module"), (3, ASSIGNMENT)))
    assert read_assignment(path) == AssignedBytes(arguments_bytes=1200, outputs_bytes=50, live_bytes=800)


@pytest.mark.parametrize("length", [0, 10, -1])
def test_a_file_that_is_still_written_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "step.hlo.pb"
    path.write_bytes(message((1, b"module"), (3, ASSIGNMENT))[:length])
    with pytest.raises(ValueError, match=r"step.hlo.pb has no complete buffer assignment"):
        read_assignment(path)
