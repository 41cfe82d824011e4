"""Arrays that the client needs no more: freed with the next step, or by a call where none comes."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from shardwright.client.limits import RELEASE_DELAY_S
from shardwright.errors import ServerUnavailableError, ShardwrightError

if TYPE_CHECKING:
    from shardwright.client.connection import MasterConnection
    from shardwright.client.stream import StepStream

_log = logging.getLogger("shardwright")


class Releases:
    """Ids of a session's arrays that are to be freed.

    lock: is held while a step is numbered and sent.
    """

    def __init__(self, lock: threading.RLock, stream: StepStream, master: MasterConnection) -> None:
        self._lock = lock
        self._stream = stream
        self._master = master
        self._is_closed = False
        self._queue: SimpleQueue[int | None] = SimpleQueue()  # its put() may be called by the garbage collector
        threading.Thread(target=_release_when_idle, args=(weakref.ref(self), self._queue), daemon=True).start()

    def add(self, *array_ids: int) -> None:
        """Frees arrays with the next step, or soon without one. Safe in destructors."""
        for array_id in array_ids:
            self._queue.put(array_id)

    def take(self) -> list[int]:
        """Ids to free now; the caller holds the lock."""
        array_ids: list[int] = []
        try:
            while (array_id := self._queue.get_nowait()) is not None:
                array_ids.append(array_id)
        except Empty:
            return array_ids
        self._queue.put(None)  # the session is being closed: that is for the releasing thread
        return array_ids

    def close(self) -> None:
        """What is left goes with the session."""
        self._is_closed = True
        self._queue.put(None)

    def release(self, first: int) -> None:
        """Frees arrays by a call of its own, unless unfinished steps may still read them."""
        with self._lock:
            if self._is_closed:
                return
            if not self._stream.is_idle:
                self.add(first)  # looked at again in a moment
                return
            array_ids = [first, *self.take()]
            with self._stream.changed:
                self._stream.journal.add_release(array_ids)
            try:
                self._master.release(array_ids)
            except ServerUnavailableError:
                self.add(*array_ids)  # with the next step, once the server is back
            except ShardwrightError:
                if not self._is_closed:  # else they go with the session
                    _log.warning("could not release %d arrays", len(array_ids))


def _release_when_idle(releases_ref: weakref.ref[Releases], queue: SimpleQueue[int | None]) -> None:
    while (array_id := queue.get()) is not None:
        time.sleep(RELEASE_DELAY_S)
        releases = releases_ref()
        if releases is None:
            return
        releases.release(array_id)
        del releases
