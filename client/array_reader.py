"""Contents of handles; announced handles share a round trip."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from shardwright.client.limits import READ_AHEAD, READ_AHEAD_BYTES, READ_TOGETHER_BYTES
from shardwright.client.placement import RowParts, parts_of
from shardwright.errors import ArrayError, ShardwrightError

if TYPE_CHECKING:
    from shardwright.client.arrays import RemoteArray
    from shardwright.client.transfer import ArrayTransfer


class ArrayReader:
    """Reads handles of one session. Thread-safe.

    `jax.device_get` announces every leaf before it reads the first one. Contents fetched with another handle's wait in
    their handle until it is read. A handle unfit for a shared read is left to its own read, which raises.
    `jax.tree.map(np.asarray, state)` announces nothing: when results of one step are read one after another, their
    successors are announced automatically, twice as many each time.
    """

    def __init__(self, transfer: ArrayTransfer) -> None:
        self._transfer = transfer
        self._announced: weakref.WeakValueDictionary[int, RemoteArray] = weakref.WeakValueDictionary()  # by id()
        self._together = threading.Lock()
        self._last_step = 0  # number of the step of which a result was read last, and how many are to be read ahead
        self._ahead = 0

    def announce(self, handle: RemoteArray) -> None:
        """It will be read."""
        self._announced[id(handle)] = handle

    def list_announced(self) -> list[RemoteArray]:
        return list(self._announced.values())

    def read(self, handle: RemoteArray) -> np.ndarray:
        """Contents of a computed array."""
        is_expected = handle._read_ahead is not None or id(handle) in self._announced
        if not is_expected and not self._announce_next(handle):
            return self._read_alone(handle)
        with self._together:
            if handle._read_ahead is None:
                self._read_with_others(handle)
            contents, handle._read_ahead = handle._read_ahead, None
        return self._read_alone(handle) if contents is None else contents

    def _announce_next(self, handle: RemoteArray) -> bool:
        """Announces the results after a handle, if it was read right after another of its step; returns whether
        it did.
        """
        result = handle._result
        number = result.number if result is not None else 0
        self._ahead = min(max(1, 2 * self._ahead), READ_AHEAD) if number and number == self._last_step else 0
        self._last_step = number
        if result is None or not self._ahead:
            return False
        first = handle._ids[0] + 1
        for array_id in range(first, first + self._ahead):
            reference = result.handles.get(array_id)
            other = reference() if reference is not None else None
            if other is not None and other._read_ahead is None and _size_bytes(other) <= READ_AHEAD_BYTES:
                self.announce(other)
        return True

    def _read_alone(self, handle: RemoteArray) -> np.ndarray:
        contents = self._fetch([handle])[0]
        if isinstance(contents, ShardwrightError):
            raise contents
        return contents

    def _read_with_others(self, handle: RemoteArray) -> None:
        handles = list(self._take_batch(handle))
        for item in handles:
            self._announced.pop(id(item), None)
        for item, contents in zip(handles, self._fetch(handles), strict=True):
            if not isinstance(contents, ShardwrightError):
                item._read_ahead = contents

    def _take_batch(self, handle: RemoteArray) -> Iterator[RemoteArray]:
        """`handle`, and the other announced ones, up to the size limit."""
        yield handle
        room = READ_TOGETHER_BYTES - _size_bytes(handle)
        for other in self.list_announced():
            if other is handle or not other._is_computed:
                continue
            room -= _size_bytes(other)
            if room < 0:
                return
            yield other

    def _fetch(self, handles: list[RemoteArray]) -> list[np.ndarray | ShardwrightError]:
        parts = []
        for handle in handles:
            if handle._place is None:
                raise ArrayError("this array has not been placed yet")
            parts += [
                (array_id, layout) for array_id, (layout, _) in zip(handle._ids, parts_of(handle._place), strict=True)
            ]
        results = iter(self._transfer.fetch(parts))
        return [_join_parts([next(results) for _ in handle._ids], handle) for handle in handles]


def _size_bytes(handle: RemoteArray) -> int:
    return sum(layout.size_bytes for layout, _ in parts_of(handle._place)) if handle._place is not None else 0


def _join_parts(parts: list[np.ndarray | ShardwrightError], handle: RemoteArray) -> np.ndarray | ShardwrightError:
    """The array joined from these parts, or the error of a part."""
    arrays: list[np.ndarray] = []
    for part in parts:
        if isinstance(part, ShardwrightError):
            return part
        arrays.append(part)
    return np.concatenate(arrays) if isinstance(handle._place, RowParts) else arrays[0]
