"""A worker's share of snapshots: parts of arrays, kept by two daemons and taken back after a loss.

A snapshot is a numbered step that begins to copy this process' parts off its devices. While training goes on, they
arrive, and go to the daemon of this node and to that of the next one: either node may be lost. Of equal shards on
several processes one is kept, of another process from array to array.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import grpc
import jax
import numpy as np

from shardwright.errors import (
    ArrayError,
    DeadlineError,
    ServerUnavailableError,
    SessionError,
    ShardwrightError,
    SnapshotLostError,
)
from shardwright.log_lines import fields
from shardwright.plans.layouts import Layout, distinct_shards
from shardwright.proto.v1 import master_pb2, worker_pb2
from shardwright.protocol import wire
from shardwright.protocol.chunked_messages import ChunkedMessage, cut_chunks, fill, intact, parser_of, serializer_of
from shardwright.protocol.snapshot_parts import SNAPSHOT_KEY, SNAPSHOTS, keys_of, parts_of
from shardwright.server.runtime.arrays import ArrayStore, copy_shard_to_host, from_pieces, local_positions
from shardwright.server.runtime.incoming_arrays import allocate_aligned
from shardwright.server.runtime.relayout import Relayout, StoredSection
from shardwright.server.runtime.resharding import RowSection
from shardwright.server.security import Protection
from shardwright.server.tuning import COPIES, DAEMON_TIMEOUT_S, DAEMON_TRANSFER_TIMEOUT_S
from shardwright.tuning import CHUNK_BYTES
from shardwright.xla.jax_shardings import mesh_devices

_log = logging.getLogger("shardwright.server")

T = TypeVar("T")
#: (array id, number of the distinct shard).
PartKey = tuple[int, int]
#: (sequence, error, bytes stored): a command was carried out.
OnDone = Callable[[int, ShardwrightError | None, int], None]


@dataclass(frozen=True, slots=True)
class _Part:
    """A shard to keep, and a device of this process that holds it. data: None where the daemons have it already."""

    layout: Layout
    position: int
    data: jax.Array | None


class SnapshotWorker:
    """One per executor process. `copy`, `restore`, `carry_out` and `forget` are called by its command thread."""

    def __init__(self, store: ArrayStore, done: OnDone, protection: Protection) -> None:
        self._store = store
        self._done = done
        self._protection = protection
        self._lock = threading.Lock()
        self._copied: dict[str, tuple[int, dict[PartKey, _Part]]] = {}  # by session: of its snapshot under way
        self._stored: dict[str, set[int]] = {}  # by session: arrays that the daemons have
        self._kept: dict[str, dict[int, int]] = {}  # by session: bytes of the newest that was stored, by its number
        self._daemons: dict[tuple[str, str], _DaemonClient] = {}  # by address and key
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="snapshots")

    # ---- taking one ------------------------------------------------------------------------

    def copy(self, step: master_pb2.RunStepsRequest) -> None:
        """Begin to copy this process' parts of the arrays off the devices; steps after it may reuse their buffers."""
        with self._lock:
            before = set(self._stored.get(step.session_id, ()))
        here = [(array_id, self._store.find(step.session_id, array_id)) for array_id in step.arguments]
        parts = {
            (array_id, number): _Part(
                layout=stored.layout,
                position=position,
                data=None if array_id in before else copy_shard_to_host(stored, position),
            )
            for array_id, stored in here
            if stored is not None
            for number, position in owned_shards(stored.layout, array_id)
        }
        with self._lock:
            self._copied[step.session_id] = step.number, parts

    def carry_out(self, command: worker_pb2.ExecutorCommand) -> None:
        """Store what was copied, in the background; answered when it is done."""
        self._pool.submit(self._carry_out, command)

    def forget(self, session_id: str) -> None:
        """The session is closed."""
        with self._lock:
            self._copied.pop(session_id, None)
            self._stored.pop(session_id, None)
            self._kept.pop(session_id, None)

    def _carry_out(self, command: worker_pb2.ExecutorCommand) -> None:
        error, stored = None, 0
        try:
            stored = self._keep(command.store_snapshot)
        except Exception as caught:
            error = wire.to_shardwright_error(caught)
        self._done(command.sequence, error, stored)

    def _keep(self, order: worker_pb2.StoreSnapshot) -> int:
        """Bytes that the daemons hold of this process' parts."""
        session_id = order.session_id
        with self._lock:
            if order.number in self._kept.get(session_id, {}):  # for a master before this one
                return self._kept[session_id][order.number]
            number, parts = self._copied.pop(session_id, (0, {}))
            self._stored.pop(session_id, None)  # until it went well
        if number != order.number:
            raise SessionError("nothing was copied for this snapshot")
        sizes = {key: part.layout.shard_bytes for key, part in parts.items()}
        copies, failures = 0, list[ShardwrightError]()
        for peer in _from_own(order.peers):  # one that does not answer leaves its copy to the next
            if copies == COPIES:
                break
            try:
                daemon = self._daemon(peer)
                missing = daemon.offer(order, sizes)
                daemon.put(session_id, missing, (self._contents(session_id, key, parts[key]) for key in missing))
                copies += 1
            except (ServerUnavailableError, DeadlineError) as error:
                failures.append(error)
        if not copies and failures:
            raise failures[0]
        for failure in failures:
            about = fields(session=session_id, step=number)
            _log.warning("snapshot of step %d: %s", number, failure.message, extra=about)
        with self._lock:
            self._stored[session_id] = {array_id for array_id, _ in parts}
            kept_bytes = copies * sum(sizes.values())
            self._kept[session_id] = {number: kept_bytes}
        return kept_bytes

    def _contents(self, session_id: str, key: PartKey, part: _Part) -> np.ndarray:
        if part.data is not None:
            return np.asarray(part.data)
        (stored,) = self._store.get_all(session_id, [key[0]])  # a daemon lost what it had
        return np.asarray(copy_shard_to_host(stored, part.position))

    def _daemon(self, peer: worker_pb2.Peer) -> _DaemonClient:
        if not peer.snapshot_address:
            raise ServerUnavailableError("a node's daemon is not there")
        place = peer.snapshot_address, peer.snapshot_key
        if place not in self._daemons:
            self._daemons[place] = _DaemonClient(self._protection, *place)
        return self._daemons[place]

    # ---- taking it back --------------------------------------------------------------------

    def restore(self, step: master_pb2.RunStepsRequest, peers: Sequence[worker_pb2.Peer]) -> None:
        """Put this process' shards of a snapshot's arrays on its devices again."""
        order = step.restore_snapshot
        layouts = {
            array_id: wire.layout_from_proto(layout)
            for array_id, layout in zip(step.outputs, order.layouts, strict=True)
        }
        if order.stored:
            self._restore_elsewhere(step, layouts, peers)
            return
        needed = {array_id: local_shards(layout) for array_id, layout in layouts.items()}
        sizes = {
            (array_id, number): layouts[array_id].shard_bytes
            for array_id, numbers in needed.items()
            for number in numbers
        }
        contents = self._fetch(step.session_id, order.snapshot, sizes, peers)
        arrays = []
        for array_id, numbers in needed.items():
            if numbers:
                layout = layouts[array_id]
                pieces = [
                    contents[array_id, number].view(layout.dtype).reshape(layout.shard_shape) for number in numbers
                ]
                arrays.append((array_id, from_pieces(pieces, layout)))
        self._store.add(step.session_id, arrays)

    def _restore_elsewhere(
        self, step: master_pb2.RunStepsRequest, layouts: Mapping[int, Layout], peers: Sequence[worker_pb2.Peer]
    ) -> None:
        """The same, of arrays that lie otherwise than they were stored."""
        order, here = step.restore_snapshot, local_positions()
        relayouts = {
            array_id: _relayout_of(stored, layout)
            for (array_id, layout), stored in zip(layouts.items(), order.stored, strict=True)
        }
        sizes = {key: size for relayout in relayouts.values() for key, size in relayout.part_sizes(here).items()}
        contents = self._fetch(step.session_id, order.snapshot, sizes, peers)
        arrays = []
        for array_id, relayout in relayouts.items():
            pieces = relayout.make(here, contents)
            if pieces:
                arrays.append((array_id, from_pieces(pieces, layouts[array_id])))
        self._store.add(step.session_id, arrays)

    def _fetch(
        self, session_id: str, number: int, sizes: Mapping[PartKey, int], peers: Sequence[worker_pb2.Peer]
    ) -> dict[PartKey, np.ndarray]:
        if not sizes:
            return {}
        held: list[tuple[_DaemonClient, set[PartKey]]] = []
        silent: list[int] = []
        for peer in _from_own(peers):
            try:
                daemon = self._daemon(peer)
                held.append((daemon, daemon.list_parts(session_id, number)))
            except (ServerUnavailableError, DeadlineError):
                silent.append(peer.node)
        lost = set(sizes).difference(*(parts for _, parts in held))
        if lost:
            raise SnapshotLostError(
                f"the snapshot of step {number} is lost: both nodes that held {len(lost)} of its parts ended"
                + (f"; nodes {', '.join(map(str, silent))} do not answer" if silent else ""),
                remedy="restore a checkpoint (step.restore), or run init again; save checkpoints besides",
            )
        contents: dict[PartKey, np.ndarray] = {}
        for daemon, parts in held:  # this node's first
            wanted = {key: size for key, size in sizes.items() if key in parts and key not in contents}
            contents.update(daemon.fetch(session_id, wanted))
        return contents


