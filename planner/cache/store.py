"""A bounded key-value store of bytes, in memory or in a folder, with least-recently-used eviction.

Entries are reproducible, hence a store never fails: unreadable is a miss, unwritable is not stored. Processes may share
a folder. An entry is one file with a leading checksum, written under a temporary name and renamed: a reader sees all of
it or nothing.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections import OrderedDict
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Protocol

from shardwright.options.cache_folder import cache_folder
from shardwright.planner.tuning import MAX_CACHE_BYTES, MAX_CACHE_ENTRIES, STALE_S, SWEEP_PART

_ENDING = ".entry"
_UNFINISHED = ".part"
_DIGEST_BYTES = 32


class Store(Protocol):
    """Bytes by key; keys and values are arbitrary bytes. Neither method raises on lack of space or permission."""

    def get(self, key: bytes) -> bytes | None:
        """The last value put under `key`; None when absent (or evicted)."""
        ...

    def put(self, key: bytes, value: bytes) -> None:
        """Store `value` under `key`; a value over the store's limit is not stored."""
        ...


class MemoryStore:
    """A store in this process; not thread-safe."""

    def __init__(self, *, max_entries: int = MAX_CACHE_ENTRIES, max_bytes: int = MAX_CACHE_BYTES) -> None:
        self._entries: OrderedDict[bytes, bytes] = OrderedDict()
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._size_bytes = 0

    def get(self, key: bytes) -> bytes | None:
        value = self._entries.get(key)
        if value is not None:
            self._entries.move_to_end(key)
        return value

    def put(self, key: bytes, value: bytes) -> None:
        self._drop(key)
        if len(value) > self._max_bytes or self._max_entries < 1:
            return
        self._entries[key] = value
        self._size_bytes += len(value)
        while len(self._entries) > self._max_entries or self._size_bytes > self._max_bytes:
            self._drop(next(iter(self._entries)))

    def _drop(self, key: bytes) -> None:
        self._size_bytes -= len(self._entries.pop(key, b""))


class FileStore:
    """A store in a folder, shared by all processes using it; modification times are times of last use.

    Between two sweeps each writing process may exceed the limits by a sixteenth.
    """

    def __init__(self, folder: Path, *, max_entries: int = MAX_CACHE_ENTRIES, max_bytes: int = MAX_CACHE_BYTES) -> None:
        self._folder = folder
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._until_sweep = (0, 0)  # entries and bytes left until the next sweep

    def get(self, key: bytes) -> bytes | None:
        path = self._path(key)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        value = data[_DIGEST_BYTES:]
        with contextlib.suppress(OSError):
            if sha256(value).digest() != data[:_DIGEST_BYTES]:
                path.unlink()
                return None
            os.utime(path)
        return value

    def put(self, key: bytes, value: bytes) -> None:
        if len(value) > self._max_bytes:
            return
        with contextlib.suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._write(self._path(key), sha256(value).digest() + value)
            entries, size_bytes = self._until_sweep
            self._until_sweep = entries - 1, size_bytes - len(value)
            if min(self._until_sweep) < 0:
                self._sweep()

    def _path(self, key: bytes) -> Path:
        return self._folder / (sha256(key).hexdigest() + _ENDING)

    def _write(self, path: Path, data: bytes) -> None:
        descriptor, unfinished = tempfile.mkstemp(dir=self._folder, suffix=_UNFINISHED)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            os.replace(unfinished, path)
        except OSError:
            os.unlink(unfinished)
            raise

    def _sweep(self) -> None:
        """Evict the least recently used entries until the rest is within the limits."""
        entries = sorted(self._entries(), reverse=True)
        size_bytes = 0
        for rank, (_, size, path) in enumerate(entries):
            size_bytes += size
            if rank >= self._max_entries or size_bytes > self._max_bytes:
                with contextlib.suppress(OSError):
                    path.unlink()
        self._until_sweep = self._max_entries // SWEEP_PART, self._max_bytes // SWEEP_PART

    def _entries(self) -> Iterator[tuple[int, int, Path]]:
        """(last use in ns, bytes, path) of each entry; removes dead processes' partial files."""
        for item in os.scandir(self._folder):
            with contextlib.suppress(OSError):  # another process may have removed it
                status = item.stat()
                if item.name.endswith(_ENDING):
                    yield status.st_mtime_ns, status.st_size - _DIGEST_BYTES, Path(item.path)
                elif item.name.endswith(_UNFINISHED) and time.time() - status.st_mtime > STALE_S:
                    os.unlink(item.path)


def default_store(name: str) -> Store | None:
    """The user's store of one kind of entry in their cache folder; None where nothing is to be kept."""
    folder = cache_folder(name)
    return FileStore(folder) if folder is not None else None
