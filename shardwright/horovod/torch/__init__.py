"""Horovod's names for PyTorch: `import shardwright.horovod.torch as hvd`. All of `shardwright.horovod`, and these."""

from __future__ import annotations

from typing import Any

from shardwright import horovod
from shardwright.horovod.torch import elastic
from shardwright.horovod.torch.collectives import (
    allgather,
    allreduce,
    allreduce_,
    allreduce_async_,
    alltoall,
    alltoall_async,
    broadcast,
    broadcast_,
    broadcast_async_,
    grouped_allgather,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async_,
    grouped_reducescatter,
    reducescatter,
    sparse_allreduce_async,
)
from shardwright.horovod.torch.optimizer import DistributedOptimizer, broadcast_optimizer_state, broadcast_parameters
from shardwright.ranks.torch_batch_norm import SyncBatchNorm

__all__ = [
    "DistributedOptimizer", "SyncBatchNorm", "allgather", "allreduce", "allreduce_", "allreduce_async_", "alltoall",
    "alltoall_async", "broadcast", "broadcast_", "broadcast_async_", "broadcast_optimizer_state",
    "broadcast_parameters", "elastic", "grouped_allgather", "grouped_allreduce", "grouped_allreduce_",
    "grouped_allreduce_async_", "grouped_reducescatter", "reducescatter", "sparse_allreduce_async",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Horovod's other names are the same for every framework."""
    return getattr(horovod, name)
