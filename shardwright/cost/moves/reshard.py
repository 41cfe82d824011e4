"""The collectives that take a value from one sharding to another, as XLA realises them.

A whole value goes the way that XLA's partitioner chooses (`partitioner.py`). A partial sum is first
reduce-scattered over the axes that split the target evenly, ahead of others, and all-reduced over the rest
(XLA:CPU leaves a reduce-scatter as an all-reduce and a slice; GPU and TPU join them. Its
wire bytes are a reduce-scatter's everywhere, its time what the hardware profile says. Where shards are uneven XLA pads
the sum before it slices it, and no compiler joins all three: `MatchReduceScatter` in XLA's
`reduce_scatter_utils.cc` wants the slice to be the sum's only reader).

Checked against XLA by `benchmarks/probe_moves.py`.
"""

from __future__ import annotations

import math
from functools import lru_cache

from shardwright.cost.moves.collectives import Topology
from shardwright.cost.moves.reshard_cache import Dims, Move, ReshardCache, reshard_cache_of
from shardwright.cost.moves.retile import DividesByZero
from shardwright.errors import UnpartitionableError
from shardwright.hlo.shapes import ELEMENT_BITS
from shardwright.shardings import Mesh, TensorSharding


@lru_cache(maxsize=1 << 16)
def reshard(
    element_type: str,
    shape: tuple[int, ...],
    source: TensorSharding,
    target: TensorSharding,
    mesh: Mesh,
    alike: frozenset[int] = frozenset(),
) -> tuple[Move, ...]:
    """The collectives, in order, that bring an array from `source` to `target`; () where slicing is enough.

    shape: logical dimensions in elements; shards are rounded up where an axis does not divide.
    Axes in `source.unreduced` and not in `target.unreduced` are reduced first.
    alike: dimensions along which all elements are equal, as a broadcast makes them: XLA permutes no shards that differ
    along those only (`BroadcastDimsForCreatedHlo` in its partitioner).
    Raises UnpartitionableError where XLA's partitioner ends its process instead.
    """
    paths = reshard_cache_of(mesh)
    have, want = paths.drop_unit_axes(source.dims), paths.drop_unit_axes(target.dims)
    bits = ELEMENT_BITS[element_type]
    reductions: tuple[Move, ...] = ()
    over = _axes_to_reduce(source, target, paths)
    if over:
        have, reductions = paths.reduce_partial(bits, shape, have, over, paths.scatter_axes(shape, have, want, over))
    try:
        return reductions + paths.moves(bits, shape, have, want, alike)
    except DividesByZero as error:
        raise UnpartitionableError(
            f"XLA's partitioner divides by zero where {element_type}{list(shape)} goes from {source} to {target}",
            remedy="pin the array to a third sharding in between, one that gathers a dimension",
        ) from error


def scatter_axes(shape: tuple[int, ...], source: TensorSharding, target: TensorSharding, mesh: Mesh) -> Dims:
    """Per dimension, the axes over which a partial sum is reduce-scattered on its way from `source` to `target`, in
    order; it is all-reduced over the others that are not partial any more, and lies with those split meanwhile.

    shape: logical dimensions in elements.
    """
    paths = reshard_cache_of(mesh)
    return paths.scatter_axes(
        shape,
        paths.drop_unit_axes(source.dims),
        paths.drop_unit_axes(target.dims),
        _axes_to_reduce(source, target, paths),
    )


def reduce_scatter_steps(
    shape: tuple[int, ...], source: TensorSharding, target: TensorSharding, mesh: Mesh
) -> tuple[Dims, ...]:
    """How a partial sum on its way from `source` to `target` lies behind each of its reduce-scatters."""
    paths = reshard_cache_of(mesh)
    return paths.reduce_scatter_steps(
        shape, paths.drop_unit_axes(source.dims), scatter_axes(shape, source, target, mesh)
    )


def _axes_to_reduce(source: TensorSharding, target: TensorSharding, paths: ReshardCache) -> tuple[str, ...]:
    return tuple(axis for axis in paths.sizes if axis in source.unreduced and axis not in target.unreduced)


@lru_cache(maxsize=1 << 16)
def reshard_time_s(
    element_type: str,
    shape: tuple[int, ...],
    source: TensorSharding,
    target: TensorSharding,
    mesh: Mesh,
    topology: Topology,
) -> float:
    """Seconds of all moves of `reshard`; infinity where XLA's partitioner would end its process."""
    try:
        moves = reshard(element_type, shape, source, target, mesh)
    except UnpartitionableError:
        return math.inf
    return sum(move.time_s(mesh, topology) for move in moves)
