"""The collectives that take a value from one sharding to another, as XLA realises them.

XLA's partitioner compares tile counts (shards per dimension) of source and target:

- more shards in the same dimensions: a free slice, after a permute where devices are
  numbered differently;
- fewer in the same dimensions: all-gathers, the last dimension first, before them a
  permute where devices are numbered differently;
- the same number of shards, elsewhere: an all-to-all, then a permute where devices are
  numbered differently; with more shards in total a free slice precedes it, with fewer an
  all-gather, if that frees a whole dimension;
- anything else: all-gathers to the whole array and a free slice.

Fitted to, and checked against, XLA by `benchmarks/probe_moves.py`. A partial sum is
reduce-scattered over the axes that split the target and all-reduced over the others
(XLA:CPU leaves a reduce-scatter as an all-reduce and a slice; GPU and TPU join them. Its
wire bytes are a reduce-scatter's everywhere, its time what the hardware profile says).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from math import gcd, prod

from shardwright.cost.collectives import Topology, collective_time_s, wire_bytes
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
    steps = _Steps(element_type, shape, mesh)
    whole = Mesh(axes=tuple(axis for axis in mesh.axes if axis.size > 1)).sizes
    have, want = (tuple(tuple(a for a in axes if a in whole) for axes in s.dims) for s in (source, target))
    reduced = tuple(axis for axis in whole if axis in source.unreduced and axis not in target.unreduced)
    if reduced:
        have = _reduce(steps, have, want, reduced)
    if have != want:
        _move(steps, have, want)
    return tuple(steps.moves)


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


class _Steps:
    """Collects moves; knows shard sizes and tile counts."""

    def __init__(self, element_type: str, shape: tuple[int, ...], mesh: Mesh) -> None:
        self._bits = ELEMENT_BITS[element_type]
        self._shape = shape
        self._sizes = mesh.sizes
        self.moves: list[Move] = []

    def tiles(self, dims: Dims) -> tuple[int, ...]:
        return tuple(prod(self._sizes[axis] for axis in axes) for axes in dims)

    def add(self, kind: str, axes: Sequence[str], held: Dims, group_size: int | None = None) -> None:
        """One collective; `held` is what a device holds of its payload (see `wire_bytes`)."""
        elements = prod(-(-size // tiles) for size, tiles in zip(self._shape, self.tiles(held), strict=True))
        ordered = tuple(axis for axis in self._sizes if axis in axes)
        self.moves.append(
            Move(
                kind=kind,
                axes=ordered,
                payload_bytes=(elements * self._bits + 7) // 8,
                group_size=group_size or prod(self._sizes[axis] for axis in ordered),
            )
        )

    def permute(self, have: Dims, want: Dims, held: Dims) -> None:
        """A permute over the axes that stand elsewhere in `want` than in `have`."""
        before, after = (
            {(axis, dim, i) for dim, axes in enumerate(dims) for i, axis in enumerate(axes)} for dims in (have, want)
        )
        self.add("collective-permute", [axis for axis, _, _ in before ^ after], held)

    def gather(self, have: Dims, want: Dims) -> None:
        """All-gathers of what `want` does not split, the last dimension first; only tile counts matter."""
        held = list(have)
        counts = zip(self.tiles(have), self.tiles(want), strict=True)
        for dim, (before, after) in reversed(list(enumerate(counts))):
            if before != after:
                begins_alike = have[dim][: len(want[dim])] == want[dim]
                axes = have[dim][len(want[dim]) :] if begins_alike else have[dim]
                held[dim] = want[dim]
                self.add("all-gather", axes, tuple(held), group_size=before // after)


def _reduce(steps: _Steps, have: Dims, want: Dims, reduced: tuple[str, ...]) -> Dims:
    """Reduce partial sums over the axes `reduced`; the dims after it."""
    held = list(have)
    rest = set(reduced)
    for dim, axes in enumerate(want):
        landing = axes[len(held[dim]) :] if axes[: len(held[dim])] == held[dim] else ()
        scattered = tuple(takewhile(rest.__contains__, landing))
        if scattered:
            steps.add("reduce-scatter", scattered, tuple(held))
            held[dim] = (*held[dim], *scattered)
            rest.difference_update(scattered)
    if rest:
        steps.add("all-reduce", tuple(rest), tuple(held))
    return tuple(held)


def _move(steps: _Steps, have: Dims, want: Dims) -> None:
    s, t = steps.tiles(have), steps.tiles(want)
    if all(b % a == 0 for a, b in zip(s, t, strict=True)):
        if not _extends(have, want):
            steps.permute(have, want, want)
    elif all(a % b == 0 for a, b in zip(s, t, strict=True)):
        if not _extends(want, have):
            steps.permute(have, want, have)
        steps.gather(have, want)
    elif prod(s) == prod(t):
        _exchange(steps, have, want)
    elif prod(t) > prod(s) and (sliced := _sliced(have, want)) is not None:
        _exchange(steps, sliced, want)
    elif prod(t) < prod(s) and (kept := _kept(have, want)) is not None:
        steps.gather(have, kept)
        _exchange(steps, kept, want)
    else:
        steps.gather(have, ((),) * len(have))


def _extends(short: Dims, long: Dims) -> bool:
    """Whether slicing alone leads from `short` to `long`: each dimension's axes begin alike."""
    return all(b[: len(a)] == a for a, b in zip(short, long, strict=True))


