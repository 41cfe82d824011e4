"""The gRPC shell of a daemon's `SnapshotStore`: executors put parts here, and fetch them after a loss.

In threads of its own, beside the daemon's event loop.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent import futures

import grpc
import numpy as np

from shardwright.clusters.cluster import join_address
from shardwright.errors import ArrayError
from shardwright.proto.v1 import worker_pb2
from shardwright.protocol import wire
from shardwright.protocol.chunked_messages import ChunkedMessage, cut_chunks, fill, intact, parser_of, serializer_of
from shardwright.protocol.snapshot_parts import SNAPSHOT_KEY, SNAPSHOTS, keys_of, parts_of
from shardwright.server.access import Access, AccessInterceptor
from shardwright.server.handlers import abort
from shardwright.server.security import Protection
from shardwright.server.tuning import SNAPSHOT_THREADS
from shardwright.server.worker.snapshot_store import PartKey, SnapshotStore
from shardwright.tuning import CHUNK_BYTES


class SnapshotServer:
    """Serves a store on a port of its own. Starts at once; `close` ends it.

    key: what calls carry; executors have it from the master.
    """

    def __init__(self, host: str, protection: Protection, *, limit_bytes: int) -> None:
        self._store = SnapshotStore(limit_bytes)
        self.key = secrets.token_urlsafe(32)
        self._server = grpc.server(
            futures.ThreadPoolExecutor(max_workers=SNAPSHOT_THREADS, thread_name_prefix="snapshots"),
            interceptors=[AccessInterceptor(Access(protection), also=(SNAPSHOT_KEY, self.key))],
            options=wire.CHANNEL_OPTIONS,
        )
        handlers = {
            "OfferParts": grpc.unary_unary_rpc_method_handler(
                self.offer_parts, worker_pb2.OfferPartsRequest.FromString, worker_pb2.OfferPartsReply.SerializeToString
            ),
            "PutParts": grpc.stream_unary_rpc_method_handler(
                self.put_parts, parser_of(worker_pb2.PutPartsRequest), worker_pb2.PutPartsReply.SerializeToString
            ),
            "ListParts": grpc.unary_unary_rpc_method_handler(
                self.list_parts, worker_pb2.ListPartsRequest.FromString, worker_pb2.ListPartsReply.SerializeToString
            ),
            "FetchParts": grpc.unary_stream_rpc_method_handler(
                self.fetch_parts, worker_pb2.FetchPartsRequest.FromString, serializer_of
            ),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SNAPSHOTS, handlers),))
        self.address = join_address(host, protection.bind(self._server, host, 0))
        self._server.start()

    @property
    def store(self) -> SnapshotStore:
        return self._store

    def retain(self, order: worker_pb2.RetainSnapshots) -> None:
        """See `SnapshotStore.retain`."""
        oldest = {session.session_id: session.number for session in order.sessions}
        self._store.retain(oldest, order=(order.generation, order.sequence))

    def close(self) -> None:
        self._server.stop(grace=None)

    def offer_parts(
        self, request: worker_pb2.OfferPartsRequest, context: grpc.ServicerContext
    ) -> worker_pb2.OfferPartsReply:
        sizes = {key: array.shard_bytes for array in request.arrays for key in keys_of([array])}
        order = request.order
        try:
            missing = self._store.offer(
                request.session_id,
                request.number,
                sizes,
                keep=None if order.keeps_all else order.keep,
                order=(order.generation, order.sequence),
            )
        except Exception as caught:
            abort(context, wire.to_shardwright_error(caught))
        return worker_pb2.OfferPartsReply(missing=parts_of(missing))

    def put_parts(
        self, requests: Iterator[ChunkedMessage[worker_pb2.PutPartsRequest]], context: grpc.ServicerContext
    ) -> worker_pb2.PutPartsReply:
        try:
            self._put(requests)
        except Exception as caught:
            abort(context, wire.to_shardwright_error(caught))
        return worker_pb2.PutPartsReply()

    def _put(self, requests: Iterable[ChunkedMessage[worker_pb2.PutPartsRequest]]) -> None:
        arriving = _ArrivingParts(self._store)
        try:
            for parcel in intact(requests):
                arriving.announce(parcel.message.session_id, keys_of(parcel.message.arrays))
                for piece in parcel.pieces or (memoryview(b""),):
                    arriving.take(np.frombuffer(piece, np.uint8))
            arriving.require_none()
        finally:
            arriving.discard()

    def list_parts(
        self, request: worker_pb2.ListPartsRequest, context: grpc.ServicerContext
    ) -> worker_pb2.ListPartsReply:
        del context
        return worker_pb2.ListPartsReply(arrays=parts_of(self._store.list_parts(request.session_id, request.number)))

    def fetch_parts(
        self, request: worker_pb2.FetchPartsRequest, context: grpc.ServicerContext
    ) -> Iterator[ChunkedMessage[worker_pb2.FetchPartsReply]]:
        contents = (self._store.get(request.session_id, key).data for key in keys_of(request.arrays))
        try:
            for pieces in cut_chunks(contents, CHUNK_BYTES):
                yield ChunkedMessage(message=worker_pb2.FetchPartsReply(), pieces=pieces)
        except Exception as caught:
            abort(context, wire.to_shardwright_error(caught))


class _ArrivingParts:
    """Contents of announced parts, in one run of bytes."""

    def __init__(self, store: SnapshotStore) -> None:
        self._store = store
        self._waiting: deque[tuple[str, PartKey, np.ndarray, deque[np.ndarray]]] = deque()  # last: what is empty of it

    def announce(self, session_id: str, keys: Iterable[PartKey]) -> None:
        for key in keys:
            buffer = self._store.buffer(session_id, key)
            self._waiting.append((session_id, key, buffer, deque([buffer] if buffer.size else [])))

    def take(self, data: np.ndarray) -> None:
        while self._waiting:
            session_id, key, buffer, empty = self._waiting[0]
            data = fill(empty, data)
            if empty:
                return
            self._waiting.popleft()
            self._store.complete(session_id, key, buffer)
        if data.size:
            raise ArrayError(f"{data.size} bytes that belong to no part")

    def discard(self) -> None:
        """Keep nothing that the store drops: gRPC keeps what the frames of a broken call refer to."""
        self._waiting.clear()

    def require_none(self) -> None:
        if self._waiting:
            raise ArrayError(f"the contents of {len(self._waiting)} parts ended early")
