"""Checkpoints of the state that a session keeps, written by a policy beside its steps.

The number of a checkpoint is that of the state: how many steps have replaced some of it. A save that is still under
way when the next one is due is not waited for: the state is saved at the first step after it. A save that fails is
logged and training goes on.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwright.client.argument_checks import check_number
from shardwright.errors import OptionError, ShardwrightError, WorkerLostError

if TYPE_CHECKING:
    from shardwright.client.checkpoints import Save
    from shardwright.client.kept_state import KeptState
    from shardwright.client.session_saves import SessionSaves

_log = logging.getLogger("shardwright")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPolicy:
    """When a session writes the state that it keeps to checkpoints; see `Session.keep`.

    directory, max_to_keep: see `Session.save`.
    every: steps of the state from one to the next. every_s: seconds from one to the next, at least. Where both are
    given, the first that is over counts.
    at_drain: also when the servers, or a node of them, are about to end (SIGTERM, a notice of preemption).

    Raises OptionError: a wrong number, or none of the three.
    """

    directory: str | os.PathLike[str]
    every: int | None = None
    every_s: float | None = None
    max_to_keep: int | None = None
    at_drain: bool = True

    def __post_init__(self) -> None:
        from shardwright.checkpoints.directories import MAX_STEP
        from shardwright.client.checkpoints import check_max_to_keep  # loads JAX

        if self.every is not None:
            check_number("every", self.every, 1, MAX_STEP)
        check_max_to_keep(self.max_to_keep)
        if self.every_s is not None and not (isinstance(self.every_s, int | float) and self.every_s > 0):
            raise OptionError(f"every_s={self.every_s!r}", where="every_s", remedy="seconds, more than 0")
        if self.every is None and self.every_s is None and not self.at_drain:
            raise OptionError(
                "no checkpoint would ever be written", where="checkpoints", remedy="pass every=… or every_s=…"
            )


class AutomaticSaves:
    """Of one session and the state that it keeps.

    first: number of the state as it was kept; its later numbers count on from there.
    """

    def __init__(self, saves: SessionSaves, kept_state: KeptState, policy: CheckpointPolicy, first: int) -> None:
        self._saves = saves
        self._kept = kept_state
        self._policy = policy
        self._before = first - kept_state.updates
        self._saved, self._saved_s = first, time.monotonic()
        self._has_failed = False  # whether the save of the state of that number has
        self._is_overdue = False  # as it was lost with workers
        self._save: Save | None = None
        self._last_words: threading.Thread | None = None

    def save_if_due(self) -> None:
        """After a step, without the session's lock."""
        self._log_failure()
        if self._is_due(self._kept.updates + self._before):
            self._note(self._save_kept(waits=False))

    def begin_last_save(self) -> None:
        """As the servers are about to end; returns at once."""
        if self._policy.at_drain and self._last_words is None:
            self._last_words = threading.Thread(target=self._save_last, name="shardwright-last-save", daemon=True)
            self._last_words.start()

    def forget_last_save(self) -> None:
        """The servers go on."""
        self._last_words = None

    def settle(self) -> None:
        """Returns once a last save that has begun is under way."""
        if (thread := self._last_words) is not None:
            thread.join()

    def _is_due(self, number: int) -> bool:
        every, every_s = self._policy.every, self._policy.every_s
        if self._kept.is_lost:
            return False
        if self._is_overdue:
            return True
        if number == self._saved:
            return False
        if every is not None and number // every > self._saved // every:
            return True
        return every_s is not None and time.monotonic() - self._saved_s >= every_s

    def _save_last(self) -> None:
        if self._save is not None:
            self._save.settle()
            self._log_failure()
        if self._kept.is_lost or (self._kept.updates + self._before == self._saved and not self._has_failed):
            return
        try:
            save = self._save_kept(waits=True)
        except ShardwrightError as error:
            _log.error("the state was not saved before the servers end: %s", error)
            return
        self._note(save)
        if save is not None:
            _log.warning("the state is saved as %s/%d", save.directory, save.step)

    def _save_kept(self, *, waits: bool) -> Save | None:
        policy = self._policy
        return self._saves.save_kept(
            self._kept, policy.directory, self._before, max_to_keep=policy.max_to_keep, waits=waits
        )

    def _note(self, save: Save | None) -> None:
        if save is not None:
            self._save, self._has_failed, self._is_overdue = save, False, False
            self._saved, self._saved_s = save.step, time.monotonic()

    def _log_failure(self) -> None:
        """Logs the error of the last save, once; the next one is written when it is due, or at once after a loss of
        workers."""
        if self._save is None or not self._save.is_done:
            return
        save, self._save = self._save, None
        error = save.take_unreported_error()
        if error is not None:
            _log.error("checkpoint %d was not written: %s", save.step, error)
            self._has_failed = True
            self._is_overdue = isinstance(error, WorkerLostError)
