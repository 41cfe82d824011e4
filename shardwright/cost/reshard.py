"""The collectives that take a value from one sharding to another, as XLA realises them.

A whole value goes the way that XLA's partitioner chooses (`partitioner.py`). A partial sum is first
reduce-scattered over the axes that split the target evenly and all-reduced over the others
(XLA:CPU leaves a reduce-scatter as an all-reduce and a slice; GPU and TPU join them. Its
wire bytes are a reduce-scatter's everywhere, its time what the hardware profile says. Where shards are uneven XLA pads
the sum before it slices it, and no compiler joins all three: `MatchReduceScatter` in XLA's
`reduce_scatter_utils.cc` wants the slice to be the sum's only reader).

Checked against XLA by `benchmarks/probe_moves.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from shardwright.cost.collectives import Topology, collective_time_s, wire_bytes
from shardwright.cost.partitioner import DividesByZero, Resharding, Step, refined
from shardwright.cost.tilings import Order, count, tiling_of
from shardwright.errors import UnpartitionableError
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
    paths = _paths(mesh)
    have, want = paths.real(source.dims), paths.real(target.dims)
    bits = ELEMENT_BITS[element_type]
    moves: list[Move] = []
    reduced = tuple(axis for axis in paths.sizes if axis in source.unreduced and axis not in target.unreduced)
    if reduced:
        have, moves = _reduce(bits, shape, have, want, reduced, paths)
    if have != want:
        try:
            moves += [_move(step, bits, paths) for step in paths.steps(shape, have, want, alike)]
        except DividesByZero as error:
            raise UnpartitionableError(
                f"XLA's partitioner divides by zero where {element_type}{list(shape)} goes from {source} to {target}",
                remedy="pin the array to a third sharding in between, one that gathers a dimension",
            ) from error
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
    """Seconds of all moves of `reshard`; infinity where XLA's partitioner would end its process."""
    try:
        moves = reshard(element_type, shape, source, target, mesh)
    except UnpartitionableError:
        return math.inf
    return sum(move.time_s(mesh, topology) for move in moves)


# ---- partial sums ----------------------------------------------------------------
def _reduce(
    bits: int, shape: tuple[int, ...], have: Dims, want: Dims, reduced: tuple[str, ...], paths: _Paths
) -> tuple[Dims, list[Move]]:
    """The moves that reduce partial sums over the axes `reduced`, and the dims after them."""
    landing = _landing(shape, have, want, reduced, paths)
    scattered = [axis for axes in landing for axis in axes]
    rest = [axis for axis in reduced if axis not in scattered]
    if scattered and rest and not paths.is_even(shape, have):  # what is scattered first would be marked as partial
        landing, scattered, rest = ((),) * len(have), [], list(reduced)
    held = tuple(before + axes for before, axes in zip(have, landing, strict=True))
    moves = []
    if scattered:
        moves.append(_reduction("reduce-scatter", scattered, bits, shape, have, paths))
    if rest:
        moves.append(_reduction("all-reduce", rest, bits, shape, held, paths))
    return held, moves


def _landing(shape: tuple[int, ...], have: Dims, want: Dims, reduced: tuple[str, ...], paths: _Paths) -> Dims:
    """Axes of `reduced` over which the whole sum would be sliced first: a device needs its slice only. None where
    the sum would be padded before."""
    whole = paths.tiling(have)
    sliced = refined(whole, paths.tiling(want))
    if sliced is None or not all(
        before == after or size % after == 0
        for size, before, after in zip(shape, whole.tiles, sliced.tiles, strict=True)
    ):
        return ((),) * len(have)
    added = [after[len(before) :] for before, after in zip(whole.parts, sliced.parts[:-1], strict=False)]
    wanted = {axis for axes in want for axis in axes}
    landing = [axis for axis in reduced if axis in wanted]
    return tuple(tuple(axis for axis in landing if _covers(atoms, axis, paths)) for atoms in added)


def _covers(atoms: Order, axis: str, paths: _Paths) -> bool:
    return count([atom for atom in atoms if atom.axes == (axis,)]) == paths.sizes[axis]


def _reduction(kind: str, axes: Iterable[str], bits: int, shape: tuple[int, ...], dims: Dims, paths: _Paths) -> Move:
    """A reduction of an array that is split like `dims`."""
    ordered = paths.ordered(axes)
    elements = prod(-(-size // tiles) for size, tiles in zip(shape, paths.tiling(dims).tiles, strict=True))
    group_size = prod(paths.sizes[axis] for axis in ordered)
    return Move(kind=kind, axes=ordered, payload_bytes=_bytes(bits, elements), group_size=group_size)


# ---- whole values ------------------------------------------------------------------
class _Paths:
    """The partitioner's steps on one mesh, remembered. sizes: of the axes of more than one device, in mesh order."""

    def __init__(self, mesh: Mesh) -> None:
        self.sizes = {axis.name: axis.size for axis in mesh.axes if axis.size > 1}
        self._has_idle_axes = len(self.sizes) < len(mesh.axes)
        self._even_size = mesh.device_count**2
        self.tiling = lru_cache(maxsize=1 << 14)(lambda dims: tiling_of(dims, mesh))
        self._followed = lru_cache(maxsize=1 << 16)(self._follow)

    def real(self, dims: Dims) -> Dims:
        """Dims without axes of one device."""
        if not self._has_idle_axes:
            return dims
        return tuple(tuple(axis for axis in axes if axis in self.sizes) for axes in dims)

    def is_even(self, shape: tuple[int, ...], dims: Dims) -> bool:
        return all(size % tiles == 0 for size, tiles in zip(shape, self.tiling(dims).tiles, strict=True))

    def ordered(self, axes: Iterable[str]) -> tuple[str, ...]:
        chosen = set(axes)
        return tuple(axis for axis in self.sizes if axis in chosen)

    def steps(
        self, shape: tuple[int, ...], have: Dims, want: Dims, alike: frozenset[int] = frozenset()
    ) -> tuple[Step, ...]:
        """The steps of one move. Even shards of all sizes take the same ones, so those are followed once."""
        tiles = zip(shape, self.tiling(have).tiles, self.tiling(want).tiles, strict=True)
        if any(size % before or size % after for size, before, after in tiles):
            return self._followed(shape, have, want, alike)
        even = (self._even_size,) * len(shape)
        steps = self._followed(even, have, want, alike)
        if shape == even:
            return steps
        scale_up, scale_down = prod(shape), prod(even)
        return tuple(Step(step.kind, step.atoms, step.elements * scale_up // scale_down) for step in steps)

    def _follow(self, shape: tuple[int, ...], have: Dims, want: Dims, alike: frozenset[int]) -> tuple[Step, ...]:
        resharding = Resharding(shape, alike=alike)
        resharding.run(self.tiling(have), self.tiling(want))
        return tuple(resharding.steps)


@lru_cache(maxsize=64)
def _paths(mesh: Mesh) -> _Paths:
    return _Paths(mesh)


def _move(step: Step, bits: int, paths: _Paths) -> Move:
    return Move(
        kind=step.kind,
        axes=paths.ordered(axis for atom in step.atoms for axis in atom.axes),
        payload_bytes=_bytes(bits, step.elements),
        group_size=count(step.atoms),
    )


def _bytes(bits: int, elements: int) -> int:
    return (elements * bits + 7) // 8
