"""Which boxes of an array travel from which device to which, so that it lies otherwise: pure arithmetic.

Both layouts cut the array into a grid of equal blocks. A device that is to hold a block of the target gets from
every block of the source that overlaps it the overlap and nothing else; devices of one node that hold the same block
get it once. Padding does not travel: it is zeros on both sides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

from shardwright.errors import PlanError
from shardwright.layouts import Layout, Shard, Slices, distinct_shards


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A box on its way from the device `source` to the device `target`.

    number: in the move. cut: its bounds within the source's shard, None for all of it.
    """

    number: int
    source: int
    target: int
    cut: Slices | None
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A shard of the target that devices of one node hold: made on the first of them, then copied to the others.

    pieces: row-major over `grid`, the number of pieces along each dimension; none where it is only padding.
    padding: zeros to add to the pieces at the end of each dimension.
    """

    positions: tuple[int, ...]
    pieces: tuple[Piece, ...]
    grid: tuple[int, ...]
    padding: tuple[int, ...]


def plan_move(source: Layout, target: Layout, node_of: Callable[[int], int]) -> tuple[Part, ...]:
    """The parts of the target, each with the pieces it is made of.

    node_of: the node that owns a device. A block with several holders is read from one on the receiving node where
    there is one; else the receivers take turns. Raises PlanError where the layouts are of different arrays.
    """
    if (source.element_type, source.shape) != (target.element_type, target.shape):
        raise PlanError(
            f"{source.element_type}{list(source.shape)} cannot be moved to where "
            f"{target.element_type}{list(target.shape)} is expected"
        )
    blocks = {_starts(shard.slices): shard.holders for shard in distinct_shards(source, source.devices)}
    by_node: dict[int, list[int]] = {}
    for position in target.devices:
        by_node.setdefault(node_of(position), []).append(position)
    parts: list[Part] = []
    number = 0
    for node, positions in by_node.items():
        for shard in distinct_shards(target, positions):
            pieces: list[Piece] = []
            overlaps = _overlaps(shard, source)
            for box in product(*overlaps):
                holders = blocks[tuple(start for start, _ in box)]
                near = [holder for holder in holders if node_of(holder) == node] or holders
                pieces.append(_piece(number, near[len(parts) % len(near)], shard.holders[0], box, source))
                number += 1
            parts.append(
                Part(
                    positions=shard.holders,
                    pieces=tuple(pieces),
                    grid=tuple(len(along) for along in overlaps),
                    padding=_padding(shard, source.shape),
                )
            )
    return tuple(parts)


#: Along one dimension: where a block of the source starts, and the bounds of the overlap within it.
_Overlap = tuple[int, slice]


def _overlaps(shard: Shard, source: Layout) -> list[list[_Overlap]]:
    found = []
    for part, size, extent in zip(shard.slices, source.shape, source.shard_shape, strict=True):
        first, last = min(part.start, size), min(part.stop, size)
        starts = range(first // extent * extent, last, extent) if first < last else ()
        found.append([(at, slice(max(first - at, 0), min(last - at, extent))) for at in starts])
    return found


def _piece(number: int, holder: int, target: int, box: tuple[_Overlap, ...], source: Layout) -> Piece:
    cut = tuple(bounds for _, bounds in box)
    shape = tuple(bounds.stop - bounds.start for bounds in cut)
    is_whole = shape == source.shard_shape
    return Piece(number=number, source=holder, target=target, cut=None if is_whole else cut, shape=shape)


def _padding(shard: Shard, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Elements of the shard, along each dimension, that are no part of the logical array."""
    return tuple(
        part.stop - part.start - max(min(part.stop, size) - min(part.start, size), 0)
        for part, size in zip(shard.slices, shape, strict=True)
    )


def _starts(slices: Slices) -> tuple[int, ...]:
    return tuple(part.start for part in slices)
