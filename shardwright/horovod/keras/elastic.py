"""Horovod's names for elastic training with Keras: `hvd.elastic.KerasState(model, epoch=0, batch=0)`."""

from __future__ import annotations

from shardwright.horovod.elastic import ElasticSampler, KerasState, run
from shardwright.ranks.keras_callbacks import CommitStateCallback, UpdateBatchStateCallback, UpdateEpochStateCallback

__all__ = [
    "CommitStateCallback", "ElasticSampler", "KerasState", "UpdateBatchStateCallback", "UpdateEpochStateCallback",
    "run",
]  # fmt: skip
