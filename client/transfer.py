"""Contents of arrays, straight to and from the nodes that hold them.

Only distinct shards travel: a node gets each part it holds once, whatever the
number of its devices that keep a copy, and a fetch reads each part of the
array from one holder.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np

from shardwright import wire
from shardwright.client.connection import LONG_CALL_TIMEOUT_S, Dialer, NodeInfo, SessionInfo
from shardwright.errors import InternalError
from shardwright.layouts import Layout, Shard, distinct_shards, logical_part, pad_to_stored
from shardwright.proto.v1 import master_pb2, master_pb2_grpc

#: Reading a directory and the description of a checkpoint may take long on a remote file system.
LISTING_TIMEOUT_S = 300.0


class ArrayTransfer:
    """Reads and writes arrays of one session; channels are opened when they are first used."""

    def __init__(self, info: SessionInfo, dialer: Dialer) -> None:
        self._info = info
        self._dialer = dialer
        self._channels: dict[int, grpc.Channel] = {}
        self._stubs: dict[int, Any] = {}
        self._pool = ThreadPoolExecutor(max_workers=max(2, min(16, len(info.nodes))), thread_name_prefix="transfer")

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        for channel in self._channels.values():
            channel.close()

    def put(self, array_id: int, value: np.ndarray, layout: Layout) -> None:
        """Writes a logical array to every node that holds some of it, each its shards; returns when all have them."""
        stored = pad_to_stored(value, layout)
        nodes = [node for node in self._info.nodes if distinct_shards(layout, node.devices)]
        self._each(nodes, lambda node: self._put_on(node, array_id, stored, layout))

    def fetch(self, array_id: int, layout: Layout) -> np.ndarray:
        """The logical array, put together from its shards."""
        wanted = self._holders(layout)
        stored = np.empty(layout.stored_shape, layout.dtype)
        self._each(list(wanted), lambda node: self._fetch_from(node, wanted[node], array_id, layout, stored))
        return logical_part(stored, layout)

    def ask_first_node(self, method: str, request: Any) -> Any:
        """The reply to a call of the Checkpoints service."""
        node = self._info.nodes[0]
        stub = master_pb2_grpc.CheckpointsStub(self._channel(node))  # type: ignore[no-untyped-call]
        try:
            return getattr(stub, method)(request, timeout=LISTING_TIMEOUT_S, metadata=self._dialer.metadata)
        except grpc.RpcError as error:
            wire.raise_from_rpc(error, where=node.data_address)

    # ---- one node --------------------------------------------------------------

    def _put_on(self, node: NodeInfo, array_id: int, stored: np.ndarray, layout: Layout) -> None:
        shards = distinct_shards(layout, node.devices)
        header = master_pb2.PutArrayHeader(
            session_id=self._info.session_id,
            array_id=array_id,
            layout=wire.layout_to_proto(layout),
            devices=[shard.holders[0] for shard in shards],
        )

        def requests() -> Iterator[master_pb2.PutArrayRequest]:
            yield master_pb2.PutArrayRequest(header=header)
            for shard in shards:
                for chunk in wire.chunks(as_bytes(stored[shard.slices]), self._info.chunk_bytes):
                    yield master_pb2.PutArrayRequest(chunk=chunk)

        try:
            self._stub(node).PutArray(requests(), timeout=LONG_CALL_TIMEOUT_S, metadata=self._dialer.metadata)
        except grpc.RpcError as error:
            wire.raise_from_rpc(error, where=node.data_address)

    def _fetch_from(
        self, node: NodeInfo, shards: Sequence[Shard], array_id: int, layout: Layout, stored: np.ndarray
    ) -> None:
        request = master_pb2.FetchArrayRequest(
            session_id=self._info.session_id,
            array_id=array_id,
            devices=[next(position for position in shard.holders if position in node.devices) for shard in shards],
        )
        size_bytes = layout.shard_bytes * len(shards)
        data = bytearray(size_bytes)
        received = 0
        try:
            for reply in self._stub(node).FetchArray(
                request, timeout=LONG_CALL_TIMEOUT_S, metadata=self._dialer.metadata
            ):
                data[received : received + len(reply.chunk)] = reply.chunk
                received += len(reply.chunk)
        except grpc.RpcError as error:
            wire.raise_from_rpc(error, where=node.data_address)
        if received != size_bytes:
            raise InternalError(
                f"array {array_id}: {received} bytes came, {size_bytes} expected", where=node.data_address
            )
        parts = np.frombuffer(data, np.uint8).view(layout.dtype).reshape(len(shards), *layout.shard_shape)
        for part, shard in zip(parts, shards, strict=True):
            stored[shard.slices] = part

    def _holders(self, layout: Layout) -> dict[NodeInfo, list[Shard]]:
        """One node for each distinct shard, the load spread evenly."""
        wanted: dict[NodeInfo, list[Shard]] = {}
        for shard in distinct_shards(layout, layout.devices):
            nodes = [node for node in self._info.nodes if any(p in node.devices for p in shard.holders)]
            node = min(nodes, key=lambda candidate: len(wanted.get(candidate, ())))
            wanted.setdefault(node, []).append(shard)
        return wanted

    def _stub(self, node: NodeInfo) -> Any:
        if node.index not in self._stubs:
            self._stubs[node.index] = master_pb2_grpc.ArrayTransferStub(self._channel(node))  # type: ignore[no-untyped-call]
        return self._stubs[node.index]

    def _channel(self, node: NodeInfo) -> grpc.Channel:
        if node.index not in self._channels:
            self._channels[node.index] = self._dialer.dial(node.data_address)
        return self._channels[node.index]

    def _each(self, nodes: Sequence[NodeInfo], act: Any) -> None:
        """`act(node)` for all nodes at the same time; the first failure is raised."""
        if len(nodes) == 1:
            act(nodes[0])
            return
        for future in [self._pool.submit(act, node) for node in nodes]:
            future.result()


def as_bytes(array: np.ndarray) -> memoryview:
    """Contents in C order; also for dtypes that numpy's buffer protocol does not know."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
