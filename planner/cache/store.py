"""A bounded store of bytes by key: in memory or in a folder, the least recently used entries go first.

What is kept here can be made again, so a store never fails: what cannot be read is a miss, what cannot
be written is not kept. Processes may share a folder. An entry is one file, written beside its place and
renamed into it, with a checksum in front, so that a reader sees all of it or nothing.
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

from platformdirs import user_cache_path

#: Environment variable: a folder to keep entries in, or `off`.
CACHE_VARIABLE = "SHARDWRIGHT_CACHE"

#: What `default_store` keeps at most, per name.
MAX_ENTRIES = 4096
MAX_BYTES = 512 << 20

#: A folder is looked through once this part of its limits has been written by one process since the last time.
_SWEEP_PART = 16

#: Age after which an unfinished file is of a process that has died.
_STALE_S = 3600.0

_ENDING = ".entry"
_UNFINISHED = ".part"
_DIGEST_BYTES = 32


class Store(Protocol):
    """Bytes by key; keys and values are any bytes. Neither method raises for want of space or permission."""

    def get(self, key: bytes) -> bytes | None:
        """The value put last under `key`, or None where there is none (any more)."""
        ...

    def put(self, key: bytes, value: bytes) -> None:
        """Keep `value` under `key`; a value over the store's limit is not kept."""
        ...


class MemoryStore:
    """A store in this process, for one thread at a time."""

    def __init__(self, *, max_entries: int = MAX_ENTRIES, max_bytes: int = MAX_BYTES) -> None:
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
    """A store in a folder, shared by all processes that name it; modification times are times of last use.

    Its limits may be passed by a sixteenth per writing process, between two sweeps.
    """

    def __init__(self, folder: Path, *, max_entries: int = MAX_ENTRIES, max_bytes: int = MAX_BYTES) -> None:
        self._folder = folder
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._until_sweep = (0, 0)  # entries and bytes that may be written before the next sweep

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
        """Remove what was not used for longest, until the rest is within the limits."""
        found = sorted(self._entries(), reverse=True)
        size_bytes = 0
        for kept, (_, size, path) in enumerate(found):
            size_bytes += size
            if kept >= self._max_entries or size_bytes > self._max_bytes:
                with contextlib.suppress(OSError):
                    path.unlink()
        self._until_sweep = self._max_entries // _SWEEP_PART, self._max_bytes // _SWEEP_PART

    def _entries(self) -> Iterator[tuple[int, int, Path]]:
        """(last use in ns, bytes, path) of each entry; what dead processes left half written is removed."""
        for item in os.scandir(self._folder):
            with contextlib.suppress(OSError):  # another process may have removed it
                status = item.stat()
                if item.name.endswith(_ENDING):
                    yield status.st_mtime_ns, status.st_size - _DIGEST_BYTES, Path(item.path)
                elif item.name.endswith(_UNFINISHED) and time.time() - status.st_mtime > _STALE_S:
                    os.unlink(item.path)


def default_store(name: str) -> Store | None:
    """The user's store of one kind of entry: a folder under `$SHARDWRIGHT_CACHE`, else under the platform's
    folder for caches; None where the variable says `off`.
    """
    chosen = os.environ.get(CACHE_VARIABLE, "")
    if chosen == "off":
        return None
    try:
        root = Path(chosen) if chosen else user_cache_path("shardwright")
    except RuntimeError:  # nobody's home folder is known
        return None
    return FileStore(root / name)
