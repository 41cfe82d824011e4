"""Ranks: processes that train together, with collectives between them: Horovod's interface on JAX.

Reading order: places, slurm, launchers_cloud, launchers (which rank a process is) → joining (how it gets in) → job (the
job it is in) → process_sets (subsets of ranks) → operations (reductions and their types) →
tensors (numpy, JAX, PyTorch) → programs (XLA's) → agreement (the beginning of every collective) → fusion and messages
(many arrays in few messages) → collectives (the public functions) → in_jit (the same inside jitted functions) →
objects, uneven, compression, sparse, optimizer, batch_norm (built on them) → gradient_options, torch_optimizer,
torch_batch_norm, keras_optimizer, keras_callbacks (for frameworks) → watch, stall, timeline (each rank's current
collective, and its wait) → lifeline, programs_cache, host_copies, sampler, elastic (ranks come and go).
"""

from shardwright.launch import run
from shardwright.ranks import elastic
from shardwright.ranks.batch_norm import batch_norm, batch_norm_moments
from shardwright.ranks.collectives import (
    allgather,
    allgather_async,
    allreduce,
    allreduce_async,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_async,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_async,
    grouped_broadcast,
    grouped_broadcast_async,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from shardwright.ranks.compression import Compression
from shardwright.ranks.dispatch import Handle, poll, synchronize
from shardwright.ranks.in_jit import jit
from shardwright.ranks.job import (
    cross_rank,
    cross_size,
    generation,
    init,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
    world,
)
from shardwright.ranks.objects import allgather_object, broadcast_object
from shardwright.ranks.operations import ReduceOp
from shardwright.ranks.optimizer import (
    DistributedOptimizer,
    average_metrics,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from shardwright.ranks.process_sets import AXIS, ProcessSet
from shardwright.ranks.sparse import SparseRows
from shardwright.ranks.timeline import start_timeline, stop_timeline, timeline_span
from shardwright.ranks.uneven import join, joined

__all__ = [
    "AXIS",
    "Compression",
    "DistributedOptimizer",
    "Handle",
    "ProcessSet",
    "ReduceOp",
    "SparseRows",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_async",
    "alltoall",
    "alltoall_async",
    "average_metrics",
    "barrier",
    "batch_norm",
    "batch_norm_moments",
    "broadcast",
    "broadcast_async",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "cross_rank",
    "cross_size",
    "elastic",
    "generation",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_async",
    "grouped_broadcast",
    "grouped_broadcast_async",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_initialized",
    "jit",
    "join",
    "joined",
    "local_rank",
    "local_size",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "run",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "synchronize",
    "timeline_span",
    "world",
]
