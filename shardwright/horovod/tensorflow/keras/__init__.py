"""Horovod's names for Keras in TensorFlow: `shardwright.horovod.keras`, with this package's order in the optimizer."""

from __future__ import annotations

from typing import Any

from shardwright.horovod import keras as same
from shardwright.horovod.process_sets import global_process_set
from shardwright.horovod.tensorflow.keras import callbacks, elastic
from shardwright.ranks import Compression, ReduceOp

__all__ = ["DistributedOptimizer", "callbacks", "elastic"]


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp | str = ReduceOp.AVERAGE,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """`optimizer` itself, which from now on steps with the gradients of all ranks: see `shardwright.horovod.keras`."""
    return same.DistributedOptimizer(
        optimizer, name, device_dense, device_sparse, compression, sparse_as_dense, gradient_predivide_factor, op,
        num_groups, groups, backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients, process_set=process_set,
    )  # fmt: skip


def __getattr__(name: str) -> Any:
    """The other names are the same."""
    return getattr(same, name)
