"""Parts of reshards on one mesh, with every answer cached.

A reshard reduces partial sums first, then brings a whole value to its target. This module computes both parts;
`reshard` and `move_table` combine them.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence, Set
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby, pairwise, takewhile
from math import prod

from shardwright.cost.moves.collectives import Topology, group_time_s, wire_bytes
from shardwright.cost.moves.partitioner import OutermostDim, PartitionerStep, Resharding
from shardwright.cost.moves.retile import refine
from shardwright.cost.moves.tilings import AtomOrder, along, count, tiling_of
from shardwright.plans.shardings import Mesh

#: Axes that split each dimension of an array, major first.
Dims = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One collective of a reshard; payload: see `wire_bytes`.

    axes: the mesh axes of its links.
    atoms: their parts that differ within its groups, in order: all, unless XLA splits an axis.
    joined_bytes: size of each device's concatenation of its shard with received edges of its neighbors' shards; 0 if
        the received data replaces the shard.
    is_minor: whether these are joined along the last dimension.
    reads, writes: the outermost dimension in the sent and received data (`partitioner.PartitionerStep`).
    """

    kind: str
    axes: tuple[str, ...]
    atoms: AtomOrder
    payload_bytes: int
    joined_bytes: int = 0
    is_minor: bool = False
    reads: OutermostDim | None = None
    writes: OutermostDim | None = None

    def in_half(self) -> Move:
        """The same of elements half as wide."""
        return replace(self, payload_bytes=self.payload_bytes // 2, joined_bytes=self.joined_bytes // 2)

    @property
    def group_size(self) -> int:
        """Devices per group."""
        return count(self.atoms)

    @property
    def wire_bytes(self) -> int:
        return wire_bytes(self.kind, self.payload_bytes, self.group_size)

    def time_s(self, mesh: Mesh, topology: Topology, share: float = 1.0) -> float:
        """Seconds of the collective; share: its fraction of one latency, if combined with others."""
        return group_time_s(self.kind, self.payload_bytes, self.atoms, mesh, topology, share)


def even_size(mesh: Mesh) -> int:
    """A length split evenly by all shardings on a mesh, at every step of a reshard."""
    return mesh.device_count**2


class ReshardCache:
    """Cached answers of one mesh. sizes: of the axes of more than one device, in mesh order."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self.sizes = {axis.name: axis.size for axis in mesh.axes if axis.size > 1}
        self._has_idle_axes = len(self.sizes) < len(mesh.axes)
        self._even_size = even_size(mesh)
        self.tiling = lru_cache(maxsize=1 << 14)(lambda dims: tiling_of(dims, mesh))
        self._followed = lru_cache(maxsize=1 << 16)(self._follow)

    def drop_unit_axes(self, dims: Dims) -> Dims:
        """Dims without axes of one device."""
        if not self._has_idle_axes:
            return dims
        return tuple(tuple(axis for axis in axes if axis in self.sizes) for axes in dims)

    def is_even(self, shape: tuple[int, ...], dims: Dims) -> bool:
        return all(size % tiles == 0 for size, tiles in zip(shape, self.tiling(dims).tiles, strict=True))

    def sort_axes(self, axes: Iterable[str]) -> tuple[str, ...]:
        chosen = set(axes)
        return tuple(axis for axis in self.sizes if axis in chosen)

    # ---- partial sums ------------------------------------------------------------
    def slice_axes(self, shape: tuple[int, ...], start: Dims, goal: Dims) -> Dims:
        """Per dimension, the axes of `goal` over which an array in layout `start` is sliced first, in cutting order.
        None if it is padded before, or not only sliced.
        """
        whole = self.tiling(start)
        sliced = refine(whole, self.tiling(goal))
        if sliced is None or not all(
            before == after or size % after == 0
            for size, before, after in zip(shape, whole.tiles, sliced.tiles, strict=True)
        ):
            return ((),) * len(start)
        added = [after[len(before) :] for before, after in zip(whole.parts, sliced.parts[:-1], strict=False)]
        wanted = {axis for axes in goal for axis in axes}
        return tuple(self._cutting_axes(atoms, wanted) for atoms in added)

    def _cutting_axes(self, atoms: AtomOrder, goal_axes: Set[str]) -> tuple[str, ...]:
        """The axes that cut a dimension, up to the first that is not all of one of `goal_axes`."""
        cutting: list[str] = []
        for axes, run in groupby(atoms, key=lambda atom: atom.axes):
            if len(axes) > 1 or axes[0] not in goal_axes or count(list(run)) != self.sizes[axes[0]]:
                break
            cutting += axes
        return tuple(cutting)

    def scatter_axes(self, shape: tuple[int, ...], start: Dims, goal: Dims, over: Sequence[str]) -> Dims:
        """Per dimension, the axes among `over` of a partial sum's reduce-scatter on its way to `goal`
        (`axes_to_scatter`). None with uneven shards and only some axes scattered: the first scattered result would be
        marked partial.
        """
        scattered = tuple(axes_to_scatter(axes, over) for axes in self.slice_axes(shape, start, goal))
        is_all = sum(map(len, scattered)) == len(over)
        return scattered if is_all or self.is_even(shape, start) else ((),) * len(start)

    def reduce_partial(
        self, bits: int, shape: tuple[int, ...], start: Dims, over: Sequence[str], landing: Dims
    ) -> tuple[Dims, tuple[Move, ...]]:
        """Layout after reducing a partial sum over the axes `over` from layout `start`, and the moves.

        landing: the axes among these that split a dimension afterwards.
        """
        moves = []
        for before, after in pairwise((start, *self.reduce_scatter_steps(shape, start, landing))):
            grown = [dim for dim, axes in enumerate(after) if len(axes) > len(before[dim])]
            axes = [axis for dim in grown for axis in after[dim][len(before[dim]) :]]
            last = max(grown)
            reads = OutermostDim(self.tiling(before).tiles[:last], last == len(shape) - 1) if last else None
            moves.append(self._reduction("reduce-scatter", axes, bits, shape, before, reads))
        held = tuple(before + axes for before, axes in zip(start, landing, strict=True))
        rest = [axis for axis in over if not any(axis in axes for axes in landing)]
        if rest:
            moves.append(self._reduction("all-reduce", rest, bits, shape, held))
        return held, tuple(moves)

    def reduce_scatter_steps(self, shape: tuple[int, ...], start: Dims, landing: Dims) -> tuple[Dims, ...]:
        """Layouts of a sum after each reduce-scatter: one per dimension, since no compiler joins an all-reduce and a
        slice of two. The innermost axes, with the faster links, come first.

        A sum of uneven shards cannot stay partial meanwhile: it is reduced at once.
        """
        held = tuple(before + axes for before, axes in zip(start, landing, strict=True))
        order = list(self.sizes)
        dims = sorted((dim for dim, axes in enumerate(landing) if axes), key=lambda dim: -order.index(landing[dim][-1]))
        if not dims or not (self.is_even(shape, start) and self.is_even(shape, held)):
            return (held,) if dims else ()
        steps = [start]
        for dim in dims:
            steps.append(tuple(held[i] if i == dim else axes for i, axes in enumerate(steps[-1])))
        return tuple(steps[1:])

    def _reduction(
        self,
        kind: str,
        axes: Iterable[str],
        bits: int,
        shape: tuple[int, ...],
        dims: Dims,
        reads: OutermostDim | None = None,
    ) -> Move:
        """A reduction of an array split like `dims`."""
        ordered = self.sort_axes(axes)
        elements = prod(-(-size // tiles) for size, tiles in zip(shape, self.tiling(dims).tiles, strict=True))
        return Move(
            kind=kind,
            axes=ordered,
            atoms=along(ordered, self._mesh),
            payload_bytes=_bytes(bits, elements),
            reads=reads,
        )

    # ---- whole values --------------------------------------------------------------
    def moves(
        self, bits: int, shape: tuple[int, ...], start: Dims, goal: Dims, alike: frozenset[int] = frozenset()
    ) -> tuple[Move, ...]:
        """The moves of a whole value from `start` to `goal`. Raises DividesByZero on XLA's own division by zero.

        Even shards of all sizes have the same moves: computed once.
        """
        if start == goal:
            return ()
        tiles = zip(shape, self.tiling(start).tiles, self.tiling(goal).tiles, strict=True)
        if any(size % before or size % after for size, before, after in tiles):
            return tuple(self._move(step, bits, step.elements) for step in self._followed(shape, start, goal, alike))
        even = (self._even_size,) * len(shape)
        scale_up, scale_down = prod(shape), prod(even)
        return tuple(
            self._move(step, bits, step.elements * scale_up // scale_down)
            for step in self._followed(even, start, goal, alike)
        )

    def _follow(
        self, shape: tuple[int, ...], start: Dims, goal: Dims, alike: frozenset[int]
    ) -> tuple[PartitionerStep, ...]:
        resharding = Resharding(shape, alike=alike)
        resharding.run(self.tiling(start), self.tiling(goal))
        return tuple(resharding.steps)

    def _move(self, step: PartitionerStep, bits: int, elements: int) -> Move:
        joined = step.joined
        return Move(
            kind=step.kind,
            axes=self.sort_axes(axis for atom in step.atoms for axis in atom.axes),
            atoms=tuple(sorted(step.atoms)),
            payload_bytes=_bytes(bits, elements),
            joined_bytes=_bytes(bits, joined.elements) if joined else 0,
            is_minor=joined is not None and joined.is_minor,
            reads=step.reads,
            writes=step.writes,
        )


def axes_to_scatter(cutting: Sequence[str], over: Container[str]) -> tuple[str, ...]:
    """The scattered axes of a sum over the axes `over`, from the axes that cut a dimension, in order: the leading ones.
    XLA reduces whole any dimension cut first by another axis: the wanted slice is no part of a slice over the summing
    axes alone.
    """
    return tuple(takewhile(lambda axis: axis in over, cutting))


@lru_cache(maxsize=64)
def reshard_cache_of(mesh: Mesh) -> ReshardCache:
    """The cache of one mesh."""
    return ReshardCache(mesh)


def _bytes(bits: int, elements: int) -> int:
    return (elements * bits + 7) // 8
