"""Contents of arrays, straight to and from the nodes that hold them.

Only distinct shards travel: a node receives each of its parts once, regardless of copies on its devices; a fetch reads
each part of an array from one holder. Many arrays go in one call to each node, in one run of bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np

from shardwright.client.connection import Dialer, NodeInfo, SessionInfo
from shardwright.client.limits import LISTING_TIMEOUT_S, LONG_CALL_TIMEOUT_S
from shardwright.client.retries import OutageError, Retries, is_outage
from shardwright.errors import InternalError, ServerUnavailableError, ShardwrightError
from shardwright.plans.layouts import Layout, Shard, distinct_shards, logical_part, slice_stored
from shardwright.proto.v1 import master_pb2, master_pb2_grpc
from shardwright.protocol import wire
from shardwright.protocol.chunked_messages import ARRAY_TRANSFER, ChunkedMessage, cut_chunks, parser_of, serializer_of
from shardwright.protocol.session_secrets import session_metadata


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Upload:
    """A logical array to put on the servers."""

    array_id: int
    value: np.ndarray
    layout: Layout


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _ArrayFetch:
    """A fetched array, with the shards requested from one node. number: in the fetch."""

    number: int
    array_id: int
    stored: np.ndarray
    shards: list[Shard]


#: (a node whose data port does not answer, what the call says of it) → the error that the user meets.
Explain = Callable[[NodeInfo, ShardwrightError], ShardwrightError]


class ArrayTransfer:
    """Reads and writes arrays of one session; channels are opened when they are first used."""

    def __init__(self, info: SessionInfo, dialer: Dialer, explain_silence: Explain, retries: Retries) -> None:
        self._retries = retries
        self._reached: set[int] = set()  # nodes that have answered: a port that never has is no outage
        self._info = info
        self._dialer = dialer
        self._metadata = dialer.metadata + session_metadata(info.session_secret)
        self._explain_silence = explain_silence
        self._channels: dict[int, grpc.Channel] = {}
        self._pool = ThreadPoolExecutor(max_workers=max(2, min(16, len(info.nodes))), thread_name_prefix="transfer")

    def change_nodes(self, info: SessionInfo) -> None:
        """The cluster has other nodes from now on; calls to those of before end as they do."""
        self._info = info
        self._channels, old = {}, self._channels
        self._reached = set()
        for channel in old.values():
            channel.close()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        for channel in self._channels.values():
            channel.close()

    def put(self, uploads: Sequence[Upload], may_repeat: Callable[[], bool] = lambda: True) -> None:
        """Writes arrays to every node holding some of them, each its shards; returns when all have them.

        may_repeat: asked after an outage: whether what runs on the nodes still is what the arrays are for.
        """
        layouts = {id(upload.layout): upload.layout for upload in uploads}
        shards_by_node = {
            node.index: {
                key: shards for key, layout in layouts.items() if (shards := distinct_shards(layout, node.devices))
            }
            for node in self._info.nodes
        }
        self._call_nodes(
            [node for node in self._info.nodes if shards_by_node[node.index]],
            lambda node: self._put_on(node, uploads, shards_by_node[node.index], may_repeat),
        )

    def fetch(self, sources: Sequence[tuple[int, Layout]]) -> list[np.ndarray | ShardwrightError]:
        """The logical arrays of these ids, assembled from their shards; or an error in an array's place."""
        arrays = [np.empty(layout.stored_shape, layout.dtype) for _, layout in sources]
        by_node: dict[int, list[_ArrayFetch]] = {}
        for number, holders in enumerate(self._holders([layout for _, layout in sources])):
            for index, shards in holders.items():
                fetch = _ArrayFetch(number=number, array_id=sources[number][0], stored=arrays[number], shards=shards)
                by_node.setdefault(index, []).append(fetch)
        failed: dict[int, ShardwrightError] = {}
        self._call_nodes(
            [node for node in self._info.nodes if node.index in by_node],
            lambda node: failed.update(self._fetch_from(node, by_node[node.index])),
        )
        return [
            failed.get(number) or logical_part(array, layout)
            for number, (array, (_, layout)) in enumerate(zip(arrays, sources, strict=True))
        ]

    def ask_nodes(self, service: str, method: str, requests: Mapping[int, Any]) -> dict[int, Any]:
        """The replies to calls of a service at data ports, by node. requests: by node, all sent at the same time."""
        replies: dict[int, Any] = {}

        def ask(node: NodeInfo) -> None:
            stub = getattr(master_pb2_grpc, f"{service}Stub")(self._channel(node))
            try:
                replies[node.index] = getattr(stub, method)(
                    requests[node.index], timeout=LISTING_TIMEOUT_S, metadata=self._metadata
                )
            except grpc.RpcError as error:
                wire.raise_from_rpc(error, where=node.data_address)

        self._call_nodes([node for node in self._info.nodes if node.index in requests], ask)
        return replies

    # ---- one node --------------------------------------------------------------

    def _put_on(
        self,
        node: NodeInfo,
        uploads: Sequence[Upload],
        shards_by_layout: dict[int, tuple[Shard, ...]],
        may_repeat: Callable[[], bool],
    ) -> None:
        here = [upload for upload in uploads if id(upload.layout) in shards_by_layout]

        def requests(attempt: int) -> Iterator[ChunkedMessage[master_pb2.PutArraysRequest]]:
            announced = master_pb2.PutArraysRequest(session_id=self._info.session_id, is_repeated=attempt > 0)
            for pieces in cut_chunks(_contents(here, shards_by_layout, announced), self._info.chunk_bytes):
                yield ChunkedMessage(message=announced, pieces=pieces)  # which gRPC writes at once
                announced.Clear()
            yield ChunkedMessage(message=announced)

        put = self._channel(node).stream_unary(
            f"/{ARRAY_TRANSFER}/PutArrays",
            request_serializer=serializer_of,
            response_deserializer=master_pb2.PutArraysReply.FromString,
        )

        def attempt(number: int) -> None:
            try:
                put(requests(number), timeout=LONG_CALL_TIMEOUT_S, metadata=self._metadata)
            except grpc.RpcError as error:
                ours = self._error(node, error)
                if isinstance(ours, OutageError) and not may_repeat():
                    raise ServerUnavailableError(ours.message, where=ours.where, remedy=ours.remedy) from None
                raise ours from None

        self._retries.call(attempt)
        self._reached.add(node.index)

    def _error(self, node: NodeInfo, error: grpc.RpcError) -> ShardwrightError:
        """Of a failed call; an OutageError where it may be made again."""
        self._retries.check_open()
        ours = wire.error_from_rpc(error, where=node.data_address)
        if not isinstance(ours, ServerUnavailableError):
            return ours
        explained = self._explain_silence(node, ours)
        if not isinstance(explained, OutageError) or (is_outage(error) and node.index in self._reached):
            return explained
        return ServerUnavailableError(explained.message, where=explained.where, remedy=explained.remedy)

    def _fetch_from(self, node: NodeInfo, array_fetches: Sequence[_ArrayFetch]) -> dict[int, ShardwrightError]:
        """Fills arrays with the node's shards; returns the errors of missing ones, by number."""
        request = master_pb2.FetchArraysRequest(session_id=self._info.session_id)
        for array_fetch in array_fetches:
            request.arrays.add(
                array_id=array_fetch.array_id, devices=[_holder(node, shard) for shard in array_fetch.shards]
            )
        fetch = self._channel(node).unary_stream(
            f"/{ARRAY_TRANSFER}/FetchArrays",
            request_serializer=master_pb2.FetchArraysRequest.SerializeToString,
            response_deserializer=parser_of(master_pb2.FetchArraysReply),
        )

        def attempt(_: int) -> dict[int, ShardwrightError]:
            inflow = _ShardAssembler(array_fetches)
            try:
                for reply in fetch(request, timeout=LONG_CALL_TIMEOUT_S, metadata=self._metadata):
                    for unread in reply.message.unread:
                        inflow.fail(array_fetches[unread.number].number, wire.error_from_proto(unread.error))
                    for piece in reply.pieces:
                        inflow.take(piece)
            except grpc.RpcError as error:
                ours = self._error(node, error)
                if isinstance(ours, OutageError):
                    raise ours from None
                inflow.end(ours)
            else:
                inflow.end(InternalError("its contents ended early", where=node.data_address))
                self._reached.add(node.index)
            return inflow.failed

        try:
            return self._retries.call(attempt)
        except ServerUnavailableError as error:
            return {array_fetch.number: error for array_fetch in array_fetches}

    def _holders(self, layouts: Sequence[Layout]) -> Iterator[dict[int, list[Shard]]]:
        """For each array, by node, the distinct shards requested from it; the load is spread evenly."""
        load = dict.fromkeys((node.index for node in self._info.nodes), 0)
        choices: dict[int, list[tuple[Shard, list[int]]]] = {}
        for layout in layouts:
            if id(layout) not in choices:
                choices[id(layout)] = [
                    (shard, [node.index for node in self._info.nodes if _holds(node, shard)])
                    for shard in distinct_shards(layout, layout.devices)
                ]
            shards_by_node: dict[int, list[Shard]] = {}
            for shard, nodes in choices[id(layout)]:
                index = nodes[0] if len(nodes) == 1 else min(nodes, key=load.__getitem__)
                load[index] += layout.shard_bytes
                shards_by_node.setdefault(index, []).append(shard)
            yield shards_by_node

    def _channel(self, node: NodeInfo) -> grpc.Channel:
        if node.index not in self._channels:
            self._channels[node.index] = self._dialer.dial(node.data_address)
        return self._channels[node.index]

    def _call_nodes(self, nodes: Sequence[NodeInfo], act: Callable[[NodeInfo], None]) -> None:
        """`act(node)` on all nodes at the same time; the first failure is raised."""
        if len(nodes) == 1:
            act(nodes[0])
            return
        for future in [self._pool.submit(act, node) for node in nodes]:
            future.result()


