"""Horovod's names for `sw.ranks`: `import shardwright.horovod as hvd`. docs/from-horovod.md says what differs."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.horovod import elastic
from shardwright.ranks import (
    Compression,
    DistributedOptimizer,
    ProcessSet,
    ReduceOp,
    allgather,
    allgather_async,
    allgather_object,
    allreduce,
    allreduce_async,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_async,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
    cross_rank,
    cross_size,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_async,
    grouped_reducescatter,
    grouped_reducescatter_async,
    init,
    is_initialized,
    join,
    local_rank,
    local_size,
    poll,
    rank,
    reducescatter,
    reducescatter_async,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
    synchronize,
    world,
)

Average, Sum, Adasum = ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM
Min, Max, Product = ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """The process set of some ranks; nothing has to be registered."""
    return process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)


def remove_process_set(process_set: ProcessSet) -> bool:
    """True: nothing was registered."""
    return isinstance(process_set, ProcessSet)


def is_homogeneous() -> bool:
    """Whether every host has the same number of ranks."""
    return len(set(allgather_object(local_size()))) == 1


def gloo_built() -> bool:
    """True: XLA carries Gloo, for CPUs."""
    return True


def nccl_built() -> bool:
    """Whether this process computes on GPUs: XLA's collectives there are NCCL's, or RCCL's."""
    import jax

    return jax.default_backend() == "gpu"


def mpi_built() -> bool:
    """False: ranks need no MPI."""
    return False


def mpi_enabled() -> bool:
    """False: ranks need no MPI."""
    return False


def mpi_threads_supported() -> bool:
    """False: ranks need no MPI."""
    return False


__all__ = [
    "Adasum", "Average", "Compression", "DistributedOptimizer", "Max", "Min", "ProcessSet", "Product", "Sum",
    "add_process_set", "allgather", "allgather_async", "allgather_object", "allreduce", "allreduce_async", "alltoall",
    "alltoall_async", "barrier", "broadcast", "broadcast_async", "broadcast_object", "broadcast_optimizer_state",
    "broadcast_parameters", "cross_rank", "cross_size", "elastic", "gloo_built", "grouped_allgather",
    "grouped_allgather_async", "grouped_allreduce", "grouped_allreduce_async", "grouped_reducescatter",
    "grouped_reducescatter_async", "init",
    "is_homogeneous", "is_initialized", "join", "local_rank", "local_size", "mpi_built", "mpi_enabled",
    "mpi_threads_supported", "nccl_built", "poll", "rank", "reducescatter", "reducescatter_async",
    "remove_process_set", "shutdown", "size", "start_timeline", "stop_timeline", "synchronize", "world",
]  # fmt: skip
