"""Memory that was freed goes back to the machine. Two keep it otherwise: JAX, which lets go of NumPy's memory behind an
array when Python's collector runs next, and glibc, in each thread's arena.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

from shardwright.server.tuning import SETTLING_S


class FreeMemory:
    """`note` that much is being freed; a `give_back` soon after looks for it. Any thread may note."""

    def __init__(self) -> None:
        self._noted_s: float | None = None
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other libraries of C have none, and need none

    def note(self) -> None:
        self._noted_s = time.monotonic()

    @contextmanager
    def noting_failure(self) -> Iterator[None]:
        """Within, memory is filled that nobody needs where that fails."""
        try:
            yield
        except BaseException:
            self.note()
            raise

    def give_back(self) -> None:
        """Blocking, for milliseconds."""
        noted_s = self._noted_s
        if noted_s is None or time.monotonic() - noted_s < SETTLING_S:
            return
        self._noted_s = None
        gc.collect()
        if self._trim is not None:
            self._trim(0)
