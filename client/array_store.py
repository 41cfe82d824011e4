"""A session's arrays on the servers: their ids, contents, layouts and releases."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from shardwright.client.array_reader import ArrayReader
from shardwright.client.arrays import RemoteArray
from shardwright.client.cluster_view import ClusterView
from shardwright.client.handles import Handles
from shardwright.client.placement import Placement, RowParts, parts_of
from shardwright.client.recovery import Recovery
from shardwright.client.releases import Releases
from shardwright.client.steady_calls import SteadyCalls
from shardwright.client.transfer import ArrayTransfer, Upload
from shardwright.errors import SessionError, ShardwrightError
from shardwright.plans.layouts import Layout

T = TypeVar("T")


class ArrayStore:
    """Of one session, which it keeps open: handles hold it.

    handles: of arrays that have places. releases: arrays to be freed. recovery: looks after what is written and read.
    session: ends with the last handle.
    """

    def __init__(
        self,
        cluster: ClusterView,
        transfer: ArrayTransfer,
        recovery: Recovery,
        calls: SteadyCalls,
        releases: Releases,
        handles: Handles,
        session: object,
    ) -> None:
        taken_up = cluster.master.taken_up
        self.cluster = cluster
        self.recovery = recovery
        self.releases = releases
        self.handles = handles
        self._calls = calls
        self._session = session
        self._reader = ArrayReader(transfer)
        self._ids = itertools.count(taken_up.next_array_id if taken_up is not None else 1)
        self._layouts: dict[Layout, Layout] = {}
        self._rows: dict[RowParts, RowParts] = {}

    # ---- ids and layouts --------------------------------------------------------------

    def new_id(self) -> int:
        """A new array id, for a step's result."""
        return next(self._ids)

    def usable_ids(self, handle: RemoteArray) -> tuple[int, ...]:
        """Ids of a handle's parts, readable by a step. Raises the error behind an unusable handle."""
        if handle._store is not self:
            raise SessionError("an array of another session was passed to a step", remedy="pass np.asarray(handle)")
        if handle._deleted or (handle._result is not None and handle._result.error is not None):
            handle._require_ready()
        return handle._ids

    def free(self, *array_ids: int) -> None:
        """Frees arrays with the next step, or soon without one. Safe in destructors."""
        self.releases.add(*array_ids)

    def note_handle(self, handle: RemoteArray) -> None:
        """A handle has got its ids."""
        self.handles.add(handle)

    def intern(self, layout: Layout) -> Layout:
        """The layout of this session that equals it: equal ones are known by identity."""
        return self._layouts.setdefault(layout, layout)

    def intern_rows(self, place: RowParts) -> RowParts:
        """The same of an array that is kept in parts; their layouts are interned."""
        return self._rows.setdefault(place, place)

    # ---- contents ---------------------------------------------------------------------

    def upload(self, values: Sequence[tuple[np.ndarray, Placement]]) -> list[tuple[int, ...]]:
        """Ids of new arrays with these contents, one per part of the placement."""
        new_ids, uploads = [], []
        for value, place in values:
            parts = [
                Upload(array_id=self.new_id(), value=part, layout=layout)
                for part, layout in zip(_parts_at(value, place), (layout for layout, _ in parts_of(place)), strict=True)
            ]
            new_ids.append(tuple(part.array_id for part in parts))
            uploads += parts
        try:
            self.recovery.put(uploads)
        except ShardwrightError:
            self.releases.add(*(upload.array_id for upload in uploads))
            raise
        return new_ids

    def announce(self, handle: RemoteArray) -> None:
        """It will be read; see `ArrayReader`."""
        self._reader.announce(handle)

    def group_with_announced(self, handle: RemoteArray) -> dict[int, Placement | None]:
        """A pending handle, and the announced pending ones, in the form of `Pending.materialize`."""
        return {
            id(pending): None for pending in (handle, *self._reader.list_announced()) if pending._pending is not None
        }

    def fetch(self, handle: RemoteArray) -> np.ndarray:
        """Contents of a computed array."""
        self.cluster.require_open()
        return self.recovery.retry(lambda: self._reader.read(handle))

    def steadily(self, act: Callable[[], T]) -> T:
        """See `SteadyCalls.run`."""
        return self._calls.run(act)


def _parts_at(value: np.ndarray, place: Placement) -> list[np.ndarray]:
    return [value[start:stop] for start, stop in place.bounds] if isinstance(place, RowParts) else [value]
