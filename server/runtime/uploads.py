"""Uploads under way at the data port: whose they are, and what they hold in memory until their arrays are there.

What an upload received is freed when its call ends, however it ends, and when its session does. gRPC keeps the error
that ends a broken call, and by its traceback all local variables, until the collector runs: memory is given up here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shardwright.errors import ResourceLimitError, SessionError
from shardwright.server.free_memory import FreeMemory
from shardwright.server.runtime.arrays import StoredArray
from shardwright.server.runtime.incoming_arrays import IncomingArray, IncomingArrays
from shardwright.server.tuning import STALL_S, UPLOAD_LAST_WORD_S
from shardwright.units import format_bytes


class Upload:
    """One call. person: who makes it. cut: ends the call, from any thread. Its methods are the call's, `end` is not."""

    def __init__(self, uploads: Uploads, person: str, cut: Callable[[], None]) -> None:
        self.person = person
        self.cut = cut
        self.session_id = ""
        self.heard_s = time.monotonic()
        self._uploads = uploads
        self._lock = threading.Lock()
        self._arrays: IncomingArrays | None = IncomingArrays()

    @property
    def held_bytes(self) -> int:
        """What came of arrays that are not complete."""
        arrays = self._arrays
        return 0 if arrays is None else arrays.held_bytes

    def announce(self, array: IncomingArray) -> None:
        """Its contents come next. Raises SessionError once the session has ended, as `take` does."""
        with self._lock:
            self._open_arrays().announce(array)

    def take(self, chunk: bytes | memoryview) -> list[tuple[int, StoredArray]]:
        """(id, array) of arrays that the chunk completes.

        Raises ArrayError on bytes that were not announced, ResourceLimitError where session or person hold too much.
        """
        self.heard_s = time.monotonic()
        with self._lock:
            complete = list(self._open_arrays().take(chunk))
        self._uploads.check(self)
        return complete

    def require_all(self) -> None:
        """Raises ArrayError if the contents ended early."""
        with self._lock:
            self._open_arrays().require_none()

    def end(self) -> None:
        """Give up what it holds; the call hears so when it goes on."""
        with self._lock:
            if self._arrays is not None:
                self._arrays.discard()
            self._arrays = None

    def _open_arrays(self) -> IncomingArrays:
        if self._arrays is None:
            raise SessionError("the session ended during an upload", remedy="open a new session")
        return self._arrays


class Uploads:
    """All of a process. session_bytes, person_bytes: what those of one session, or person, may hold at a time."""

    def __init__(self, *, session_bytes: int, person_bytes: int) -> None:
        self._session_bytes = session_bytes
        self._person_bytes = person_bytes
        self._lock = threading.Lock()
        self._under_way: set[Upload] = set()
        self.freed = FreeMemory()

    @contextmanager
    def begin(self, person: str, cut: Callable[[], None]) -> Iterator[Upload]:
        """Within, a call brings arrays."""
        upload = Upload(self, person, cut)
        with self._lock:
            self._under_way.add(upload)
        try:
            with self.freed.noting_failure():
                yield upload
        finally:
            with self._lock:
                self._under_way.discard(upload)
            upload.end()

    def check(self, upload: Upload) -> None:
        """Raises ResourceLimitError where unfinished uploads hold more than they may."""
        with self._lock:
            theirs = [other for other in self._under_way if other.person == upload.person]
        of_session = sum(other.held_bytes for other in theirs if other.session_id == upload.session_id)
        of_person = sum(other.held_bytes for other in theirs)
        for whose, held, limit, option in (
            ("the session", of_session, self._session_bytes, "--session-memory"),
            (upload.person, of_person, self._person_bytes, "--person-memory"),
        ):
            if held > limit:
                raise ResourceLimitError(
                    f"unfinished uploads of {whose} hold {format_bytes(held)} of this node, the limit is "
                    f"{format_bytes(limit)}",
                    remedy=f"upload less at a time, or have the operator raise {option}",
                )

    def sessions(self) -> list[str]:
        """Those that bring something."""
        with self._lock:
            return sorted({upload.session_id for upload in self._under_way if upload.session_id})

    def end_session(self, session_id: str) -> None:
        """Free what its uploads hold at once, and soon their threads."""
        with self._lock:
            ended = [upload for upload in self._under_way if upload.session_id == session_id]
        self.freed.note()
        for upload in ended:
            upload.end()
        if ended:
            timer = threading.Timer(UPLOAD_LAST_WORD_S, self._cut, [ended])
            timer.daemon = True
            timer.start()

    def cut_stalled(self, most: int, now_s: float) -> None:
        """Where more than `most` calls are under way, cut off those that bring nothing, the most silent ones first."""
        with self._lock:
            surplus = len(self._under_way) - most
            stalled = [upload for upload in self._under_way if now_s - upload.heard_s > STALL_S]
        if surplus > 0:
            self._cut(sorted(stalled, key=lambda upload: upload.heard_s)[:surplus])

    def _cut(self, uploads: list[Upload]) -> None:
        with self._lock:
            left = [upload for upload in uploads if upload in self._under_way]
        for upload in left:
            upload.cut()
