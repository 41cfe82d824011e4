"""Horovod's names for `sw.ranks`: `import shardwright.horovod as hvd`. docs/from-horovod.md says what differs."""

from __future__ import annotations

from shardwright.horovod import elastic
from shardwright.horovod.basics import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
    run,
    shutdown,
    start_timeline,
)
from shardwright.horovod.collectives import (
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
    broadcast_object_fn,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_async,
    grouped_reducescatter,
    grouped_reducescatter_async,
    join,
    poll,
    reducescatter,
    reducescatter_async,
    synchronize,
)
from shardwright.horovod.errors import HorovodInternalError
from shardwright.horovod.process_sets import (
    ProcessSet,
    add_process_set,
    get_process_set_ids_and_ranks,
    global_process_set,
    remove_process_set,
)
from shardwright.ranks import (
    Compression,
    DistributedOptimizer,
    ReduceOp,
    broadcast_optimizer_state,
    broadcast_parameters,
    cross_rank,
    cross_size,
    is_initialized,
    local_rank,
    local_size,
    rank,
    size,
    stop_timeline,
    world,
)
from shardwright.ranks.elastic import HostsUpdatedInterrupt

Average, Sum, Adasum = ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM
Min, Max, Product = ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT

__all__ = [
    "Adasum", "Average", "Compression", "DistributedOptimizer", "HorovodInternalError", "HostsUpdatedInterrupt", "Max",
    "Min", "ProcessSet", "Product", "Sum", "add_process_set", "allgather", "allgather_async", "allgather_object",
    "allreduce", "allreduce_async", "alltoall", "alltoall_async", "barrier", "broadcast", "broadcast_async",
    "broadcast_object", "broadcast_object_fn", "broadcast_optimizer_state", "broadcast_parameters", "ccl_built",
    "cross_rank", "cross_size", "cuda_built", "ddl_built", "elastic", "get_process_set_ids_and_ranks",
    "global_process_set", "gloo_built", "gloo_enabled", "grouped_allgather", "grouped_allgather_async",
    "grouped_allreduce", "grouped_allreduce_async", "grouped_reducescatter", "grouped_reducescatter_async", "init",
    "is_homogeneous", "is_initialized", "join", "local_rank", "local_size", "mpi_built", "mpi_enabled",
    "mpi_threads_supported", "nccl_built", "poll", "rank", "reducescatter", "reducescatter_async",
    "remove_process_set", "rocm_built", "run", "shutdown", "size", "start_timeline", "stop_timeline", "synchronize",
    "world",
]  # fmt: skip
