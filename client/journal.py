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
    from shardwright.client.stream import StepResult
    from shardwright.client.transfer import Upload

#: Arrays by id: how they lie.
Layouts = dict[int, Layout]


@dataclass(frozen=True, slots=True)
class SentStep:
    """A request, its outcome, and the arrays that it takes over."""

    request: master_pb2.RunStepsRequest
    result: StepResult
    consumed: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SentArrays:
    """Uploaded arrays, with contents of their own."""

    uploads: tuple[Upload, ...]


@dataclass(frozen=True, slots=True)
class ReleasedArrays:
    """Arrays released without a step."""

    ids: tuple[int, ...]


Entry = SentStep | SentArrays | ReleasedArrays


class Journal:
    """Entries in order of sending, while `is_on`; and at any time the existing arrays.

    position: number of entries so far, dropped ones included.
    """

    def __init__(self) -> None:
        self.live: Layouts = {}
        self.is_on = False
        self._entries: deque[Entry] = deque()
        self._first = 0

    @property
    def position(self) -> int:
        return self._first + len(self._entries)

    @property
    def entries(self) -> tuple[Entry, ...]:
        return tuple(self._entries)

    @property
    def size_bytes(self) -> int:
        """Host memory of the contents in it."""
        return sum(_size_bytes(entry) for entry in self._entries)

    def add_step(
        self,
        request: master_pb2.RunStepsRequest,
        result: StepResult,
        made: Iterable[tuple[int, Layout]],
        consumed: Sequence[int],
    ) -> None:
        """A step that was sent. made: arrays that ride along, and its outputs."""
        self._forget(request.released)
        self.live.update(made)
        self._forget(consumed)
        self._add(SentStep(request, result, tuple(consumed)))

    def add_arrays(self, uploads: Sequence[Upload]) -> None:
        self.live.update((upload.array_id, upload.layout) for upload in uploads)
        self._add(SentArrays(tuple(uploads)))

    def add_release(self, ids: Sequence[int]) -> None:
        self._forget(ids)
        self._add(ReleasedArrays(tuple(ids)))

    def drop_before(self, position: int) -> None:
        """Forget entries that a complete snapshot makes needless."""
        while self._entries and self._first < position:
            self._entries.popleft()
            self._first += 1

    def clear(self) -> None:
        """All arrays are gone, and will not be made again."""
        self.live.clear()
        self.is_on = False
        self.drop_before(self.position)

    def _add(self, entry: Entry) -> None:
        if self.is_on:
            self._entries.append(entry)

    def _forget(self, ids: Iterable[int]) -> None:
        for array_id in ids:
            self.live.pop(array_id, None)


def _size_bytes(entry: Entry) -> int:
    if isinstance(entry, SentArrays):
        return sum(upload.value.nbytes for upload in entry.uploads)
    if isinstance(entry, SentStep):
        return sum(len(array.data) for array in entry.request.inline_arguments)
    return 0
