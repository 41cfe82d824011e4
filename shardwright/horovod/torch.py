"""Horovod's names for PyTorch: `import shardwright.horovod.torch as hvd`."""

from __future__ import annotations

from shardwright import horovod
from shardwright.horovod import *  # noqa: F403
from shardwright.ranks.torch_optimizer import (  # these in place of JAX's
    DistributedOptimizer as DistributedOptimizer,
)
from shardwright.ranks.torch_optimizer import allreduce_ as allreduce_
from shardwright.ranks.torch_optimizer import broadcast_ as broadcast_
from shardwright.ranks.torch_optimizer import broadcast_optimizer_state as broadcast_optimizer_state
from shardwright.ranks.torch_optimizer import broadcast_parameters as broadcast_parameters

__all__ = [*horovod.__all__, "allreduce_", "broadcast_"]  # noqa: PLE0604
