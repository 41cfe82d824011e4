"""The data port of a worker: array contents, straight between clients and devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np

from shardwright import wire
from shardwright.errors import ArrayError, ResourceLimitError
from shardwright.layouts import Layout
from shardwright.proto.v1 import master_pb2, master_pb2_grpc
from shardwright.server.runtime.arrays import ArrayStore, from_shards, shard_to_host
from shardwright.server.security import abort

#: What a fetch without a deadline of its own waits for its array.
DEFAULT_WAIT_S = 600.0

#: (session, array id, its layout): all shards of this node are there.
Arrived = Callable[[str, int, Layout], None]


class ArrayTransfer(master_pb2_grpc.ArrayTransferServicer):
    """Threaded: each call may block on a device or on an array that is not computed yet."""

    def __init__(self, store: ArrayStore, arrived: Arrived, *, put_limit_bytes: int) -> None:
        self._store = store
        self._arrived = arrived
        self._put_limit_bytes = put_limit_bytes

    def PutArray(
        self, request_iterator: Iterator[master_pb2.PutArrayRequest], context: grpc.ServicerContext
    ) -> master_pb2.PutArrayReply:
        try:
            self._put(request_iterator)
        except Exception as caught:
            abort(context, wire.as_our_error(caught))
        return master_pb2.PutArrayReply()

    def _put(self, requests: Iterator[master_pb2.PutArrayRequest]) -> None:
        first = next(requests, None)
        if first is None or first.WhichOneof("kind") != "header":
            raise ArrayError("the first message of an upload is its header")
        header = first.header
        layout = wire.layout_from_proto(header.layout)
        size_bytes = layout.shard_bytes * len(header.devices)
        if size_bytes > self._put_limit_bytes:
            raise ResourceLimitError(
                f"{size_bytes} bytes in one upload, the limit is {self._put_limit_bytes}",
                where=f"array {header.array_id}",
                remedy="split the array over more nodes, or raise the server's limit",
            )
        self._store.require(header.session_id)
        data = _gather(requests, size_bytes)
        stored = from_shards(memoryview(data), header.devices, layout)
        self._store.add(header.session_id, [(header.array_id, stored)])
        self._arrived(header.session_id, header.array_id, layout)

    def FetchArray(
        self, request: master_pb2.FetchArrayRequest, context: grpc.ServicerContext
    ) -> Iterator[master_pb2.FetchArrayReply]:
        try:
            yield from self._fetch(request, context)
        except Exception as caught:
            if isinstance(caught, RuntimeError) and "deleted" in str(caught):
                caught = ArrayError(f"array {request.array_id} was donated while it was read")
            abort(context, wire.as_our_error(caught))

    def _fetch(
        self, request: master_pb2.FetchArrayRequest, context: grpc.ServicerContext
    ) -> Iterator[master_pb2.FetchArrayReply]:
        remaining_s = context.time_remaining()
        timeout_s = DEFAULT_WAIT_S if remaining_s is None else remaining_s
        stored = self._store.wait(request.session_id, request.array_id, timeout_s)
        for position in request.devices:
            for chunk in wire.chunks(_bytes_of(shard_to_host(stored, position))):
                yield master_pb2.FetchArrayReply(chunk=chunk)


def _bytes_of(array: np.ndarray) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]


def _gather(requests: Iterator[Any], size_bytes: int) -> bytearray:
    """The chunks that follow a header, put together; ArrayError unless they are `size_bytes` in all."""
    data = bytearray(size_bytes)
    at = 0
    for request in requests:
        chunk = request.chunk
        if at + len(chunk) > size_bytes:
            raise ArrayError(f"more than the {size_bytes} bytes that the header announces")
        data[at : at + len(chunk)] = chunk
        at += len(chunk)
    if at != size_bytes:
        raise ArrayError(f"the upload ended after {at} of {size_bytes} bytes")
    return data
