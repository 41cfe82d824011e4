"""Horovod's names for PyTorch: `import shardwright.horovod.torch as hvd`. All of `shardwright.horovod`, and these."""

from __future__ import annotations

from typing import Any

from shardwright import horovod
from shardwright.ranks.torch_batch_norm import SyncBatchNorm
from shardwright.ranks.torch_optimizer import (
    DistributedOptimizer,
    allreduce_,
    broadcast_,
    broadcast_optimizer_state,
    broadcast_parameters,
)

__all__ = [
    "DistributedOptimizer", "SyncBatchNorm", "allreduce_", "broadcast_", "broadcast_optimizer_state",
    "broadcast_parameters",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Horovod's other names are the same for every framework."""
    return getattr(horovod, name)
