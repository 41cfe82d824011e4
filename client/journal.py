"""What a session's client must do again after a loss: everything sent since the last complete snapshot.

An array id stands for the same contents always. Arrays are made again under their old ids, so that handles stay as
they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwright.plans.layouts import Layout
from shardwright.proto.v1 import master_pb2

if TYPE_CHECKING:
    from shardwright.client.calls import Call
    from shardwright.client.step_result import StepResult
    from shardwright.client.transfer import Upload

#: Arrays by id: how they lie.
Layouts = dict[int, Layout]


@dataclass(frozen=True, slots=True)
class SentStep:
    """A request, its outcome, and the arrays that it takes over.

    call: what made it; None: it has no part of its own in a replay on another cluster. released: names of arrays that
    it released, by their first ids.
    """

    request: master_pb2.RunStepsRequest
    result: StepResult
    consumed: tuple[int, ...]
    call: Call | None = None
    released: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SentArrays:
    """Uploaded arrays, with contents of their own."""

    uploads: tuple[Upload, ...]


@dataclass(frozen=True, slots=True)
class ReleasedArrays:
    """Arrays released without a step. names: the first ids of their names."""

    ids: tuple[int, ...]
    names: tuple[int, ...] = ()


Entry = SentStep | SentArrays | ReleasedArrays


class Journal:
    """Entries in order of sending, while `is_on`; and at any time the existing arrays.

    position: number of entries so far, dropped ones included. names: of arrays that lie elsewhere by now, by the first
    id that they have there; see `relocation.py`. epoch: number of clusters that the session has had before. oldest:
    that of the first entry.
    """

    def __init__(self) -> None:
        self.live: Layouts = {}
        self.names: dict[int, tuple[int, ...]] = {}
        self.epoch = 0
        self.is_on = False
        self._epochs: deque[int] = deque()
        self._entries: deque[Entry] = deque()
        self._first = 0

    @property
    def position(self) -> int:
        return self._first + len(self._entries)

    @property
    def entries(self) -> tuple[Entry, ...]:
        return tuple(self._entries)

    @property
    def oldest(self) -> int:
        return self._epochs[0] if self._epochs else self.epoch

    @property
    def size_bytes(self) -> int:
        """Host memory of the contents in it."""
        return sum(_size_bytes(entry) for entry in self._entries)

    def add_step(
        self,
        request: master_pb2.RunStepsRequest,
        result: StepResult,
        new_arrays: Iterable[tuple[int, Layout]],
        consumed: Sequence[int],
        call: Call | None = None,
    ) -> None:
        """A step that was sent. new_arrays: arrays that ride along, and its outputs."""
        self._forget(request.released)
        self.live.update(new_arrays)
        self._forget(consumed)
        self._add(SentStep(request, result, tuple(consumed), call, self._first_ids(request.released)))

    def add_arrays(self, uploads: Sequence[Upload]) -> None:
        self.live.update((upload.array_id, upload.layout) for upload in uploads)
        self._add(SentArrays(tuple(uploads)))

    def add_release(self, ids: Sequence[int]) -> None:
        self._forget(ids)
        self._add(ReleasedArrays(tuple(ids), self._first_ids(ids)))

    def note(self, new_arrays: Iterable[tuple[int, Layout]], consumed: Iterable[int] = ()) -> None:
        """Arrays that are made and taken over by what is no entry: a replay."""
        self.live.update(new_arrays)
        self._forget(consumed)

    def _first_ids(self, ids: Iterable[int]) -> tuple[int, ...]:
        """Of the names of arrays."""
        return tuple(self.names[i][0] if i in self.names else i for i in ids)

    def drop_before(self, position: int) -> None:
        """Forget entries that a complete snapshot makes needless."""
        while self._entries and self._first < position:
            self._entries.popleft()
            self._epochs.popleft()
            self._first += 1

    def clear(self) -> None:
        """All arrays are gone, and will not be made again."""
        self.live.clear()
        self.is_on = False
        self.drop_before(self.position)

    def _add(self, entry: Entry) -> None:
        if self.is_on:
            self._entries.append(entry)
            self._epochs.append(self.epoch)

    def _forget(self, ids: Iterable[int]) -> None:
        for array_id in ids:
            self.live.pop(array_id, None)


def _size_bytes(entry: Entry) -> int:
    if isinstance(entry, SentArrays):
        return sum(upload.value.nbytes for upload in entry.uploads)
    if isinstance(entry, SentStep):
        return sum(len(array.data) for array in entry.request.inline_arguments)
    return 0