def _exchange(steps: _Steps, have: Dims, want: Dims) -> None:
    """All-to-alls from the dimensions that lose shards to those that gain some."""
    s, t = steps.tiles(have), steps.tiles(want)
    losing = [dim for dim in range(len(s)) if s[dim] > t[dim]]
    gaining = [dim for dim in range(len(s)) if s[dim] < t[dim]]
    if len(losing) == len(gaining) == 1:
        (dim,) = losing
        moved = [axis for axis in have[dim] if axis not in want[dim]]
        steps.add("all-to-all", moved or have[dim], have, group_size=s[dim] // gcd(s[dim], t[dim]))
        if not _follows(have, want):
            steps.permute(have, want, want)
        return
    routes = _routes(have, want)
    sources, targets = {a for a, _ in routes}, {b for _, b in routes}
    if len(sources) < len(routes) or len(targets) < len(routes):  # one dimension divides, or two join
        steps.gather(have, ((),) * len(have))
        return
    for axes in routes.values():
        steps.add("all-to-all", axes, have)


def _follows(have: Dims, want: Dims) -> bool:
    """Whether moving the minor axes of one dimension behind those of another gives `want`, in order."""
    same_axes = sorted(sum(have, ())) == sorted(sum(want, ()))
    return same_axes and all(a[: len(b)] == b or b[: len(a)] == a for a, b in zip(have, want, strict=True))


def _routes(have: Dims, want: Dims) -> dict[tuple[int, int], list[str]]:
    """Axes that change dimension, by (from, to)."""
    target_of = {axis: dim for dim, axes in enumerate(want) for axis in axes}
    routes: dict[tuple[int, int], list[str]] = {}
    for dim, axes in enumerate(have):
        for axis in axes:
            if target_of.get(axis, dim) != dim:
                routes.setdefault((dim, target_of[axis]), []).append(axis)
    return routes


def _sliced(have: Dims, want: Dims) -> Dims | None:
    """`have` with the target's new axes added to a dimension that gains, or None."""
    held = {axis for axes in have for axis in axes}
    sliced = list(have)
    for dim, axes in enumerate(want):
        new = tuple(axis for axis in axes if axis not in held)
        sliced[dim] = (*have[dim], *new)
    return tuple(sliced) if sorted(sum(sliced, ())) == sorted(sum(want, ())) else None


def _kept(have: Dims, want: Dims) -> Dims | None:
    """`have` without the dimensions whose axes the target drops, or None where that leaves other axes."""
    wanted = {axis for axes in want for axis in axes}
    kept = tuple(axes if set(axes) & wanted else () for axes in have)
    return kept if kept != have and sorted(sum(kept, ())) == sorted(wanted) else None
