"""The datasets of all sessions on this worker: which rows it needs, who reads them, and their way to the devices.

A reader belongs to one dataset and one demand: the same rows of the same leaves. Readers are made when they are first
asked for, wherever that is: a restart, a jump and a replay after a loss are the same to them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np

from shardwright.errors import ArrayError, DatasetError, ShardwrightError
from shardwright.plans.layouts import Layout, distinct_shards
from shardwright.plans.shard_pieces import shard_pieces, shift_rows
from shardwright.proto.v1 import master_pb2
from shardwright.protocol import wire
from shardwright.server.black_box import BlackBox, Work
from shardwright.server.runtime.arrays import ArrayStore, StoredArray, from_pieces, local_positions
from shardwright.server.runtime.datasets.functions import DatasetSpec, open_batches
from shardwright.server.runtime.datasets.reader import BatchReader, Demand
from shardwright.server.runtime.transport import StopSignal
from shardwright.server.tuning import MAX_HELD, MAX_READERS

#: Rows of a batch, at most.
MAX_ROWS = 1 << 26
#: Whoever wants to know what a batch is like reads its first row.
_FIRST_ROW = Demand(rows=np.zeros(1, np.int64).tobytes(), leaves=None)


@dataclass(frozen=True, slots=True)
class BatchPart:
    """A leaf of a batch, or its rows from `first_row` on, as an array on the devices."""

    leaf: int
    layout: Layout
    first_row: int

    @classmethod
    def of(cls, message: master_pb2.BatchPart) -> BatchPart:
        return cls(message.leaf, wire.layout_from_proto(message.layout), message.first_row)


class DatasetReaders:
    """One per executor process. `read` is called by its command thread, `await_batch` by any.

    box: where readers write down what they are busy with.
    """

    def __init__(self, store: ArrayStore, allowed_modules: Sequence[str], box: BlackBox | None = None) -> None:
        self._box = box
        self._refused: dict[tuple[str, str], ShardwrightError] = {}  # datasets by session and key
        self._store = store
        self._allowed = tuple(allowed_modules)
        self._lock = threading.Lock()
        self._readers: dict[tuple[str, DatasetSpec, Demand], BatchReader] = {}
        self._reading = ""

    @property
    def place(self) -> str:
        """What `read` is busy with, in words; "" where it is not."""
        return self._reading

    # ---- steps -----------------------------------------------------------------------------

    def read(self, step: master_pb2.RunStepsRequest, stop: StopSignal) -> None:
        """Make this process' part of the step's outputs. Raises DatasetError, or the error of `stop`."""
        order = step.read_batch
        parts = tuple(map(BatchPart.of, order.parts))
        demand, spec = find_demand(parts), DatasetSpec.of(order.dataset)
        rows, leaves = np.zeros(0, np.int64), list[np.ndarray | None]()  # where devices hold nothing, or padding alone
        if demand is not None:
            rows, leaves = demand.row_numbers, self._take(step.session_id, spec, demand, order.position, stop)
        arrays = [
            (array_id, _put(part, leaves, rows, spec.function))
            for array_id, part in zip(step.outputs, parts, strict=True)
            if _is_here(part)
        ]
        self._store.add(step.session_id, arrays)

    def _take(
        self, session_id: str, spec: DatasetSpec, demand: Demand, position: int, stop: StopSignal
    ) -> list[np.ndarray | None]:
        self._reading = f"reading batch {position} of {spec.function}"
        try:
            reader = self._reader(session_id, spec, demand, position=position, first=position)
            return reader.take(position, partial(_raise_error_of, stop))
        finally:
            self._reading = ""

    # ---- calls -----------------------------------------------------------------------------

    def await_batch(self, request: master_pb2.AwaitBatchRequest, timeout_s: float) -> tuple[int, bool, Any]:
        """See `AwaitBatchReply`: (ready, whether the data end there, structure of a batch of one row or None).

        Raises DatasetError, and SessionError where the session is not open.
        """
        self._store.require(request.session_id)
        parts = tuple(map(BatchPart.of, request.parts))
        demand = find_demand(parts) if parts else _FIRST_ROW
        if demand is None:
            return request.position + 1, False, None
        if request.position - request.first >= MAX_HELD:
            raise DatasetError(
                f"{MAX_HELD} batches were taken and no step has read them",
                where=request.dataset.function,
                remedy="use a batch before the next is taken, or go on elsewhere with seek()",
            )
        spec = DatasetSpec.of(request.dataset)
        reader = self._reader(request.session_id, spec, demand, position=request.position, first=request.first)
        reader.skip_to(request.first)
        ready, is_end = reader.wait_for(request.position, timeout_s)
        structure = reader.structure if not parts and ready > request.position else None
        return ready, is_end, structure

    def close(self, session_id: str, dataset_id: str) -> None:
        """End the readers of a dataset."""
        self._end(lambda session, spec: session == session_id and spec.dataset_id == dataset_id)

    def refuse(self, session_id: str, errors: Mapping[str, ShardwrightError]) -> None:
        """Datasets of a session, by their keys, that shall not be read any more, and why."""
        with self._lock:
            self._refused |= {(session_id, key): error for key, error in errors.items()}

    def forget(self, session_id: str) -> None:
        """The session is closed."""
        with self._lock:
            self._refused = {key: error for key, error in self._refused.items() if key[0] != session_id}
        self._end(lambda session, _: session == session_id)

    # ---- readers ---------------------------------------------------------------------------

    def _reader(self, session_id: str, spec: DatasetSpec, demand: Demand, *, position: int, first: int) -> BatchReader:
        """The reader that comes to batch `position`, with none before `first` in between; a new one begins there.

        Raises the error of a dataset that is refused.
        """
        key = session_id, spec, demand
        with self._lock:
            if self._refused and (refused := self._refused.get((session_id, spec.key))) is not None:
                raise refused
            reader = self._readers.get(key)
            if reader is None or not reader.reaches(position, first):
                if reader is not None:
                    reader.retire()
                reader = BatchReader(
                    spec,
                    demand,
                    first,
                    lambda start, rows: open_batches(spec, start, rows, self._allowed),
                    reading=lambda batch: self._note(session_id, spec, batch),
                )
                self._readers[key] = reader
                self._end_unused(session_id, spec, demand)
            return reader

    def _note(self, session_id: str, spec: DatasetSpec, batch: int) -> AbstractContextManager[None]:
        if self._box is None:
            return nullcontext()
        return self._box.at(Work(session_id=session_id, key=spec.key, function=spec.function[:200], batch=batch))

    def _end_unused(self, session_id: str, spec: DatasetSpec, demand: Demand) -> None:
        """End what a new reader makes needless; the caller holds the lock."""
        if demand is not _FIRST_ROW and (scout := self._readers.pop((session_id, spec, _FIRST_ROW), None)) is not None:
            scout.retire()
        mine = sorted((key for key in self._readers if key[0] == session_id), key=lambda key: self._readers[key].used_s)
        for key in mine[: max(0, len(mine) - MAX_READERS)]:
            self._readers.pop(key).retire()

    def _end(self, is_ended: Callable[[str, DatasetSpec], bool]) -> None:
        with self._lock:
            ended = [self._readers.pop(key) for key in list(self._readers) if is_ended(key[0], key[1])]
        for reader in ended:
            reader.close()


def _raise_error_of(stop: StopSignal) -> None:
    if stop.error is not None:
        raise stop.error


# ---- rows and pieces -------------------------------------------------------------------------
def _is_here(part: BatchPart) -> bool:
    return bool(distinct_shards(part.layout, local_positions()))


def _boxes(part: BatchPart) -> Iterator[tuple[slice, ...]]:
    """The boxes of a leaf that this process' devices hold."""
    for shard in distinct_shards(part.layout, local_positions()):
        for piece in shard_pieces(part.layout, shard.holders[0]):
            yield shift_rows(piece.box, part.first_row)


