"""The data port of a worker: array contents, straight between clients and devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import grpc
import numpy as np

from shardwright.errors import ArrayError, ShardwrightError
from shardwright.plans.layouts import Layout
from shardwright.proto.v1 import master_pb2
from shardwright.protocol import wire
from shardwright.protocol.chunked_messages import ARRAY_TRANSFER, ChunkedMessage, cut_chunks, parser_of, serializer_of
from shardwright.server.runtime.arrays import ArrayStore, StoredArray, shard_to_host
from shardwright.server.runtime.incoming_arrays import IncomingArray, IncomingArrays
from shardwright.server.security import abort

#: What a fetch without a deadline of its own waits for its array.
DEFAULT_WAIT_S = 600.0

#: (session, (array id, its layout) of each): all shards of this node are there.
Arrived = Callable[[str, list[tuple[int, Layout]]], None]


class TransferService:
    """Threaded: each call may block on a device or on an array that is not computed yet."""

    def __init__(self, store: ArrayStore, arrived: Arrived, *, put_limit_bytes: int) -> None:
        self._store = store
        self._arrived = arrived
        self._put_limit_bytes = put_limit_bytes

    def add_to(self, server: grpc.Server) -> None:
        """Serve it; see `shardwright.protocol.chunked_messages` for the messages with contents of many arrays."""
        handlers = {
            "PutArray": grpc.stream_unary_rpc_method_handler(
                self.put_array, master_pb2.PutArrayRequest.FromString, master_pb2.PutArrayReply.SerializeToString
            ),
            "PutArrays": grpc.stream_unary_rpc_method_handler(
                self.put_arrays, parser_of(master_pb2.PutArraysRequest), master_pb2.PutArraysReply.SerializeToString
            ),
            "FetchArray": grpc.unary_stream_rpc_method_handler(
                self.fetch_array, master_pb2.FetchArrayRequest.FromString, master_pb2.FetchArrayReply.SerializeToString
            ),
            "FetchArrays": grpc.unary_stream_rpc_method_handler(
                self.fetch_arrays, master_pb2.FetchArraysRequest.FromString, serializer_of
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(ARRAY_TRANSFER, handlers),))

    def put_array(
        self, requests: Iterator[master_pb2.PutArrayRequest], context: grpc.ServicerContext
    ) -> master_pb2.PutArrayReply:
        try:
            self._put(requests)
        except Exception as caught:
            abort(context, wire.to_shardwright_error(caught))
        return master_pb2.PutArrayReply()

    def put_arrays(
        self, requests: Iterator[ChunkedMessage[master_pb2.PutArraysRequest]], context: grpc.ServicerContext
    ) -> master_pb2.PutArraysReply:
        try:
            self._put_many(requests)
        except Exception as caught:
            abort(context, wire.to_shardwright_error(caught))
        return master_pb2.PutArraysReply()

    def _put(self, requests: Iterator[master_pb2.PutArrayRequest]) -> None:
        first = next(requests, None)
        if first is None or first.WhichOneof("kind") != "header":
            raise ArrayError("the first message of an upload is its header")
        header, arrays = first.header, IncomingArrays()
        self._store.require(header.session_id)
        layout = wire.layout_from_proto(header.layout)
        arrays.announce(self._incoming(header.array_id, layout, header.devices))
        self._keep(header.session_id, arrays.take(b""))
        for request in requests:
            self._keep(header.session_id, arrays.take(request.chunk))
        arrays.require_none()

    def _put_many(self, requests: Iterator[ChunkedMessage[master_pb2.PutArraysRequest]]) -> None:
        session_id, layouts, arrays = "", list[Layout](), IncomingArrays()
        for parcel in requests:
            request = parcel.message
            session_id = session_id or request.session_id
            self._store.require(session_id)
            layouts += map(wire.layout_from_proto, request.layouts)
            for array in request.arrays:
                if array.layout >= len(layouts):
                    raise ArrayError(f"array {array.array_id} has layout {array.layout} of {len(layouts)}")
                arrays.announce(self._incoming(array.array_id, layouts[array.layout], array.devices))
            for piece in parcel.pieces or (b"",):
                self._keep(session_id, arrays.take(piece))
        arrays.require_none()

    def _incoming(self, array_id: int, layout: Layout, devices: Iterable[int]) -> IncomingArray:
        return IncomingArray(array_id, layout, devices, limit_bytes=self._put_limit_bytes)

    def _keep(self, session_id: str, complete: Iterable[tuple[int, StoredArray]]) -> None:
        arrays = list(complete)
        if arrays:
            self._store.add(session_id, arrays)
            self._arrived(session_id, [(array_id, stored.layout) for array_id, stored in arrays])

    def fetch_array(
        self, request: master_pb2.FetchArrayRequest, context: grpc.ServicerContext
    ) -> Iterator[master_pb2.FetchArrayReply]:
        wanted = master_pb2.NodeShards(array_id=request.array_id, devices=request.devices)
        try:
            for shard in self._shards(request.session_id, wanted, _wait_s(context)):
                for chunk in wire.chunks(shard):
                    yield master_pb2.FetchArrayReply(chunk=chunk)
        except ShardwrightError as error:
            abort(context, error)

    def fetch_arrays(
        self, request: master_pb2.FetchArraysRequest, context: grpc.ServicerContext
    ) -> Iterator[ChunkedMessage[master_pb2.FetchArraysReply]]:
        try:
            yield from self._fetch_many(request, _wait_s(context))
        except ShardwrightError as error:
            abort(context, error)

    def _fetch_many(
        self, request: master_pb2.FetchArraysRequest, wait_s: float
    ) -> Iterator[ChunkedMessage[master_pb2.FetchArraysReply]]:
        """Messages of equal size, whatever the sizes of the arrays."""
        unread: list[master_pb2.UnreadArray] = []
        for pieces in cut_chunks(self._contents(request, wait_s, unread), wire.CHUNK_BYTES):
            yield ChunkedMessage(message=master_pb2.FetchArraysReply(unread=unread), pieces=pieces)
            unread.clear()
        yield ChunkedMessage(message=master_pb2.FetchArraysReply(unread=unread))

    def _contents(
        self, request: master_pb2.FetchArraysRequest, wait_s: float, unread: list[master_pb2.UnreadArray]
    ) -> Iterator[memoryview]:
        """Shards one after another; what fails before its first shard is added to `unread`, later failures end it."""
        for number, wanted in enumerate(request.arrays):
            shards = self._shards(request.session_id, wanted, wait_s)
            try:
                first = next(shards, None)
            except ShardwrightError as error:
                unread.append(master_pb2.UnreadArray(number=number, error=wire.error_to_proto(error)))
                continue
            if first is not None:
                yield first
                yield from shards

    def _shards(self, session_id: str, wanted: master_pb2.NodeShards, wait_s: float) -> Iterator[memoryview]:
        """Contents of an array at the devices that are named, once it is computed; every error is one of ours."""
        stored = None
        try:
            stored = self._store.wait(session_id, wanted.array_id, wait_s)
            for position in wanted.devices:
                yield _bytes_of(shard_to_host(stored, position))
        except Exception as caught:
            if stored is not None and stored.explains(caught):
                caught = ArrayError(f"array {wanted.array_id} was donated while it was read")
            raise wire.to_shardwright_error(caught) from None


def _wait_s(context: grpc.ServicerContext) -> float:
    remaining_s = context.time_remaining()
    return DEFAULT_WAIT_S if remaining_s is None else remaining_s


def _bytes_of(array: np.ndarray) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
