"""The collectives that take a value from one sharding to another."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from shardwright.cost.collectives import Topology, collective_time_s, wire_bytes
from shardwright.hlo.shapes import ELEMENT_BITS
from shardwright.plans import Mesh, TensorSharding


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One collective of a resharding; payload as `wire_bytes` takes it."""

    kind: str
    axes: tuple[str, ...]
    payload_bytes: int

    def wire_bytes(self, mesh: Mesh) -> int:
        return wire_bytes(self.kind, self.payload_bytes, mesh.size(self.axes))


@lru_cache(maxsize=1 << 16)
def reshard(
    element_type: str, shape: tuple[int, ...], source: TensorSharding, target: TensorSharding, mesh: Mesh
) -> tuple[Move, ...]:
    """The collectives, in order, that bring an array from `source` to `target`; () where slicing is enough.

    shape: logical dimensions in elements; shards are rounded up where an axis does not divide.
    Axes in `source.unreduced` and not in `target.unreduced` are reduced first.
    """
    moves: list[Move] = []
    current = list(source.dims)

    def local_bytes(dims: list[tuple[str, ...]]) -> int:
        count = prod(TensorSharding(tuple(dims)).shard_shape(shape, mesh))
        return (count * ELEMENT_BITS[element_type] + 7) // 8

    reduced = tuple(axis for axis in source.unreduced if axis not in target.unreduced)
    for axis in reduced:
        landing = next((dim for dim, axes in enumerate(target.dims) if axis in axes), None)
        payload = local_bytes(current)
        if landing is not None and current[landing] == target.dims[landing][: target.dims[landing].index(axis)]:
            moves.append(Move(kind="reduce-scatter", axes=(axis,), payload_bytes=payload))
            current[landing] = (*current[landing], axis)
        else:
            moves.append(Move(kind="all-reduce", axes=(axis,), payload_bytes=payload))
    gathered: list[str] = []
    for dim, (have, want) in enumerate(zip(tuple(current), target.dims, strict=True)):
        kept = len([0 for a, b in zip(have, want, strict=False) if a == b])
        while have[:kept] != want[:kept]:
            kept -= 1
        gathered += have[kept:]
        current[dim] = have[:kept]
    if gathered:
        moves.append(Move(kind="all-gather", axes=tuple(gathered), payload_bytes=local_bytes(current)))
    return tuple(moves)


@lru_cache(maxsize=1 << 16)
def reshard_time_s(
    element_type: str,
    shape: tuple[int, ...],
    source: TensorSharding,
    target: TensorSharding,
    mesh: Mesh,
    topology: Topology,
) -> float:
    """Seconds of all moves of `reshard`."""
    return sum(
        collective_time_s(move.kind, move.payload_bytes, move.axes, mesh, topology)
        for move in reshard(element_type, shape, source, target, mesh)
    )
