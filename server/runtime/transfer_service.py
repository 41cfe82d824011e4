"""The data port of a worker: array contents, straight between clients and devices."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import grpc
import numpy as np

from shardwright.errors import ArrayError, DeadlineError, ShardwrightError
from shardwright.plans.layouts import Layout
from shardwright.proto.v1 import master_pb2
from shardwright.protocol import wire
from shardwright.protocol.chunked_messages import ARRAY_TRANSFER, ChunkedMessage, cut_chunks, parser_of, serializer_of
from shardwright.server.handlers import Send, abort, end_with, without_thread
from shardwright.server.runtime.array_waits import ArrayWaits
from shardwright.server.runtime.arrays import ArrayStore, StoredArray, shard_to_host
from shardwright.server.runtime.incoming_arrays import IncomingArray
from shardwright.server.runtime.uploads import Upload, Uploads
from shardwright.server.tuning import DEFAULT_WAIT_S
from shardwright.tuning import CHUNK_BYTES

#: (session, (array id, its layout) of each): all shards of this node are there.
Arrived = Callable[[str, list[tuple[int, Layout]]], None]


class TransferService:
    """Threaded, but for reads of arrays that are not there yet: they wait without a thread (`array_waits.py`).

    person_of: who makes a call. received_bytes, sent_bytes: contents so far.
    """

    def __init__(
        self,
        store: ArrayStore,
        arrived: Arrived,
        uploads: Uploads,
        person_of: Callable[[grpc.ServicerContext], str],
        *,
        put_limit_bytes: int,
    ) -> None:
        self._store = store
        self._arrived = arrived
        self._uploads = uploads
        self._person_of = person_of
        self._put_limit_bytes = put_limit_bytes
        self._waits = ArrayWaits(store)
        self._count_lock = threading.Lock()
        self.received_bytes = self.sent_bytes = 0
        self._moving: set[object] = set()  # calls that move contents right now

    @property
    def transfer_count(self) -> int:
        """Calls that bring or take contents right now."""
        return len(self._moving)

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
                without_thread(self._begin_fetch_array),
                master_pb2.FetchArrayRequest.FromString,
                master_pb2.FetchArrayReply.SerializeToString,
            ),
            "FetchArrays": grpc.unary_stream_rpc_method_handler(
                without_thread(self._begin_fetch_arrays), master_pb2.FetchArraysRequest.FromString, serializer_of
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(ARRAY_TRANSFER, handlers),))

    def put_array(
        self, requests: Iterator[master_pb2.PutArrayRequest], context: grpc.ServicerContext
    ) -> master_pb2.PutArrayReply:
        try:
            with self._moves(), self._upload(context) as upload:
                self._put(requests, upload)
        except Exception as caught:
            abort(context, wire.to_shardwright_error(caught))
        return master_pb2.PutArrayReply()

    def put_arrays(
        self, requests: Iterator[ChunkedMessage[master_pb2.PutArraysRequest]], context: grpc.ServicerContext
    ) -> master_pb2.PutArraysReply:
        try:
            with self._moves(), self._upload(context) as upload:
                self._put_many(requests, upload)
        except Exception as caught:
            abort(context, wire.to_shardwright_error(caught))
        return master_pb2.PutArraysReply()

    def _upload(self, context: grpc.ServicerContext) -> AbstractContextManager[Upload]:
        return self._uploads.begin(self._person_of(context), context.cancel)

    def _put(self, requests: Iterator[master_pb2.PutArrayRequest], upload: Upload) -> None:
        first = next(requests, None)
        if first is None or first.WhichOneof("kind") != "header":
            raise ArrayError("the first message of an upload is its header")
        header = first.header
        self._require(header.session_id, upload)
        layout = wire.layout_from_proto(header.layout)
        upload.announce(self._incoming(header.array_id, layout, header.devices))
        self._keep(header.session_id, upload.take(b""))
        for request in requests:
            self._count(received=len(request.chunk))
            self._keep(header.session_id, upload.take(request.chunk))
        upload.require_all()

    def _put_many(self, requests: Iterator[ChunkedMessage[master_pb2.PutArraysRequest]], upload: Upload) -> None:
        session_id, layouts = "", list[Layout]()
        is_repeated = False
        for parcel in requests:
            request = parcel.message
            session_id = session_id or request.session_id
            is_repeated = is_repeated or request.is_repeated
            self._require(session_id, upload)
            layouts += map(wire.layout_from_proto, request.layouts)
            for array in request.arrays:
                if array.layout >= len(layouts):
                    raise ArrayError(f"array {array.array_id} has layout {array.layout} of {len(layouts)}")
                upload.announce(self._incoming(array.array_id, layouts[array.layout], array.devices))
            self._count(received=sum(map(len, parcel.pieces)))
            for piece in parcel.pieces or (b"",):
                self._keep(session_id, upload.take(piece), is_repeated=is_repeated)
        upload.require_all()

    def _require(self, session_id: str, upload: Upload) -> None:
        """Raises SessionError unless the session is open; from now on its end is that of the upload."""
        upload.session_id = session_id
        self._store.require(session_id)

    def _incoming(self, array_id: int, layout: Layout, devices: Iterable[int]) -> IncomingArray:
        return IncomingArray(array_id, layout, devices, limit_bytes=self._put_limit_bytes)

    def _keep(self, session_id: str, complete: Sequence[tuple[int, StoredArray]], *, is_repeated: bool = False) -> None:
        if complete:
            self._store.add(session_id, complete, is_repeated=is_repeated)
            self._arrived(session_id, [(array_id, stored.layout) for array_id, stored in complete])

    def _begin_fetch_array(
        self, request: master_pb2.FetchArrayRequest, context: grpc.ServicerContext, send: Send
    ) -> None:
        wanted = master_pb2.NodeShards(array_id=request.array_id, devices=request.devices)
        self._read_later(
            request.session_id, [request.array_id], context, send, lambda: self._fetch_one(request.session_id, wanted)
        )

    def _begin_fetch_arrays(
        self, request: master_pb2.FetchArraysRequest, context: grpc.ServicerContext, send: Send
    ) -> None:
        array_ids = [wanted.array_id for wanted in request.arrays]
        self._read_later(request.session_id, array_ids, context, send, lambda: self._fetch_many(request))

    def _read_later(
        self,
        session_id: str,
        array_ids: Sequence[int],
        context: grpc.ServicerContext,
        send: Send,
        replies: Callable[[], Iterable[Any]],
    ) -> None:
        """Send `replies()` once the arrays are settled, from another thread, and end the call."""

        def read() -> None:
            try:
                with self._moves():
                    for reply in replies():
                        if not context.is_active():
                            return
                        send(reply)
            except Exception as caught:
                end_with(context, wire.to_shardwright_error(caught))
            send(None)

        try:
            withdraw = self._waits.submit(session_id, array_ids, _wait_s(context), read)
        except ShardwrightError as error:
            end_with(context, error)
            send(None)
            return
        if not context.add_callback(withdraw):
            withdraw()

    @contextmanager
    def _moves(self) -> Iterator[None]:
        """Within, a call moves contents."""
        call = object()
        self._moving.add(call)
        try:
            yield
        finally:
            self._moving.discard(call)

    def _count(self, *, received: int = 0, sent: int = 0) -> None:
        with self._count_lock:
            self.received_bytes += received
            self.sent_bytes += sent

    def _fetch_one(self, session_id: str, request: master_pb2.NodeShards) -> Iterator[master_pb2.FetchArrayReply]:
        for shard in self._shards(session_id, request):
            for chunk in wire.chunks(shard):
                yield master_pb2.FetchArrayReply(chunk=chunk)

    def _fetch_many(
        self, request: master_pb2.FetchArraysRequest
    ) -> Iterator[ChunkedMessage[master_pb2.FetchArraysReply]]:
        """Messages of equal size, whatever the sizes of the arrays."""
        unread: list[master_pb2.UnreadArray] = []
        for pieces in cut_chunks(self._contents(request, unread), CHUNK_BYTES):
            yield ChunkedMessage(message=master_pb2.FetchArraysReply(unread=unread), pieces=pieces)
            unread.clear()
        yield ChunkedMessage(message=master_pb2.FetchArraysReply(unread=unread))

    def _contents(
        self, request: master_pb2.FetchArraysRequest, unread: list[master_pb2.UnreadArray]
    ) -> Iterator[memoryview]:
        """Shards one after another; what fails before its first shard is added to `unread`, later failures end it."""
        for number, wanted in enumerate(request.arrays):
            shards = self._shards(request.session_id, wanted)
            try:
                first = next(shards, None)
            except ShardwrightError as error:
                unread.append(master_pb2.UnreadArray(number=number, error=wire.error_to_proto(error)))
                continue
            if first is not None:
                yield first
                yield from shards

    def _shards(self, session_id: str, request: master_pb2.NodeShards) -> Iterator[memoryview]:
        """Contents of an array at the devices that are named; every error is one of ours."""
        stored = None
        try:
            stored = self._store.find(session_id, request.array_id)
            if stored is None:
                raise DeadlineError(
                    f"array {request.array_id} was not there within the time that the call allows",
                    remedy="put it, or run the step that makes it; wait longer for a long step",
                )
            for position in request.devices:
                shard = _bytes_of(shard_to_host(stored, position))
                self._count(sent=len(shard))
                yield shard
        except Exception as caught:
            if stored is not None and stored.explains(caught):
                caught = ArrayError(f"array {request.array_id} was donated while it was read")
            raise wire.to_shardwright_error(caught) from None


def _wait_s(context: grpc.ServicerContext) -> float:
    remaining_s = context.time_remaining()
    return DEFAULT_WAIT_S if remaining_s is None else remaining_s


def _bytes_of(array: np.ndarray) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
