"""The newest save of a session: one is under way at a time, and an error of the last is raised by the next."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from shardwright.errors import ShardwrightError, WorkerLostError

if TYPE_CHECKING:
    from shardwright.client.checkpoints import Save
    from shardwright.client.recovery import Recovery

_log = logging.getLogger("shardwright")


class LastSave:
    """Begins saves one after the other.

    Where the session survives losses of workers, a save that is lost with them is no error.
    """

    def __init__(self, recovery: Recovery) -> None:
        self._recovery = recovery
        self._lock = threading.Lock()
        self._save: Save | None = None

    def begin(self, save: Callable[[], Save]) -> Save:
        """Begins a save. Raises the error of the last one, unless it was raised before."""
        with self._lock:
            return self._begin(save)

    def begin_if_done(self, save: Callable[[], Save]) -> Save | None:
        """Begins a save like `begin`; returns None while another is under way."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            if self._save is not None and not self._save.is_done:
                return None
            return self._begin(save)
        finally:
            self._lock.release()

    def _begin(self, save: Callable[[], Save]) -> Save:
        if (error := self.take_error()) is not None:
            raise error
        self._save = save()
        return self._save

    def take_error(self) -> ShardwrightError | None:
        """Of the last save, unless it was raised before, or was lost with workers whose loss the session survives."""
        error = self._save.take_unreported_error() if self._save is not None else None
        if isinstance(error, WorkerLostError) and self._recovery.is_on:
            _log.warning("a checkpoint was not written: %s", error.message)
            return None
        return error

    def settle(self) -> None:
        """Waits for an unfinished save."""
        if self._save is not None:
            self._save.settle()
