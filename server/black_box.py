"""What an executor was busy with when it ended: written by its threads, read by its daemon, however it ends.

A shared file in memory, with a place for each thread that is at work. A process that is killed, or ends itself amid a
C function, has no last words; what it wrote here stays.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from shardwright.server.tuning import BLACK_BOX_PLACE_BYTES, BLACK_BOX_PLACES

_LENGTH = struct.Struct("<H")


@dataclass(frozen=True, slots=True)
class Work:
    """What a thread is busy with: the command of a sequence number, or the batch of a dataset.

    key: of the dataset, see `dataset_key`; function: its name.
    """

    sequence: int = 0
    session_id: str = ""
    key: str = ""
    function: str = ""
    batch: int = 0

    def to_text(self) -> bytes:
        """As JSON; of a command quickly: there are some for each step."""
        if not self.key:
            return b'{"sequence": %d}' % self.sequence
        return json.dumps({name: value for name, value in asdict(self).items() if value}).encode()


def dataset_key(function: str, options_json: str) -> str:
    """The same for equal functions with equal options, in whatever session."""
    return hashlib.sha256(f"{function}\0{options_json}".encode()).hexdigest()[:32]


class BlackBox:
    """The file; whoever made it hands `descriptor` to the process that writes. Thread-safe."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, BLACK_BOX_PLACES * BLACK_BOX_PLACE_BYTES)
        self._lock = threading.Lock()
        self._free = list(range(BLACK_BOX_PLACES))

    @classmethod
    def make(cls) -> BlackBox:
        """An empty one, without a name; `close` it."""
        with tempfile.TemporaryFile() as file:
            file.truncate(BLACK_BOX_PLACES * BLACK_BOX_PLACE_BYTES)
            return cls(os.dup(file.fileno()))

    def close(self) -> None:
        self._memory.close()
        os.close(self.descriptor)

    @contextmanager
    def at(self, work: Work) -> Iterator[None]:
        """Within, a thread is busy with this; where too many are, or it is too long to write down, nobody knows."""
        text = work.to_text()
        with self._lock:
            place = self._free.pop() if self._free and len(text) <= BLACK_BOX_PLACE_BYTES - _LENGTH.size else None
        if place is None:
            yield
            return
        at = place * BLACK_BOX_PLACE_BYTES
        self._memory[at + _LENGTH.size : at + _LENGTH.size + len(text)] = text
        _LENGTH.pack_into(self._memory, at, len(text))  # last: from now on it counts
        try:
            yield
        finally:
            _LENGTH.pack_into(self._memory, at, 0)
            with self._lock:
                self._free.append(place)

    def read(self) -> list[Work]:
        """What the threads are busy with, or were when their process ended: commands by their order, then the rest."""
        works = []
        for place in range(BLACK_BOX_PLACES):
            at = place * BLACK_BOX_PLACE_BYTES
            (length,) = _LENGTH.unpack_from(self._memory, at)
            if 0 < length <= BLACK_BOX_PLACE_BYTES - _LENGTH.size:
                works.append(Work(**json.loads(self._memory[at + _LENGTH.size : at + _LENGTH.size + length])))
        return sorted(works, key=lambda work: (not work.sequence, work.sequence, work.session_id, work.key))
