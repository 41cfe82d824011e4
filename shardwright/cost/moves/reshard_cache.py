"""What moves on one mesh are made of, with every answer remembered.

A move reduces partial sums first, then brings a whole value to where it is wanted. What either takes
is worked out here, for `reshard` and `many_moves` to put together.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise, takewhile
from math import prod

from shardwright.cost.moves.collectives import Topology, group_time_s, wire_bytes
from shardwright.cost.moves.partitioner import OutermostDim, PartitionerStep, Resharding
from shardwright.cost.moves.retile import refine
from shardwright.cost.moves.tilings import AtomOrder, along, count, tiling_of
from shardwright.shardings import Mesh

#: Axes that split each dimension of an array, major first.
Dims = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One collective of a resharding; payload as `wire_bytes` takes it.

    axes: the mesh axes whose links it uses. atoms: what of them its groups differ in, in order: all, but for where XLA
        splits an axis.
    joined_bytes: of what each device makes of its shard and what it receives, edges of its neighbours' shards; 0 where
        what it receives takes the shard's place. is_minor: whether they lie along the last dimension.
    reads, writes: what lies outermost in what it sends and receives (`partitioner.PartitionerStep`).
    """

    kind: str
    axes: tuple[str, ...]
    atoms: AtomOrder
    payload_bytes: int
    joined_bytes: int = 0
    is_minor: bool = False
    reads: OutermostDim | None = None
    writes: OutermostDim | None = None

    @property
    def group_size(self) -> int:
        """Devices that take part together."""
        return count(self.atoms)

    @property
    def wire_bytes(self) -> int:
        return wire_bytes(self.kind, self.payload_bytes, self.group_size)

    def time_s(self, mesh: Mesh, topology: Topology, share: float = 1.0) -> float:
        """Seconds of it; share: of the latency, which collectives that a compiler combines pay together."""
        return group_time_s(self.kind, self.payload_bytes, self.atoms, mesh, topology, share)


def even_size(mesh: Mesh) -> int:
    """A length that all shardings on a mesh split evenly, whatever is done to them on the way."""
    return mesh.device_count**2


class ReshardCache:
    """What is asked of one mesh, remembered. sizes: of the axes of more than one device, in mesh order."""

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
    def slice_axes(self, shape: tuple[int, ...], have: Dims, want: Dims) -> Dims:
        """Per dimension, the axes of `want` over which an array that lies like `have` is sliced first, in the order in
        which they cut it. None where it would be padded before, or is not only sliced."""
        whole = self.tiling(have)
        sliced = refine(whole, self.tiling(want))
        if sliced is None or not all(
            before == after or size % after == 0
            for size, before, after in zip(shape, whole.tiles, sliced.tiles, strict=True)
        ):
            return ((),) * len(have)
        added = [after[len(before) :] for before, after in zip(whole.parts, sliced.parts[:-1], strict=False)]
        wanted = {axis for axes in want for axis in axes}
        return tuple(self._cutting_axes(atoms, wanted) for atoms in added)

    def _cutting_axes(self, atoms: AtomOrder, wanted: Set[str]) -> tuple[str, ...]:
        """The axes that cut a dimension, up to the first that is not all of a wanted one."""
        found: list[str] = []
        for axes, run in groupby(atoms, key=lambda atom: atom.axes):
            if len(axes) > 1 or axes[0] not in wanted or count(list(run)) != self.sizes[axes[0]]:
                break
            found += axes
        return tuple(found)

    def scatter_axes(self, shape: tuple[int, ...], have: Dims, want: Dims, over: Sequence[str]) -> Dims:
        """Per dimension, which of the axes `over` a partial sum is scattered over on its way to `want`
        (`axes_to_scatter`). None where some only are and shards are uneven:
        what is scattered first would be marked as partial."""
        found = tuple(axes_to_scatter(axes, over) for axes in self.slice_axes(shape, have, want))
        is_all = sum(map(len, found)) == len(over)
        return found if is_all or self.is_even(shape, have) else ((),) * len(have)

    def reduce_partial(
        self, bits: int, shape: tuple[int, ...], have: Dims, over: Sequence[str], landing: Dims
    ) -> tuple[Dims, tuple[Move, ...]]:
        """How a partial sum over the axes `over`, which lies like `have`, lies once it is reduced, and the moves.

        landing: those of the axes that split a dimension then.
        """
        moves = []
        for before, after in pairwise((have, *self.reduce_scatter_steps(shape, have, landing))):
            grown = [dim for dim, axes in enumerate(after) if len(axes) > len(before[dim])]
            axes = [axis for dim in grown for axis in after[dim][len(before[dim]) :]]
            last = max(grown)
            reads = OutermostDim(self.tiling(before).tiles[:last], last == len(shape) - 1) if last else None
            moves.append(self._reduction("reduce-scatter", axes, bits, shape, before, reads))
        held = tuple(before + axes for before, axes in zip(have, landing, strict=True))
        rest = [axis for axis in over if not any(axis in axes for axes in landing)]
        if rest:
            moves.append(self._reduction("all-reduce", rest, bits, shape, held))
        return held, tuple(moves)

    def reduce_scatter_steps(self, shape: tuple[int, ...], have: Dims, landing: Dims) -> tuple[Dims, ...]:
        """How a sum that is scattered lies behind each reduce-scatter: one for each dimension, since no compiler joins
        an all-reduce and a slice of two. The one over the innermost axes, which have the faster links, is first.

        A sum of uneven shards cannot stay partial meanwhile: it is reduced at once.
        """
        held = tuple(before + axes for before, axes in zip(have, landing, strict=True))
        order = list(self.sizes)
        dims = sorted((dim for dim, axes in enumerate(landing) if axes), key=lambda dim: -order.index(landing[dim][-1]))
        if not dims or not (self.is_even(shape, have) and self.is_even(shape, held)):
            return (held,) if dims else ()
        steps = [have]
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
        """A reduction of an array that is split like `dims`."""
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
        self, bits: int, shape: tuple[int, ...], have: Dims, want: Dims, alike: frozenset[int] = frozenset()
    ) -> tuple[Move, ...]:
        """The moves that bring a whole value from `have` to `want`. Raises DividesByZero where XLA does.

        Even shards of all sizes take the same ones, so those are followed once.
        """
        if have == want:
            return ()
        tiles = zip(shape, self.tiling(have).tiles, self.tiling(want).tiles, strict=True)
        if any(size % before or size % after for size, before, after in tiles):
            return tuple(self._move(step, bits, step.elements) for step in self._followed(shape, have, want, alike))
        even = (self._even_size,) * len(shape)
        scale_up, scale_down = prod(shape), prod(even)
        return tuple(
            self._move(step, bits, step.elements * scale_up // scale_down)
            for step in self._followed(even, have, want, alike)
        )

    def _follow(
        self, shape: tuple[int, ...], have: Dims, want: Dims, alike: frozenset[int]
    ) -> tuple[PartitionerStep, ...]:
        resharding = Resharding(shape, alike=alike)
        resharding.run(self.tiling(have), self.tiling(want))
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
    """Those of the axes that cut a dimension, in order, over which a sum over the axes `over` is scattered: the
    leading ones. What another axis cuts first XLA reduces whole, for the slice that is wanted is no part of any slice
    over the summing axes alone."""
    return tuple(takewhile(lambda axis: axis in over, cutting))


@lru_cache(maxsize=64)
def reshard_cache_of(mesh: Mesh) -> ReshardCache:
    """What is remembered of one mesh."""
    return ReshardCache(mesh)


def _bytes(bits: int, elements: int) -> int:
    return (elements * bits + 7) // 8