class _ShardAssembler:
    """Distributes one run of bytes: the shards of arrays, one after another."""

    def __init__(self, fetches: Iterable[_ArrayFetch]) -> None:
        self.failed: dict[int, ShardwrightError] = {}
        self._targets = deque((fetch.number, fetch.stored, shard) for fetch in fetches for shard in fetch.shards)
        self._left: np.ndarray | None = None  # what has yet to come of the first target, once some has
        self._staged: np.ndarray | None = None  # that target, or in its place what does not lie there in one run

    def fail(self, number: int, error: ShardwrightError) -> None:
        """None of an array's bytes will come."""
        self.failed.setdefault(number, error)

    def end(self, error: ShardwrightError) -> None:
        """Ends the run: incomplete arrays fail with `error`."""
        self.take(memoryview(b""))
        for number, _, _ in self._targets:
            self.fail(number, error)

    def take(self, chunk: memoryview) -> None:
        """Raises InternalError on excess bytes."""
        data = np.frombuffer(chunk, np.uint8)
        while self._targets:
            number, stored, shard = self._targets[0]
            if number not in self.failed:
                index: tuple[Any, ...] = (..., *shard.slices)  # an array, also of a scalar
                data = self._fill(stored[index], data)
                if self._left is not None:
                    return
            self._targets.popleft()
        if data.size:
            raise InternalError(f"{data.size} bytes more than were asked for")

    def _fill(self, region: np.ndarray, data: np.ndarray) -> np.ndarray:
        """Puts bytes into the first target; returns the rest of them. Afterwards `_left` is None when the target is
        full.
        """
        if self._left is None:
            self._staged = region if region.flags.c_contiguous else np.empty(region.shape, region.dtype)
            self._left = self._staged.reshape(-1).view(np.uint8)
        count = min(self._left.size, data.size)
        self._left[:count] = data[:count]
        self._left = self._left[count:]
        if not self._left.size:
            self._left = None
            if self._staged is not None and not region.flags.c_contiguous:
                region[...] = self._staged
            self._staged = None
        return data[count:]


def _contents(
    uploads: Iterable[Upload],
    shards_by_layout: dict[int, tuple[Shard, ...]],
    announced: master_pb2.PutArraysRequest,
) -> Iterator[memoryview]:
    """Shards one after another; each array is added to `announced` before its first one."""
    numbers: dict[int, int] = {}
    for upload in uploads:
        key, shards = id(upload.layout), shards_by_layout[id(upload.layout)]
        if key not in numbers:
            numbers[key] = len(numbers)
            announced.layouts.append(wire.layout_to_proto(upload.layout))
        devices = [shard.holders[0] for shard in shards]
        announced.arrays.add(array_id=upload.array_id, layout=numbers[key], devices=devices)
        for shard in shards:
            yield as_bytes(slice_stored(upload.value, upload.layout, shard.slices))


def _holds(node: NodeInfo, shard: Shard) -> bool:
    return any(position in node.devices for position in shard.holders)


def _holder(node: NodeInfo, shard: Shard) -> int:
    return next(position for position in shard.holders if position in node.devices)


def as_bytes(array: np.ndarray) -> memoryview:
    """Contents in C order; also of dtypes unknown to numpy's buffer protocol."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
