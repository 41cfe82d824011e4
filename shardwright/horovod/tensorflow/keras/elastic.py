"""Horovod's names for elastic training with Keras: those of `shardwright.horovod.keras.elastic`."""

from __future__ import annotations

from shardwright.horovod.keras.elastic import (
    CommitStateCallback,
    KerasState,
    UpdateBatchStateCallback,
    UpdateEpochStateCallback,
    run,
)

__all__ = ["CommitStateCallback", "KerasState", "UpdateBatchStateCallback", "UpdateEpochStateCallback", "run"]
