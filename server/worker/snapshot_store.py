"""Parts of snapshots in a daemon's memory: they outlive the executors, which all end when one does.

A part is one distinct shard of an array's layout. An array id stands for the same contents always, so that a part that
several snapshots have is kept once, and sent once.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from shardwright.errors import ArrayError, ResourceLimitError
from shardwright.units import format_bytes

#: (array id, number of the distinct shard).
PartKey = tuple[int, int]
#: (generation of the executors, number of the master's command): later ones are greater.
Order = tuple[int, int]


def half_of_memory() -> int:
    """Half of this machine's memory, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


@dataclass(slots=True)
class _KeptSession:
    """parts: their contents. complete: keys of the parts that are whole. snapshots: keys of each, by its number.

    order: the latest by which parts were offered.
    """

    order: Order = (0, 0)
    parts: dict[PartKey, np.ndarray] = field(default_factory=dict)
    complete: set[PartKey] = field(default_factory=set)
    snapshots: dict[int, set[PartKey]] = field(default_factory=dict)


class SnapshotStore:
    """Thread-safe. limit_bytes: of all parts."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._sessions: dict[str, _KeptSession] = {}
        self._retained: tuple[Order, frozenset[str]] = ((0, 0), frozenset())  # sessions that there were then

    @property
    def held_bytes(self) -> int:
        with self._lock:
            return self._held_bytes()

    def offer(
        self,
        session_id: str,
        number: int,
        sizes: Mapping[PartKey, int],
        *,
        keep: Collection[int] | None,
        order: Order,
    ) -> list[PartKey]:
        """Announce parts of snapshot `number`, with their bytes; returns those that have to be put.

        keep: numbers of other snapshots that somebody may restore; None: all. The others' parts are dropped, where this
        one has not got them. Several callers may add to one snapshot. Raises ArrayError where a later order was
        carried out here, which may need what this one drops, or the session has ended; ResourceLimitError past the
        limit: then nothing is announced.
        """
        with self._lock:
            retained_at, retained = self._retained
            if order <= retained_at and session_id not in retained:
                raise ArrayError(f"parts of snapshot {number} come too late: the session has ended")
            session = self._sessions.setdefault(session_id, _KeptSession())
            if order < session.order:
                raise ArrayError(f"parts of snapshot {number} come too late: a later one was offered before")
            session.order = order
            if keep is not None:
                session.snapshots = {n: keys for n, keys in session.snapshots.items() if n == number or n in keep}
            _drop_unused(session, keep=sizes.keys())
            new = {key: size for key, size in sizes.items() if key not in session.parts}
            wanted_bytes = self._held_bytes() + sum(new.values())
            if wanted_bytes > self.limit_bytes:
                raise ResourceLimitError(
                    f"snapshots would take {format_bytes(wanted_bytes)} of a node's host memory, the limit is "
                    f"{format_bytes(self.limit_bytes)}",
                    remedy="release arrays that are not needed, use more nodes, or save checkpoints instead",
                )
            session.snapshots.setdefault(number, set()).update(sizes)
            session.parts.update((key, np.empty(size, np.uint8)) for key, size in new.items())
            return [key for key in sizes if key not in session.complete]

    def buffer(self, session_id: str, key: PartKey) -> np.ndarray:
        """Where the contents of an announced part go. Raises ArrayError on another one."""
        with self._lock:
            session = self._sessions.get(session_id)
            if session is None or key not in session.parts:
                raise ArrayError(f"part {key[1]} of array {key[0]} was not announced, or is not wanted any more")
            return session.parts[key]

    def complete(self, session_id: str, key: PartKey, buffer: np.ndarray) -> None:
        """All of its contents are in its buffer; one that was dropped meanwhile, and announced anew, has another."""
        with self._lock:
            session = self._sessions.get(session_id)
            if session is not None and session.parts.get(key) is buffer:
                session.complete.add(key)

    def list_parts(self, session_id: str, number: int) -> list[PartKey]:
        """Parts of a snapshot that are whole, in order."""
        with self._lock:
            session = self._sessions.get(session_id)
            keys = session.snapshots.get(number, set()) & session.complete if session is not None else set()
            return sorted(keys)

    def get(self, session_id: str, key: PartKey) -> np.ndarray:
        """Contents of a part. Raises ArrayError where it is not there, or not whole."""
        with self._lock:
            session = self._sessions.get(session_id)
            if session is None or key not in session.complete:
                raise ArrayError(f"part {key[1]} of array {key[0]} is not in this node's memory")
            return session.parts[key]

    def retain(self, oldest: Mapping[str, int], *, order: Order) -> None:
        """Drop other sessions than these, and their snapshots older than the number given.

        Not of sessions that were offered parts by a later order to the same executors: who said so knew less. Who knows
        of no such executors is a master that has begun anew.
        """
        with self._lock:
            self._retained = order, frozenset(oldest)
            for session_id in list(self._sessions):
                session = self._sessions[session_id]
                if order < session.order:
                    if order[0] == session.order[0]:
                        continue
                    session.order = order
                if session_id not in oldest:
                    del self._sessions[session_id]
                    continue
                session.snapshots = {n: keys for n, keys in session.snapshots.items() if n >= oldest[session_id]}
                _drop_unused(session)

    def _held_bytes(self) -> int:
        return sum(part.nbytes for session in self._sessions.values() for part in session.parts.values())


def _drop_unused(session: _KeptSession, keep: Iterable[PartKey] = ()) -> None:
    used = set(keep).union(*session.snapshots.values())
    session.parts = {key: part for key, part in session.parts.items() if key in used}
    session.complete &= used
