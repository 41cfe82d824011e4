"""Horovod's names for Keras: `import shardwright.horovod.keras as hvd`. All of `shardwright.horovod`, and these."""

from __future__ import annotations

from typing import Any

from shardwright import horovod
from shardwright.horovod.keras import callbacks, elastic
from shardwright.ranks.keras_callbacks import broadcast_variables
from shardwright.ranks.keras_optimizer import DistributedOptimizer, load_model

__all__ = ["DistributedOptimizer", "broadcast_variables", "callbacks", "elastic", "load_model"]


def __getattr__(name: str) -> Any:
    """Horovod's other names are the same for every framework."""
    return getattr(horovod, name)
