"""What a distributed optimizer does with gradients: dense, sparse or compressed, from all ranks.

Written over two functions, `reduce` and `gather`, so that it is the same eagerly and traced.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from shardwright.ranks.compression import Cast, PowerSGD, TopK
from shardwright.ranks.operations import ReduceOp
from shardwright.ranks.sparse import SparseRows, is_sparse

Exchange = Callable[[Any], Any]
_Compression = Cast | TopK | PowerSGD | None


def init_memory(params: Any, compression: _Compression) -> Any:
    """What compression keeps from step to step: errors of each leaf, and PowerSGD's right factors. None without."""
    leaves = jax.tree.leaves(params)
    if isinstance(compression, TopK):
        return [jnp.zeros_like(leaf) for leaf in leaves]
    if isinstance(compression, PowerSGD):
        return [_init_low_rank(leaf, compression.rank, index) for index, leaf in enumerate(leaves)]
    return None


def _init_low_rank(leaf: Any, rank: int, index: int) -> Any:
    if not _is_low_rank(leaf, rank):
        return None
    columns = leaf.size // leaf.shape[0]
    # The same seed at every rank: all must project on the same subspace.
    factor = jax.random.normal(jax.random.key(index), (columns, rank), jnp.float32)
    return jnp.zeros_like(leaf), factor


def _is_low_rank(leaf: Any, rank: int) -> bool:
    """Whether two factors are smaller than the matrix."""
    if leaf.ndim < 2:
        return False
    rows, columns = leaf.shape[0], leaf.size // leaf.shape[0]
    return bool(rank * (rows + columns) < leaf.size)


def exchange(
    grads: Any, memory: Any, compression: _Compression, reduce: Exchange, gather: Exchange, op: ReduceOp
) -> tuple[Any, Any]:
    """The gradients of all ranks, dense, and the memory of the next step.

    reduce: of a list of arrays. gather: of a tree of arrays, along dimension 0.
    """
    leaves, tree = jax.tree.flatten(grads, is_leaf=is_sparse)
    results: list[Any] = list(leaves)
    sparse = [index for index, leaf in enumerate(leaves) if is_sparse(leaf)]
    dense = [index for index, leaf in enumerate(leaves) if not is_sparse(leaf)]
    for positions, exchange_some in ((sparse, _sparse_rows), (dense, _EXCHANGES.get(type(compression), _plain))):
        if not positions:
            continue
        memories = None if memory is None else [memory[index] for index in positions]
        given = [leaves[index] for index in positions]
        reduced, memories = exchange_some(given, memories, compression, reduce, gather, op)
        for at, index in enumerate(positions):
            results[index] = reduced[at]
            if memory is not None:
                memory = [*memory[:index], memories[at], *memory[index + 1 :]]
    return jax.tree.unflatten(tree, results), memory


def _plain(leaves: list[Any], memories: Any, _: _Compression, reduce: Exchange, *__: Any) -> tuple[list[Any], Any]:
    return reduce(leaves), memories


def _total(parts: list[Any], kinds: Any, op: ReduceOp) -> list[Any]:
    """Sums of gathered contributions; averages over the ranks that sent theirs, for `op` average."""
    if op is not ReduceOp.AVERAGE:
        return parts
    count = kinds.size
    return [part / jnp.asarray(count, part.dtype) for part in parts]


def _sparse_rows(
    leaves: list[SparseRows], memories: Any, _: _Compression, __: Exchange, gather: Exchange, op: ReduceOp
) -> tuple[list[Any], Any]:
    """Indices and rows of all ranks, added up into tables."""
    gathered, ones = gather(([(leaf.indices, leaf.rows) for leaf in leaves], jnp.ones(1, jnp.int32)))
    tables = [
        SparseRows(indices=indices, rows=rows, num_rows=leaf.num_rows).to_dense()
        for leaf, (indices, rows) in zip(leaves, gathered, strict=True)
    ]
    return _total(tables, ones, op), memories


def _top_k(
    leaves: list[Any], memories: list[Any], compression: TopK, _: Exchange, gather: Exchange, op: ReduceOp
) -> tuple[list[Any], list[Any]]:
    """The largest elements of gradient plus error; the rest is the next error."""
    whole = [leaf + error for leaf, error in zip(leaves, memories, strict=True)]
    picked = [_pick(array, compression.ratio) for array in whole]
    gathered, ones = gather((picked, jnp.ones(1, jnp.int32)))
    sums = [_scatter(array, *elements) for array, elements in zip(whole, gathered, strict=True)]
    errors = [array - _scatter(array, *sent) for array, sent in zip(whole, picked, strict=True)]
    return _total(sums, ones, op), errors


@functools.partial(jax.jit, static_argnums=1)
def _pick(array: Any, ratio: float) -> tuple[Any, Any]:
    flat = jnp.ravel(array)
    count = max(1, math.ceil(ratio * flat.size))
    _, indices = jax.lax.top_k(jnp.abs(flat), count)
    return indices.astype(jnp.int32), flat[indices]


@jax.jit
def _scatter(like: Any, indices: Any, values: Any) -> Any:
    return jnp.zeros(like.size, like.dtype).at[indices].add(values).reshape(like.shape)


def _power_sgd(
    leaves: list[Any], memories: list[Any], compression: PowerSGD, reduce: Exchange, *_: Any
) -> tuple[list[Any], list[Any]]:
    """One step of power iteration: P = M Q, averaged and orthonormal; Q = Mᵀ P, averaged; the gradient is P Qᵀ."""
    at = [index for index, memory in enumerate(memories) if memory is not None]
    matrices = {index: _matrix(leaves[index] + memories[index][0]) for index in at}
    rest = [index for index in range(len(leaves)) if index not in matrices]
    left_factors, whole = reduce(
        ([matrices[index] @ memories[index][1] for index in at], [leaves[index] for index in rest])
    )
    left_factors = [_orthonormal(factor) for factor in left_factors]
    right_factors = reduce([matrices[index].T @ factor for index, factor in zip(at, left_factors, strict=True)])
    results, memory = list(leaves), list(memories)
    for index, array in zip(rest, whole, strict=True):
        results[index] = array
    for index, first, second in zip(at, left_factors, right_factors, strict=True):
        like = leaves[index]
        results[index], error = _approximate(like, matrices[index], first, second)
        memory[index] = error, second
    return results, memory


@jax.jit
def _orthonormal(factor: Any) -> Any:
    return jnp.linalg.qr(factor)[0]


@jax.jit
def _approximate(like: Any, matrix: Any, left: Any, right: Any) -> tuple[Any, Any]:
    """The averaged gradient, and this rank's own error of projection."""
    error = matrix - left @ (left.T @ matrix)
    return (left @ right.T).reshape(like.shape).astype(like.dtype), error.reshape(like.shape).astype(like.dtype)


def _matrix(array: Any) -> Any:
    return array.reshape(array.shape[0], -1).astype(jnp.float32)


_EXCHANGES: dict[type, Callable[..., tuple[list[Any], Any]]] = {TopK: _top_k, PowerSGD: _power_sgd}
