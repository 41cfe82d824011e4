"""Messages with contents of arrays, copied no more often than gRPC itself does.

On the wire a parcel is the protobuf message described in `protos/`, with its field `chunk` first, and, where it has
one, the checksum of that, `crc32`, last. protobuf's own classes read and write it too, but copy the contents three
times.
"""

from __future__ import annotations

import struct
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from google.protobuf.message import Message

from shardwright.errors import ProtocolError
from shardwright.proto.v1 import master_pb2

MessageT = TypeVar("MessageT", bound=Message)

#: Full name of the service of the data port.
ARRAY_TRANSFER = master_pb2.DESCRIPTOR.services_by_name["ArrayTransfer"].full_name

_LENGTH_DELIMITED, _FIXED32 = 2, 5  # protobuf's wire types of bytes, and of four of them
_CHECKSUM = "crc32"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkedMessage(Generic[MessageT]):
    """A message without its field `chunk`, and the contents of that field: pieces, one after another.

    is_intact: whether the contents have the checksum that came with them, if any.
    """

    message: MessageT
    pieces: Sequence[memoryview] = ()
    is_intact: bool = True


def intact(parcels: Iterable[ChunkedMessage[MessageT]]) -> Iterator[ChunkedMessage[MessageT]]:
    """The parcels, as they come. Raises ProtocolError on one that was changed on its way."""
    for parcel in parcels:
        if not parcel.is_intact:
            raise ProtocolError(
                "contents of arrays were changed on their way between nodes: their checksum differs",
                remedy="look at the network and the memory of both nodes",
            )
        yield parcel


def cut_chunks(pieces: Iterable[memoryview], size_bytes: int) -> Iterator[list[memoryview]]:
    """Pieces one after another, in parcels of `size_bytes` each; the last one may be smaller."""
    parts: list[memoryview] = []
    room = size_bytes
    for piece in pieces:
        at = 0
        while at < piece.nbytes:
            parts.append(piece[at : at + room])
            at += parts[-1].nbytes
            room -= parts[-1].nbytes
            if not room:
                yield parts
                parts, room = [], size_bytes
    if parts:
        yield parts


def fill(empty: deque[np.ndarray], data: np.ndarray) -> np.ndarray:
    """Fill memory, piece after piece, with bytes; `empty` is then what is left of it. Returns the rest of the bytes."""
    while empty and data.size:
        piece = empty.popleft()
        count = min(piece.size, data.size)
        piece[:count] = data[:count]
        data = data[count:]
        if count < piece.size:
            empty.appendleft(piece[count:])
    return data


def serializer_of(parcel: ChunkedMessage[Any]) -> bytes:
    """A serializer for gRPC."""
    message = parcel.message.SerializeToString()
    if not parcel.pieces:
        return bytes(message)
    kind = type(parcel.message)
    size_bytes = sum(piece.nbytes for piece in parcel.pieces)
    checksum = b""
    if _CHECKSUM in kind.DESCRIPTOR.fields_by_name:
        checksum = _tag(kind, _CHECKSUM, _FIXED32) + struct.pack("<I", _checksum_of(parcel.pieces))
    return b"".join((_tag(kind), _varint(size_bytes), *parcel.pieces, message, checksum))


def parser_of(kind: type[MessageT]) -> Callable[[bytes], ChunkedMessage[MessageT]]:
    """A deserializer for gRPC; raises protobuf's DecodeError. Contents are views of the received bytes."""
    tag = _tag(kind)

    def from_wire(data: bytes) -> ChunkedMessage[MessageT]:
        pieces: list[memoryview] = []
        if data.startswith(tag):
            size_bytes, start = _read_varint(data, len(tag))
            if start + size_bytes <= len(data):  # else protobuf says what is wrong
                pieces.append(memoryview(data)[start : start + size_bytes])
                data = data[start + size_bytes :]
        message: Any = kind.FromString(data)
        if message.chunk:  # written by protobuf itself: its last field of a name is what counts
            pieces = [memoryview(message.chunk)]
            message.ClearField("chunk")
        is_intact = True
        if _CHECKSUM in kind.DESCRIPTOR.fields_by_name and (pieces or message.HasField(_CHECKSUM)):
            is_intact = message.HasField(_CHECKSUM) and message.crc32 == _checksum_of(pieces)
            message.ClearField(_CHECKSUM)
        return ChunkedMessage(message=message, pieces=pieces, is_intact=is_intact)

    return from_wire


def _checksum_of(pieces: Sequence[memoryview]) -> int:
    checksum = 0
    for piece in pieces:
        checksum = zlib.crc32(piece, checksum)
    return checksum


def _tag(kind: type[Message], field: str = "chunk", wire_type: int = _LENGTH_DELIMITED) -> bytes:
    return _varint(kind.DESCRIPTOR.fields_by_name[field].number << 3 | wire_type)


def _varint(number: int) -> bytes:
    """Seven bits a byte, the lowest first; the high bit marks continuation."""
    digits = bytearray()
    while number > 0x7F:
        digits.append(number & 0x7F | 0x80)
        number >>= 7
    digits.append(number)
    return bytes(digits)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """A number and its end offset; past the data if the data ends too early."""
    number = shift = 0
    while at < len(data):
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
        shift += 7
    return number, at + 1