class _DaemonClient:
    """Calls of one daemon's Snapshots service. Raises our errors."""

    def __init__(self, protection: Protection, address: str, key: str) -> None:
        self._address = address
        self._metadata = (*protection.metadata, (SNAPSHOT_KEY, key))
        self._channel = protection.channel(address)

    def offer(self, order: worker_pb2.StoreSnapshot, sizes: Mapping[PartKey, int]) -> list[PartKey]:
        """The parts that it has not got."""
        request = worker_pb2.OfferPartsRequest(
            session_id=order.session_id, number=order.number, arrays=parts_of(sizes, sizes), order=order.order
        )
        call = self._channel.unary_unary(
            f"/{SNAPSHOTS}/OfferParts",
            request_serializer=worker_pb2.OfferPartsRequest.SerializeToString,
            response_deserializer=worker_pb2.OfferPartsReply.FromString,
        )
        return list(
            keys_of(self._ask(lambda: call(request, timeout=DAEMON_TIMEOUT_S, metadata=self._metadata)).missing)
        )

    def put(self, session_id: str, keys: Sequence[PartKey], contents: Iterable[np.ndarray]) -> None:
        """Send parts; contents: of each of them, in this order."""
        if not keys:
            return
        call = self._channel.stream_unary(
            f"/{SNAPSHOTS}/PutParts",
            request_serializer=serializer_of,
            response_deserializer=worker_pb2.PutPartsReply.FromString,
        )

        def requests() -> Iterator[ChunkedMessage[worker_pb2.PutPartsRequest]]:
            first = worker_pb2.PutPartsRequest(session_id=session_id, arrays=parts_of(keys))
            yield ChunkedMessage(message=first)
            rest = worker_pb2.PutPartsRequest(session_id=session_id)
            for pieces in cut_chunks(map(_bytes_of, contents), CHUNK_BYTES):
                yield ChunkedMessage(message=rest, pieces=pieces)

        self._ask(lambda: call(requests(), timeout=DAEMON_TRANSFER_TIMEOUT_S, metadata=self._metadata))

    def list_parts(self, session_id: str, number: int) -> set[PartKey]:
        request = worker_pb2.ListPartsRequest(session_id=session_id, number=number)
        call = self._channel.unary_unary(
            f"/{SNAPSHOTS}/ListParts",
            request_serializer=worker_pb2.ListPartsRequest.SerializeToString,
            response_deserializer=worker_pb2.ListPartsReply.FromString,
        )
        return set(keys_of(self._ask(lambda: call(request, timeout=DAEMON_TIMEOUT_S, metadata=self._metadata)).arrays))

    def fetch(self, session_id: str, sizes: Mapping[PartKey, int]) -> dict[PartKey, np.ndarray]:
        """Contents of parts, as bytes; sizes: of each."""
        if not sizes:
            return {}
        request = worker_pb2.FetchPartsRequest(session_id=session_id, arrays=parts_of(sizes))
        call = self._channel.unary_stream(
            f"/{SNAPSHOTS}/FetchParts",
            request_serializer=worker_pb2.FetchPartsRequest.SerializeToString,
            response_deserializer=parser_of(worker_pb2.FetchPartsReply),
        )
        contents = {key: allocate_aligned(size) for key, size in sizes.items()}
        empty = deque(part for part in contents.values() if part.size)

        def receive() -> bool:
            """Whether all came, and no more."""
            for reply in intact(call(request, timeout=DAEMON_TRANSFER_TIMEOUT_S, metadata=self._metadata)):
                for piece in reply.pieces:
                    if fill(empty, np.frombuffer(piece, np.uint8)).size:
                        return False
            return not empty

        if not self._ask(receive):
            raise ArrayError(
                "parts of a snapshot are not of the sizes that their layouts say",
                where=self._address,
                remedy="name the layouts that the arrays had when the snapshot was taken",
            )
        return contents

    def _ask(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except grpc.RpcError as error:
            wire.raise_from_rpc(error, where=self._address)


def owned_shards(layout: Layout, array_id: int) -> Iterator[tuple[int, int]]:
    """(number, position of a device here) of the distinct shards that this process keeps."""
    devices, here = mesh_devices(), jax.process_index()
    for number, shard in enumerate(distinct_shards(layout, layout.devices)):
        processes = sorted({devices[position].process_index for position in shard.holders})
        if processes[(array_id + number) % len(processes)] == here:
            yield number, next(position for position in shard.holders if devices[position].process_index == here)


def local_shards(layout: Layout) -> tuple[int, ...]:
    """Numbers of the distinct shards that devices of this process hold, in the order that `from_pieces` takes."""
    numbers = {
        position: number
        for number, shard in enumerate(distinct_shards(layout, layout.devices))
        for position in shard.holders
    }
    return tuple(numbers[shard.holders[0]] for shard in distinct_shards(layout, local_positions()))


def _relayout_of(stored: master_pb2.StoredArray, layout: Layout) -> Relayout:
    sections = [
        StoredSection(array_id, RowSection(wire.layout_from_proto(part.layout), part.first_row))
        for array_id, part in zip(stored.ids, stored.parts, strict=True)
    ]
    return Relayout(sections, RowSection(layout, stored.first_row))


def _from_own(peers: Sequence[worker_pb2.Peer]) -> Iterator[worker_pb2.Peer]:
    """Nodes in the order of the ring, this process' first."""
    position = next(iter(local_positions()))
    own = next(
        number
        for number, peer in enumerate(peers)
        if peer.first_device <= position < peer.first_device + peer.device_count
    )
    return itertools.chain(peers[own:], peers[:own])


def _bytes_of(array: np.ndarray) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
