"""Arrays arriving at the data port in runs of bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np

from shardwright.errors import ArrayError, ResourceLimitError
from shardwright.plans.layouts import Layout, distinct_shards
from shardwright.protocol.chunked_messages import fill
from shardwright.server.runtime.arrays import StoredArray, from_pieces, local_positions

#: XLA:CPU takes memory that is aligned so as it is, and copies other memory.
ALIGNMENT_BYTES = 64


class IncomingArray:
    """An array whose shards at `devices` come one after another; each goes to all holders on this node.

    Raises ArrayError if the devices do not fit the layout, ResourceLimitError past `limit_bytes`.
    """

    def __init__(self, array_id: int, layout: Layout, devices: Iterable[int], *, limit_bytes: int) -> None:
        named = tuple(devices)
        self.size_bytes = layout.shard_bytes * len(named)
        if self.size_bytes > limit_bytes:
            raise ResourceLimitError(
                f"{self.size_bytes} bytes in one upload, the limit is {limit_bytes}",
                where=f"array {array_id}",
                remedy="split the array over more nodes, or raise the server's limit",
            )
        self.array_id = array_id
        self.layout = layout
        self._order = _order_of_pieces(layout, named)
        self._pieces = [allocate_aligned(layout.shard_bytes) for _ in named]
        self._empty = deque(piece for piece in self._pieces if piece.size)  # parts of pieces that have yet to come

    @property
    def is_complete(self) -> bool:
        return not self._empty

    def take(self, data: np.ndarray) -> np.ndarray:
        """Fill pieces with bytes; returns the rest."""
        return fill(self._empty, data)

    def discard(self) -> None:
        """Free its memory."""
        self._pieces.clear()
        self._empty.clear()

    def to_stored_array(self) -> StoredArray:
        """The array on this node's devices."""
        layout = self.layout
        pieces = [self._pieces[number].view(layout.dtype).reshape(layout.shard_shape) for number in self._order]
        return from_pieces(pieces, layout)


class IncomingArrays:
    """Many of them, the contents of all in one run."""

    def __init__(self) -> None:
        self._waiting: deque[IncomingArray] = deque()
        self._announced_bytes = 0
        self._received_bytes = 0
        self._complete_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Contents of arrays that are not complete."""
        return self._received_bytes - self._complete_bytes

    def announce(self, array: IncomingArray) -> None:
        self._waiting.append(array)
        self._announced_bytes += array.size_bytes

    def take(self, chunk: bytes | memoryview) -> Iterator[tuple[int, StoredArray]]:
        """(id, array) of arrays completed by the chunk. Raises ArrayError on unannounced bytes."""
        data = np.frombuffer(chunk, np.uint8)
        self._received_bytes += data.size
        if self._received_bytes > self._announced_bytes:
            raise ArrayError(f"more than the {self._announced_bytes} bytes that were announced")
        while self._waiting:
            data = self._waiting[0].take(data)
            if not self._waiting[0].is_complete:
                return
            array = self._waiting.popleft()
            self._complete_bytes += array.size_bytes
            yield array.array_id, array.to_stored_array()

    def discard(self) -> None:
        """Free all that came and is not complete, whoever still refers to it."""
        for array in self._waiting:
            array.discard()
        self._waiting.clear()

    def require_none(self) -> None:
        """Raises ArrayError if the contents ended early."""
        if self._waiting:
            raise ArrayError(f"the upload ended after {self._received_bytes} of {self._announced_bytes} bytes")


def _order_of_pieces(layout: Layout, named: tuple[int, ...]) -> tuple[int, ...]:
    """Of each distinct shard of this node, which of the `named` devices' it is."""
    shards = distinct_shards(layout, local_positions())
    if not shards:
        raise ArrayError(f"devices {layout.devices} are not on this node", remedy="send shards to nodes that hold them")
    at = {position: number for number, position in enumerate(named)}
    order = []
    for shard in shards:
        sent = next((at[position] for position in shard.holders if position in at), None)
        if sent is None:
            raise ArrayError(f"the shard of device {shard.holders[0]} is missing", remedy="send each distinct shard")
        order.append(sent)
    return tuple(order)


def allocate_aligned(size_bytes: int) -> np.ndarray:
    """Uninitialized memory."""
    memory = np.empty(size_bytes + ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT_BYTES
    return memory[start : start + size_bytes]
