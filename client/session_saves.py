"""Saves and restores of one session: one save is under way at a time."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

from shardwright.checkpoints.directories import resolve_directory
from shardwright.client import checkpoints
from shardwright.client.checkpoints import Save
from shardwright.client.kept_state import KeptState
from shardwright.client.last_save import LastSave
from shardwright.client.step_queue import StepQueue

Directory = str | os.PathLike[str]
T = TypeVar("T")


class SessionSaves:
    """Of one session. is_local: whether its server shares this program's file system."""

    def __init__(self, steps: StepQueue, *, is_local: bool) -> None:
        self.last_save = LastSave(steps.recovery)
        self._steps = steps
        self._is_local = is_local

    def save(self, state: Any, directory: Directory, *, step: int | None, max_to_keep: int | None) -> Save:
        """See `Session.save`."""

        def save() -> Save:
            checkpoints.check_step(step)
            checkpoints.check_max_to_keep(max_to_keep)
            tree, leaves = checkpoints.read_structure(state)
            folder = self._resolve(directory)
            return checkpoints.save_leaves(self._steps, tree, leaves, folder, step=step, max_to_keep=max_to_keep)

        return self._begin(save, self.last_save.begin)

    def save_kept(
        self, kept_state: KeptState, directory: Directory, before: int, *, max_to_keep: int | None, waits: bool
    ) -> Save | None:
        """Saves the state that is kept, under the number of its updates and `before`.

        waits: for a save under way; else None is returned where there is one.
        """

        def save() -> Save:
            with self._steps.lock:
                return checkpoints.save_leaves(
                    self._steps, kept_state.tree, kept_state.leaves, self._resolve(directory),
                    step=kept_state.updates + before, max_to_keep=max_to_keep,
                )  # fmt: skip

        return self._begin(save, self.last_save.begin if waits else self.last_save.begin_if_done)

    def _begin(self, save: Callable[[], Save], begin: Callable[[Callable[[], Save]], T]) -> T:
        self._steps.cluster.require_open()
        return self._steps.steadily(lambda: begin(save))

    def restore(self, directory: Directory, *, step: int | None, like: Any) -> Any:
        """See `Session.restore`."""
        self._steps.cluster.require_open()
        self.last_save.settle()
        return checkpoints.restore(self._steps, self._resolve(directory), step=step, like=like)

    def list_checkpoints(self, directory: Directory) -> tuple[int, ...]:
        """See `Session.checkpoints`."""
        self._steps.cluster.require_open()
        self.last_save.settle()
        return checkpoints.list_checkpoints(self._steps.cluster, self._resolve(directory))

    def _resolve(self, directory: Directory) -> str:
        """The directory for the workers."""
        return resolve_directory(directory, is_local=self._is_local)
