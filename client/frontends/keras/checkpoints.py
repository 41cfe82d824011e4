"""Distributed checkpoints of a model: each worker writes and reads its own part of the variables."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from shardwright.client.arrays import RemoteArray
from shardwright.client.frontends.keras.births import collect_births, settle
from shardwright.client.frontends.keras.training import distribution_of, groups_of, local_value, variable_types
from shardwright.client.frontends.names import unique_names
from shardwright.errors import CheckpointError

if TYPE_CHECKING:
    import os

    from shardwright.client.checkpoints import Save

#: Epoch of a run that has come to its end.
_FINISHED = -1


def save(
    model: Any,
    directory: str | os.PathLike[str],
    *,
    step: int | None = None,
    max_to_keep: int | None = None,
    epoch: int | None = None,
) -> Save:
    """See `shardwright.keras.save`. epoch: kept beside the variables."""
    of_model = distribution_of(model)
    state: dict[str, Any] = {"variables": {path: _value(variable) for path, variable in _variables(model).items()}}
    if epoch is not None:
        state["epoch"] = np.int32(epoch)
    return of_model.session.saves.save(state, directory, step=step, max_to_keep=max_to_keep)


def restore(model: Any, directory: str | os.PathLike[str], *, step: int | None = None) -> None:
    """See `shardwright.keras.restore`."""
    session = distribution_of(model).session
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built:
        with collect_births() as births:
            optimizer.build(model.trainable_variables)
        settle(session.steps, births.variables)
    variables = _variables(model)
    types = dict(zip(variables, variable_types(list(variables.values())), strict=True))
    try:
        restored = session.saves.restore(directory, step=step, like={"variables": types})
    except CheckpointError as error:
        remedy = error.remedy or (
            "give the layers and the optimizer the names that they had (name=): Keras numbers unnamed ones in the "
            "order in which a process makes them"
        )
        raise CheckpointError(error.message, where=error.where, remedy=remedy) from None
    for path, handle in restored["variables"].items():
        variables[path]._value = handle


class ModelCheckpoint(keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """`keras.callbacks.ModelCheckpoint` into a directory of distributed checkpoints.

    Training goes on while the workers write. A checkpoint holds the variables of the model and of its optimizer, under
    the number of training steps done; `shardwright.keras.restore` reads it. Options not named here are Keras'.

    Args:
      directory: see `Session.save`.
      max_to_keep: number of checkpoints to keep; default: all.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        monitor: str = "val_loss",
        verbose: int = 0,
        save_best_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        initial_value_threshold: float | None = None,
        max_to_keep: int | None = None,
    ) -> None:
        super().__init__(
            f"{directory}/.keras",  # Keras' own takes names of files only
            monitor=monitor,
            verbose=verbose,
            save_best_only=save_best_only,
            mode=mode,
            save_freq=save_freq,
            initial_value_threshold=initial_value_threshold,
        )
        self.filepath = str(directory)
        self._max_to_keep = max_to_keep
        self._save: Save | None = None

    def on_train_end(self, logs: Any = None) -> None:
        """Waits for the last checkpoint. Raises CheckpointError if it failed."""
        super().on_train_end(logs)
        _wait_for(self._save)

    def _save_model(self, epoch: int, batch: int | None, logs: Any) -> None:
        if not self._should_save_model(epoch, batch, logs, self.filepath):
            return
        number = int(self.model.optimizer.iterations)
        self._save = save(self.model, self.filepath, step=number, max_to_keep=self._max_to_keep)
        if self.verbose:
            keras.utils.io_utils.print_msg(f"\nEpoch {epoch + 1}: saving checkpoint {number} to {self.filepath}")


class BackupAndRestore(keras.callbacks.BackupAndRestore):  # type: ignore[misc]
    """`keras.callbacks.BackupAndRestore` by distributed checkpoints.

    A run that was interrupted goes on at the epoch of its last backup when `fit` is called again. A backup is there as
    a whole or not at all, so there is no `double_checkpoint`.

    Args:
      backup_dir: see `Session.save`.
      save_freq: "epoch", or a number of batches.
      delete_checkpoint: removes the directory at the end of training, where this machine sees it.
    """

    def __init__(
        self, backup_dir: str | os.PathLike[str], save_freq: str | int = "epoch", delete_checkpoint: bool = True
    ) -> None:
        super().__init__(str(backup_dir), save_freq=save_freq, delete_checkpoint=delete_checkpoint)
        self._save: Save | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Restores the last backup of an unfinished run, and the epoch to go on with."""
        session = distribution_of(self.model).session
        if not session.saves.list_checkpoints(self.backup_dir):
            return
        epoch = int(np.asarray(session.saves.restore(self.backup_dir, step=None, like={"epoch": np.int32(0)})["epoch"]))
        if epoch != _FINISHED:
            restore(self.model, self.backup_dir)
            self.model._initial_epoch = epoch

    def on_train_end(self, logs: Any = None) -> None:
        """Waits for the last backup, and marks the run as finished."""
        _wait_for(self._save)
        if not self.delete_checkpoint:
            return
        self._current_epoch = _FINISHED
        self._save_model()
        _wait_for(self._save)
        if Path(self.backup_dir).is_dir():
            shutil.rmtree(self.backup_dir)

    def _save_model(self) -> None:
        self._save = save(self.model, self.backup_dir, max_to_keep=1, epoch=self._current_epoch)


def _variables(model: Any) -> dict[str, Any]:
    """Variables of a model and its optimizer that have elements, by unique path. Metrics start anew."""
    variables = [variable for group in groups_of(model, "train")[:3] for variable in group]
    named = zip(unique_names([variable.path for variable in variables]), variables, strict=True)
    return {path: variable for path, variable in named if 0 not in variable.shape}


def _value(variable: Any) -> Any:
    return variable._value if isinstance(variable._value, RemoteArray) else local_value(variable)


def _wait_for(last: Save | None) -> None:
    if last is not None:
        last.wait()
