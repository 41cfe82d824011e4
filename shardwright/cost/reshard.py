"""The collectives that take a value from one sharding to another, as XLA realises them.

A whole value goes the way that XLA's partitioner chooses (`partitioner.py`). A partial sum is first
reduce-scattered over the axes that split the target and all-reduced over the others
(XLA:CPU leaves a reduce-scatter as an all-reduce and a slice; GPU and TPU join them. Its
wire bytes are a reduce-scatter's everywhere, its time what the hardware profile says).

Checked against XLA by `benchmarks/probe_moves.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import lcm, prod

from shardwright.cost.collectives import Topology, collective_time_s, wire_bytes
from shardwright.cost.partitioner import Resharding, Step, refined
from shardwright.cost.tilings import Order, count, tiling_of
from shardwright.hlo.shapes import ELEMENT_BITS
from shardwright.plans import Mesh, TensorSharding

Dims = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One collective of a resharding; payload as `wire_bytes` takes it.

    axes: the mesh axes whose links it uses.
    group_size: devices that take part together; less than the axes have where XLA splits an axis.
    """

    kind: str
    axes: tuple[str, ...]
    payload_bytes: int
    group_size: int

    @property
    def wire_bytes(self) -> int:
        return wire_bytes(self.kind, self.payload_bytes, self.group_size)

    def time_s(self, mesh: Mesh, topology: Topology) -> float:
        return collective_time_s(self.kind, self.payload_bytes, self.axes, mesh, topology, group_size=self.group_size)


@lru_cache(maxsize=1 << 16)
def reshard(
    element_type: str, shape: tuple[int, ...], source: TensorSharding, target: TensorSharding, mesh: Mesh
) -> tuple[Move, ...]:
    """The collectives, in order, that bring an array from `source` to `target`; () where slicing is enough.

    shape: logical dimensions in elements; shards are rounded up where an axis does not divide.
    Axes in `source.unreduced` and not in `target.unreduced` are reduced first.
    """
    large = _axes(mesh)
    have, want = (tuple(tuple(a for a in axes if a in large) for axes in s.dims) for s in (source, target))
    reduced = tuple(axis for axis in large if axis in source.unreduced and axis not in target.unreduced)
    bits = ELEMENT_BITS[element_type]
    moves: list[Move] = []
    if reduced:
        have, moves = _reduce(bits, shape, have, want, reduced, mesh)
    if have != want:
        moves += [_move(step, bits, mesh) for step in _steps(shape, have, want, mesh)]
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
    return sum(move.time_s(mesh, topology) for move in reshard(element_type, shape, source, target, mesh))


# ---- partial sums ----------------------------------------------------------------
def _reduce(
    bits: int, shape: tuple[int, ...], have: Dims, want: Dims, reduced: tuple[str, ...], mesh: Mesh
) -> tuple[Dims, list[Move]]:
    """The moves that reduce partial sums over the axes `reduced`, and the dims after them."""
    landing = _landing(have, want, reduced, mesh)
    scattered = [axis for axes in landing for axis in axes]
    rest = [axis for axis in reduced if axis not in scattered]
    held = tuple(before + axes for before, axes in zip(have, landing, strict=True))
    moves = []
    if scattered:
        moves.append(_reduction("reduce-scatter", scattered, _shard_bytes(bits, shape, have, mesh), mesh))
    if rest:
        moves.append(_reduction("all-reduce", rest, _shard_bytes(bits, shape, held, mesh), mesh))
    return held, moves


def _landing(have: Dims, want: Dims, reduced: tuple[str, ...], mesh: Mesh) -> Dims:
    """Axes of `reduced` over which the whole sum would be sliced first: a device needs its slice only."""
    whole = tiling_of(have, mesh)
    sliced = refined(whole, tiling_of(want, mesh))
    if sliced is None:
        return ((),) * len(have)
    added = [after[len(before) :] for before, after in zip(whole.parts, sliced.parts[:-1], strict=False)]
    wanted = {axis for axes in want for axis in axes}
    return tuple(tuple(axis for axis in reduced if axis in wanted and _covers(atoms, axis, mesh)) for atoms in added)


def _covers(atoms: Order, axis: str, mesh: Mesh) -> bool:
    return count([atom for atom in atoms if atom.axes == (axis,)]) == mesh.sizes[axis]


def _reduction(kind: str, axes: Iterable[str], payload_bytes: int, mesh: Mesh) -> Move:
    ordered = _ordered(axes, mesh)
    return Move(kind=kind, axes=ordered, payload_bytes=payload_bytes, group_size=mesh.size(ordered))


def _shard_bytes(bits: int, shape: tuple[int, ...], dims: Iterable[tuple[str, ...]], mesh: Mesh) -> int:
    return _bytes(bits, prod(-(-size // mesh.size(axes)) for size, axes in zip(shape, dims, strict=True)))


# ---- whole values ------------------------------------------------------------------
def _steps(shape: tuple[int, ...], have: Dims, want: Dims, mesh: Mesh) -> tuple[Step, ...]:
    """The partitioner's steps. Even shards of all sizes take the same ones, so those are followed once."""
    factors = tuple(lcm(mesh.size(a), mesh.size(b)) for a, b in zip(have, want, strict=True))
    if any(size % factor for size, factor in zip(shape, factors, strict=True)):
        return _followed(shape, have, want, mesh)
    even = (mesh.device_count**2,) * len(shape)
    scale_up, scale_down = prod(shape), prod(even)
    return tuple(
        Step(step.kind, step.atoms, step.elements * scale_up // scale_down)
        for step in _followed(even, have, want, mesh)
    )


@lru_cache(maxsize=1 << 16)
def _followed(shape: tuple[int, ...], have: Dims, want: Dims, mesh: Mesh) -> tuple[Step, ...]:
    resharding = Resharding(shape)
    resharding.run(tiling_of(have, mesh), tiling_of(want, mesh))
    return tuple(resharding.steps)


def _move(step: Step, bits: int, mesh: Mesh) -> Move:
    return Move(
        kind=step.kind,
        axes=_ordered((axis for atom in step.atoms for axis in atom.axes), mesh),
        payload_bytes=_bytes(bits, step.elements),
        group_size=count(step.atoms),
    )


def _bytes(bits: int, elements: int) -> int:
    return (elements * bits + 7) // 8


@lru_cache
def _axes(mesh: Mesh) -> tuple[str, ...]:
    """Axes of more than one device."""
    return tuple(axis.name for axis in mesh.axes if axis.size > 1)


def _ordered(axes: Iterable[str], mesh: Mesh) -> tuple[str, ...]:
    chosen = set(axes)
    return tuple(axis.name for axis in mesh.axes if axis.name in chosen)
