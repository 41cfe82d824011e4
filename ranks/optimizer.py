"""A one-line wrap that makes an optax optimizer train on the gradients of all ranks.

Eager or traced: outside jit the gradients go as one message a type; under `sw.ranks.jit` XLA sends them.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardwright.errors import OptionError
from shardwright.ranks import in_jit, job, operations
from shardwright.ranks.collectives import allgather, allreduce, broadcast
from shardwright.ranks.compression import Cast, PowerSGD, TopK
from shardwright.ranks.gradient_exchange import exchange, init_memory
from shardwright.ranks.operations import ReduceOp
from shardwright.ranks.process_sets import ProcessSet
from shardwright.ranks.sparse import is_sparse


class DistributedState(NamedTuple):
    """State of a distributed optimizer: a tree, saved and broadcast as any.

    inner: the wrapped optimizer's. passes: gradients since the last exchange. accumulated: their sum, None where each
    is exchanged. memory: what compression keeps for the next step, None without.
    """

    inner: Any
    passes: Any
    accumulated: Any
    memory: Any


def DistributedOptimizer(
    optimizer: optax.GradientTransformation,
    *,
    op: ReduceOp | str = ReduceOp.AVERAGE,
    compression: Cast | TopK | PowerSGD | None = None,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    gradient_predivide_factor: float = 1.0,
    sparse_as_dense: bool = False,
    process_set: ProcessSet | None = None,
    name: str = "gradients",
) -> optax.GradientTransformationExtraArgs:
    """`optimizer`, which updates with the gradients of all ranks.

    op: average, sum or Adasum. compression: `Compression.fp16`, `.bf16`, `.top_k(ratio)`, `.power_sgd(rank)`.
    backward_passes_per_step: how many gradients are added up before they are exchanged; the updates in between are
    zeros. average_aggregated_gradients: divide that sum by their number. gradient_predivide_factor: of an average,
    divides before the sum, and multiplies back after it. sparse_as_dense: send `SparseRows` as whole tables.

    Update inside `sw.ranks.jit`, or outside of jit. Raises OptionError for options that exclude each other.
    """
    op = operations.to_op(op)
    _check_options(op, compression, backward_passes_per_step, gradient_predivide_factor)
    inner = optax.with_extra_args_support(optimizer)
    eager_update = jax.jit(inner.update)
    prescale, postscale = 1 / gradient_predivide_factor, gradient_predivide_factor
    share = 1 / backward_passes_per_step if average_aggregated_gradients else 1.0

    def init(params: optax.Params) -> DistributedState:
        zeros = jax.tree.map(jnp.zeros_like, params) if backward_passes_per_step > 1 else None
        return DistributedState(inner.init(params), jnp.zeros((), jnp.int32), zeros, init_memory(params, compression))

    def step(grads: Any, state: DistributedState, params: Any, extra: dict[str, Any]) -> tuple[Any, DistributedState]:
        def reduce(values: Any) -> Any:
            return allreduce(
                values,
                op,
                name=name,
                process_set=process_set,
                prescale_factor=prescale,
                postscale_factor=postscale,
                compression=compression if isinstance(compression, Cast) else None,
            )

        gather = functools.partial(allgather, name=name, process_set=process_set)
        reduced, memory = exchange(grads, state.memory, compression, reduce, gather, op)
        traced = in_jit.is_traced(jax.tree.leaves((reduced, state, params, extra)))
        update = inner.update if traced or any(map(callable, jax.tree.leaves(extra))) else eager_update
        updates, inner_state = update(reduced, state.inner, params, **extra)
        return updates, DistributedState(inner_state, state.passes, state.accumulated, memory)

    def update(grads: Any, state: DistributedState, params: Any = None, **extra: Any) -> tuple[Any, DistributedState]:
        if sparse_as_dense or backward_passes_per_step > 1:
            grads = jax.tree.map(lambda leaf: leaf.to_dense() if is_sparse(leaf) else leaf, grads, is_leaf=is_sparse)
        if backward_passes_per_step == 1:
            return step(grads, state, params, extra)
        accumulated = jax.tree.map(jnp.add, state.accumulated, grads)
        passes = state.passes + 1

        def exchange_all() -> tuple[Any, DistributedState]:
            whole = jax.tree.map(lambda total: total * share, accumulated)
            updates, after = step(whole, state, params, extra)
            zeros = jax.tree.map(jnp.zeros_like, accumulated)
            return updates, after._replace(passes=jnp.zeros_like(passes), accumulated=zeros)

        def wait() -> tuple[Any, DistributedState]:
            zeros = jax.tree.map(jnp.zeros_like, grads)
            return zeros, state._replace(passes=passes, accumulated=accumulated)

        if in_jit.is_traced(jax.tree.leaves((grads, state))):
            updates: tuple[Any, DistributedState] = jax.lax.cond(passes == backward_passes_per_step, exchange_all, wait)
            return updates
        return exchange_all() if int(passes) == backward_passes_per_step else wait()

    return optax.GradientTransformationExtraArgs(init, update)


def _check_options(op: ReduceOp, compression: Any, passes: int, predivide: float) -> None:
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM):
        raise OptionError(f"{op.value!r} of gradients", where="op", remedy="'average', 'sum' or 'adasum'")
    if not isinstance(compression, Cast | TopK | PowerSGD | None):
        raise OptionError(f"{compression!r} is no compression", where="compression", remedy="see sw.ranks.Compression")
    if isinstance(compression, TopK | PowerSGD) and op is not ReduceOp.AVERAGE:
        raise OptionError(f"{compression!r} with op={op.value!r}", where="compression", remedy="it needs op='average'")
    if type(passes) is not int or passes < 1:
        raise OptionError(f"{passes!r}", where="backward_passes_per_step", remedy="a whole number from 1")
    if not predivide > 0:
        raise OptionError(f"{predivide!r}", where="gradient_predivide_factor", remedy="a number above 0")
    if predivide != 1.0 and (op is not ReduceOp.AVERAGE or isinstance(compression, TopK | PowerSGD)):
        raise OptionError("it is of plain averages", where="gradient_predivide_factor", remedy="leave it out")


def broadcast_parameters(params: Any, root_rank: int = 0, *, process_set: ProcessSet | None = None) -> Any:
    """The parameters of rank `root_rank`, at every rank: call it once before training, and use what it returns."""
    return broadcast(params, root_rank, name="parameters", process_set=process_set)


def broadcast_optimizer_state(state: Any, root_rank: int = 0, *, process_set: ProcessSet | None = None) -> Any:
    """The optimizer state of rank `root_rank`, at every rank. What is no array stays each rank's own."""
    leaves, tree = jax.tree.flatten(state)
    arrays = [index for index, leaf in enumerate(leaves) if _is_array(leaf)]
    sent = broadcast([leaves[index] for index in arrays], root_rank, name="optimizer state", process_set=process_set)
    for index, leaf in zip(arrays, sent, strict=True):
        leaves[index] = leaf
    return jax.tree.unflatten(tree, leaves)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float | complex)


def average_metrics(metrics: Any, weight: float = 1.0, *, process_set: ProcessSet | None = None) -> Any:
    """The average over ranks of a tree of numbers, as floats; integers and scalars of arrays too.

    weight: this rank's, for example its number of examples.
    """
    job.current()
    values = jax.tree.map(lambda leaf: float(np.asarray(leaf)) * weight, metrics)
    totals, weights = allreduce((values, float(weight)), ReduceOp.SUM, name="metrics", process_set=process_set)
    if not weights:
        raise OptionError("the weights of all ranks add up to 0", where="weight", remedy="pass a number above 0")
    return jax.tree.map(lambda total: total / weights, totals)
