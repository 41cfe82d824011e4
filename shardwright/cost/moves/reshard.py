"""The collectives that take a value from one sharding to another in XLA.

A whole value follows XLA's partitioner (`partitioner.py`). A partial sum is first reduce-scattered over the axes that
split the target evenly, and all-reduced over the rest. XLA:CPU leaves a reduce-scatter in two parts, an all-reduce and
a slice; GPU and TPU join them. Its wire bytes are a reduce-scatter's everywhere; its time comes from the hardware
profile. With uneven shards XLA pads the sum before slicing, and no compiler joins all three: `MatchReduceScatter` in
XLA's `reduce_scatter_utils.cc` requires the slice to be the sum's only reader.

Checked against XLA by `oracles/moves.py`.
"""

from __future__ import annotations

import math
from functools import lru_cache

from shardwright.cost.moves.collectives import Topology
from shardwright.cost.moves.reshard_cache import Dims, Move, ReshardCache, reshard_cache_of
from shardwright.cost.moves.retile import DividesByZero
from shardwright.errors import UnpartitionableError
from shardwright.hlo.shapes import ELEMENT_BITS
from shardwright.plans.shardings import Mesh, TensorSharding


@lru_cache(maxsize=1 << 16)
def reshard(
    element_type: str,
    shape: tuple[int, ...],
    source: TensorSharding,
    target: TensorSharding,
    mesh: Mesh,
    alike: frozenset[int] = frozenset(),
) -> tuple[Move, ...]:
    """The collectives, in order, from `source` to `target`; () if slicing is enough.

    shape: logical dimensions in elements; shards are rounded up if an axis does not divide.
    Axes in `source.unreduced` and not in `target.unreduced` are reduced first.
    alike: dimensions along which all elements are equal, e.g. of a broadcast: XLA permutes no shards that differ along
        those only (`BroadcastDimsForCreatedHlo` in its partitioner).
    Raises UnpartitionableError if XLA's partitioner would end its process.
    """
    paths = reshard_cache_of(mesh)
    start, goal = paths.drop_unit_axes(source.dims), paths.drop_unit_axes(target.dims)
    bits = ELEMENT_BITS[element_type]
    reductions: tuple[Move, ...] = ()
    over = _axes_to_reduce(source, target, paths)
    if over:
        start, reductions = paths.reduce_partial(bits, shape, start, over, paths.scatter_axes(shape, start, goal, over))
    try:
        return reductions + paths.moves(bits, shape, start, goal, alike)
    except DividesByZero as error:
        raise UnpartitionableError(
            f"XLA's partitioner divides by zero where {element_type}{list(shape)} goes from {source} to {target}",
            remedy="pin the array to a third sharding in between, one that gathers a dimension",
        ) from error


def scatter_axes(shape: tuple[int, ...], source: TensorSharding, target: TensorSharding, mesh: Mesh) -> Dims:
    """Per dimension, the axes of a partial sum's reduce-scatters from `source` to `target`, in order. The remaining
    reduced axes are all-reduced, with those dimensions split meanwhile.

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
    """Sharding of a partial sum after each reduce-scatter from `source` to `target`."""
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
    """Seconds of all moves of `reshard`; infinity if XLA's partitioner would end its process."""
    try:
        moves = reshard(element_type, shape, source, target, mesh)
    except UnpartitionableError:
        return math.inf
    return sum(move.time_s(mesh, topology) for move in moves)