@lru_cache(maxsize=256)
def find_demand(parts: tuple[BatchPart, ...]) -> Demand | None:
    """What this process needs of a batch; None: nothing. Raises ArrayError on an array without rows."""
    runs: set[tuple[int, int]] = set()
    leaves: set[int] = set()
    for part in parts:
        for box in _boxes(part):
            if not box or box[0].stop > MAX_ROWS:
                raise ArrayError(f"an array of a batch has rows, and at most {MAX_ROWS}")
            runs.add((box[0].start, box[0].stop))
            leaves.add(part.leaf)
    if not runs:
        return None
    rows = np.unique(np.concatenate([np.arange(start, stop, dtype=np.int64) for start, stop in sorted(runs)]))
    return Demand(rows=rows.tobytes(), leaves=frozenset(leaves))


def _put(part: BatchPart, leaves: Sequence[np.ndarray | None], rows: np.ndarray, function: str) -> StoredArray:
    """An array on this process' devices; padding is zeros."""
    layout, data = part.layout, []
    source = leaves[part.leaf] if part.leaf < len(leaves) else None
    wanted = layout.user_shape[1:]
    for shard in distinct_shards(layout, local_positions()):
        host = np.zeros(layout.shard_shape, layout.dtype)
        for piece in shard_pieces(layout, shard.holders[0]):
            if source is None or source.shape[1:] != wanted or not np.can_cast(source.dtype, layout.dtype, "same_kind"):
                actual = "missing" if source is None else f"{source.dtype} with rows of shape {list(source.shape[1:])}"
                raise DatasetError(
                    f"array {part.leaf} is {actual}; in the first batch it was {layout.dtype} with rows of shape "
                    f"{list(wanted)}",
                    where=function,
                    remedy="yield the same structure and types each time, on every worker",
                )
            box = shift_rows(piece.box, part.first_row)
            start = int(np.searchsorted(rows, box[0].start))
            block = source[(slice(start, start + box[0].stop - box[0].start), *box[1:])]
            host[piece.within] = block.reshape(host[piece.within].shape)
        data.append(host)
    return from_pieces(data, layout)
