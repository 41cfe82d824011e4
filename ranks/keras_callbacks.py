"""Callbacks of Keras for ranks: the same beginning, averaged metrics, a learning rate that grows, elastic states."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import keras

from shardwright.errors import OptionError
from shardwright.ranks import job
from shardwright.ranks.collectives import broadcast
from shardwright.ranks.elastic import State
from shardwright.ranks.optimizer import average_metrics


def broadcast_variables(variables: list[Any], root_rank: int = 0) -> None:
    """Put the values of rank `root_rank` into Keras' variables at every rank."""
    values = [keras.ops.convert_to_numpy(variable) for variable in variables]
    for variable, value in zip(variables, broadcast(values, root_rank, name="variables"), strict=True):
        variable.assign(value)


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Training begins with the weights and the optimizer's state of rank `root_rank`, at every rank.

    Random seeds stay each rank's own: dropout differs between ranks.
    """

    def __init__(self, root_rank: int = 0) -> None:
        super().__init__()
        self.root_rank = root_rank

    def on_train_begin(self, logs: Any = None) -> None:
        model = self.model
        optimizer = model.optimizer.variables if model.optimizer is not None else []
        broadcast_variables([*model.weights, *optimizer], self.root_rank)


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Metrics at the end of each epoch are averages over the ranks.

    It stands ahead of callbacks that read them, such as `ReduceLROnPlateau` and `ModelCheckpoint`, which so decide
    alike at every rank.
    """

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs:
            logs.update(average_metrics(dict(logs)))


class LearningRateScheduleCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """The learning rate is `initial_lr` times a multiplier, from epoch `start_epoch` up to, not with, `end_epoch`.

    multiplier: a number, or a function of the epoch. staircase: it is computed once an epoch; else at each batch, with
    the part of the epoch that is over. momentum_correction: not on Keras 3. steps_per_epoch: batches of an epoch; None:
    what `fit` knows. Raises OptionError.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = False,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if momentum_correction:
            raise OptionError(
                "Keras compiles an optimizer's momentum into the step, as a constant",
                where="momentum_correction",
                remedy="leave it out",
            )
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.steps_per_epoch = steps_per_epoch
        self._multiplier = multiplier if callable(multiplier) else lambda epoch: multiplier
        self._epoch = 0

    def on_train_begin(self, logs: Any = None) -> None:
        if self.steps_per_epoch is None:
            self.steps_per_epoch = (self.params or {}).get("steps")
        if not self.staircase and not self.steps_per_epoch:
            raise OptionError(
                "the number of batches in an epoch is not known",
                where="steps_per_epoch",
                remedy="give it to the callback, or to fit",
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._epoch < self.start_epoch or (self.end_epoch is not None and self._epoch >= self.end_epoch):
            return
        if self.staircase:
            if batch == 0:
                self._set(self._epoch)
        else:
            assert self.steps_per_epoch is not None
            self._set(self._epoch + batch / self.steps_per_epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs is not None:
            logs["lr"] = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))

    def _set(self, epoch: float) -> None:
        self.model.optimizer.learning_rate = self.initial_lr * self._multiplier(epoch)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """The learning rate grows from `initial_lr / size` to `initial_lr` over the first epochs, batch by batch.

    initial_lr: the full one, of all ranks together: the rate of one rank times `size()`. At epoch e of w, with the part
    of it that is over, the multiplier is (e (size - 1) / w + 1) / size (Goyal et al., "Accurate, Large Minibatch SGD",
    2017, section 2.2). verbose: 1 says at rank 0 when it is over.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = False,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        if not warmup_epochs > 0:
            raise OptionError(f"{warmup_epochs!r}", where="warmup_epochs", remedy="a number above 0")

        def multiplier(epoch: float) -> float:
            # A batch counts once it is over, so that the last one has the full rate.
            assert self.steps_per_epoch is not None
            over = min(epoch + 1 / self.steps_per_epoch, warmup_epochs)
            return (over * (job.size() - 1) / warmup_epochs + 1) / job.size()

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=math.ceil(warmup_epochs),
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        if epoch + 1 == self.end_epoch and self.verbose and job.rank() == 0:
            print(f"\nEpoch {epoch + 1}: the learning rate has grown to {self.initial_lr:g}.")


class CommitStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Commits an elastic state every so many batches, and at the end of each epoch.

    It stands behind `UpdateEpochStateCallback` and `UpdateBatchStateCallback`. Raises OptionError.
    """

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        super().__init__()
        if isinstance(batches_per_commit, bool) or not isinstance(batches_per_commit, int) or batches_per_commit < 1:
            raise OptionError(f"{batches_per_commit!r}", where="batches_per_commit", remedy="a number from 1 on")
        self.state = state
        self.batches_per_commit = batches_per_commit
        self._batches = 0

    def on_train_begin(self, logs: Any = None) -> None:
        self._batches = 0  # as at ranks that are new

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._batches += 1
        if self._batches % self.batches_per_commit == 0:
            self.state.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.commit()


class UpdateEpochStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Counts in `state.epoch` the epochs that are over, over all calls of `fit`."""

    def __init__(self, state: State) -> None:
        super().__init__()
        self.state = state
        self._before: int | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        self._before = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self._before is None:  # `fit` may count from 0 or from `initial_epoch`
            self._before = self.state.epoch - epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        assert self._before is not None
        self.state.epoch = self._before + epoch + 1


class UpdateBatchStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Counts in `state.batch` the batches of this epoch that are over: `fit` goes on with data from there."""

    def __init__(self, state: State) -> None:
        super().__init__()
        self.state = state

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.state.batch += 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.batch = 0
