"""Reads of arrays that are not there yet: they wait without a thread each.

One thread looks after all of them. A read whose arrays are all *settled* (computed, or known never to come) is handed
on, to a pool. For an array that a step is computing right now a thread of the pool may wait, which XLA wakes at once;
a few are set aside for that, and beyond those it is looked at every few milliseconds.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from shardwright.errors import ResourceLimitError
from shardwright.server.runtime.arrays import ArrayStore
from shardwright.server.tuning import ARRAYS_POLL_S, READERS, READERS_WAITING, WAITS_PER_SESSION


class _Wait:
    """A read that waits. position: of the first array that is not settled; is_computing: whether a step makes it."""

    def __init__(self, session_id: str, array_ids: Sequence[int], until_s: float, reader: Callable[[], None]) -> None:
        self.session_id = session_id
        self.array_ids = array_ids
        self.until_s = until_s
        self.read = reader
        self.position = 0
        self.is_computing = False
        self.is_withdrawn = False


class ArrayWaits:
    """Runs reads once their arrays are settled. Thread-safe."""

    def __init__(self, store: ArrayStore) -> None:
        self._store = store
        self._pool = ThreadPoolExecutor(max_workers=READERS, thread_name_prefix="reads")
        self._lock = threading.Lock()
        self._waits: dict[int, _Wait] = {}  # by id()
        self._count: Counter[str] = Counter()  # by session
        self._blocked = 0
        threading.Thread(target=self._look_after, name="array-waits", daemon=True).start()

    def submit(
        self, session_id: str, array_ids: Sequence[int], wait_s: float, reader: Callable[[], None]
    ) -> Callable[[], None]:
        """Have `reader()` called by a thread of the pool: when all arrays are settled, or after `wait_s`.

        Returns what withdraws it. Raises ResourceLimitError where too many reads of the session wait.
        """
        wait = _Wait(session_id, array_ids, time.monotonic() + min(wait_s, threading.TIMEOUT_MAX), reader)
        with self._lock:
            if self._count[session_id] >= WAITS_PER_SESSION:
                raise ResourceLimitError(
                    f"{WAITS_PER_SESSION} reads of the session wait for arrays, its limit",
                    remedy="run the steps that make them, or read less at once",
                )
        self._add(wait)

        def withdraw() -> None:
            wait.is_withdrawn = True
            self._remove(wait)

        return withdraw

    def _add(self, wait: _Wait) -> None:
        with self._lock:
            self._waits[id(wait)] = wait
            self._count[wait.session_id] += 1
        if not self._try_start(wait):
            self._store.wake()

    def _remove(self, wait: _Wait) -> bool:
        """Whether it was still there."""
        with self._lock:
            if self._waits.pop(id(wait), None) is None:
                return False
            self._count[wait.session_id] -= 1
            self._count += Counter()  # forgets sessions without any
            return True

    def _try_start(self, wait: _Wait) -> bool:
        """Hand it on if its time has come; returns whether it waits no more."""
        wait.position, wait.is_computing = self._store.first_unsettled(wait.session_id, wait.array_ids, wait.position)
        if wait.position == len(wait.array_ids) or time.monotonic() >= wait.until_s:
            if self._remove(wait):
                self._pool.submit(wait.read)
            return True
        if not wait.is_computing or not self._reserve_thread():
            return False
        if self._remove(wait):
            self._pool.submit(self._wait_for_device, wait)
        else:
            self._free_thread()
        return True

    def _wait_for_device(self, wait: _Wait) -> None:
        try:
            self._store.wait_until_settled(wait.session_id, wait.array_ids[wait.position])
        finally:
            self._free_thread()
        if not wait.is_withdrawn:
            self._add(wait)

    def _reserve_thread(self) -> bool:
        with self._lock:
            is_free = self._blocked < READERS_WAITING
            self._blocked += is_free
            return is_free

    def _free_thread(self) -> None:
        with self._lock:
            self._blocked -= 1

    def _look_after(self) -> None:
        version = self._store.version
        while True:
            with self._lock:
                waits = list(self._waits.values())
            waiting = [wait for wait in waits if not self._try_start(wait)]
            until_s = min((wait.until_s for wait in waiting), default=float("inf"))
            pause_s = max(until_s - time.monotonic(), 0.0)
            if any(wait.is_computing for wait in waiting):
                pause_s = min(pause_s, ARRAYS_POLL_S)
            version = self._store.wait_for_change(version, min(pause_s, threading.TIMEOUT_MAX))
