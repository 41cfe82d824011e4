"""Horovod's names for Keras: `import shardwright.horovod.keras as hvd`. All of `shardwright.horovod`, and these."""

from __future__ import annotations

from typing import Any

from shardwright import horovod
from shardwright.horovod.keras import callbacks, elastic
from shardwright.horovod.keras.collectives import allgather, allreduce, broadcast, reducescatter
from shardwright.horovod.keras.optimizer import (
    DistributedOptimizer,
    PartialDistributedOptimizer,
    broadcast_global_variables,
    load_model,
)
from shardwright.ranks.keras_callbacks import broadcast_variables

__all__ = [
    "DistributedOptimizer", "PartialDistributedOptimizer", "allgather", "allreduce", "broadcast",
    "broadcast_global_variables", "broadcast_variables", "callbacks", "elastic", "load_model", "reducescatter",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Horovod's other names are the same for every framework."""
    return getattr(horovod, name)
