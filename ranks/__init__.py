"""Ranks: processes that train together, with collectives between them. What Horovod's users have, on JAX.

Reading order: job (who am I) → process_sets (who takes part) → operations (what is computed, for which types) →
tensors (numpy, JAX, PyTorch) → programs (what XLA runs) → agreement (what every collective begins with) → fusion and
messages (arrays as few messages) → collectives (what users call) → in_jit (the same inside jitted functions) →
objects, uneven, compression, sparse, optimizer, torch_optimizer, batch_norm (built on them) → watch, stall, timeline
(what each rank is in, who waits for whom, and for how long) → lifeline, programs_cache, host_copies, sampler, elastic
(ranks that come and go).
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
