"""Horovod's names for TensorFlow: `import shardwright.horovod.tensorflow as hvd`. Tensors that are there, not graphs'.

Gradients go between ranks by `DistributedGradientTape`, in graphs too, and in `fit` by `hvd.keras`.
"""

from __future__ import annotations

from typing import Any

from shardwright import horovod
from shardwright.horovod.keras.optimizer import broadcast_global_variables
from shardwright.horovod.tensorflow import elastic
from shardwright.horovod.tensorflow.collectives import (
    allgather,
    allreduce,
    alltoall,
    broadcast,
    broadcast_,
    broadcast_variables,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)
from shardwright.horovod.tensorflow.gradients import DistributedGradientTape, DistributedOptimizer

__all__ = [
    "DistributedGradientTape", "DistributedOptimizer", "allgather", "allreduce", "alltoall", "broadcast", "broadcast_",
    "broadcast_global_variables", "broadcast_variables", "elastic", "grouped_allgather", "grouped_allreduce",
    "grouped_reducescatter", "reducescatter",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Horovod's other names are the same for every framework."""
    return getattr(horovod, name)
