"""Parcels against protobuf's own classes, in both directions."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import ProtocolError
from shardwright.proto.v1 import master_pb2, worker_pb2
from shardwright.protocol.chunked_messages import ChunkedMessage, cut_chunks, intact, parser_of, serializer_of

PutArrays = master_pb2.PutArraysRequest
SIZES = st.sampled_from([0, 1, 127, 128, 16383, 16384, 70_000])


@settings(max_examples=60, deadline=None)
@given(SIZES, SIZES, st.integers(0, 3))
def test_what_is_written_is_the_message_that_protobuf_writes(first: int, second: int, arrays: int) -> None:
    pieces = [memoryview(b"a" * first), memoryview(b"b" * second)]
    message = PutArrays(session_id="s" * arrays, arrays=[master_pb2.NodeShards(array_id=n) for n in range(arrays)])
    data = serializer_of(ChunkedMessage(message=message, pieces=pieces))
    whole = PutArrays.FromString(data)
    assert whole.chunk == b"".join(pieces)
    for form in (data, whole.SerializeToString()):  # ours, and protobuf's with the contents elsewhere
        parcel = parser_of(PutArrays)(form)
        assert parcel.message == message
        assert b"".join(parcel.pieces) == whole.chunk


@pytest.mark.parametrize("data", [b"\x22", b"\x22\x05ab", b"\x22\xff\xff\xff\xff\x0fab", b"\x22\x01a\x0a\x05s"])
def test_a_message_that_ends_early_is_refused_as_protobuf_does(data: bytes) -> None:
    with pytest.raises(DecodeError):
        PutArrays.FromString(data)
    with pytest.raises(DecodeError):
        parser_of(PutArrays)(data)


@given(st.lists(st.binary(max_size=40), max_size=12), st.integers(1, 16))
def test_pieces_are_cut_into_equal_parcels(pieces: list[bytes], size: int) -> None:
    parcels = [b"".join(parts) for parts in cut_chunks(map(memoryview, pieces), size)]
    assert b"".join(parcels) == b"".join(pieces)
    assert all(len(parcel) == size for parcel in parcels[:-1])
    assert all(0 < len(parcel) <= size for parcel in parcels)


@pytest.mark.parametrize("kind", [worker_pb2.PutPartsRequest, worker_pb2.FetchPartsReply])
def test_a_flipped_bit_of_a_snapshot_on_its_way_is_seen(kind: Any) -> None:
    """Wherever it is: the message is refused, or its contents are."""
    contents = bytes(range(200)) * 2
    pieces = [memoryview(contents[:150]), memoryview(contents[150:])]
    data = serializer_of(ChunkedMessage(message=kind(), pieces=pieces))
    (parcel,) = intact([parser_of(kind)(data)])
    assert b"".join(parcel.pieces) == contents == kind.FromString(data).chunk
    for bit in range(0, len(data) * 8, 3):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises((DecodeError, ProtocolError)):
            list(intact([parser_of(kind)(bytes(damaged))]))
