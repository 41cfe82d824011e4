"""Boxes of an array sent between devices to change its layout: pure arithmetic.

Both layouts cut the array, or sections of its rows, into a grid of equal blocks. The holder of a target block receives
its overlap with each source block and nothing else; devices of one node that hold the same block get it once. Padding
does not travel: it is zeros on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

from shardwright.errors import PlanError
from shardwright.plans.layouts import Layout, Shard, Slices, distinct_shards


@dataclass(frozen=True, slots=True)
class RowSection:
    """Rows of an array from `first_row` on, along its first dimension, and their layout, which gives their number."""

    layout: Layout
    first_row: int = 0

    @property
    def row_count(self) -> int:
        """1 of a scalar."""
        return self.layout.shape[0] if self.layout.shape else 1

    @property
    def type_of_row(self) -> tuple[str, int, tuple[int, ...]]:
        return self.layout.element_type, len(self.layout.shape), self.layout.shape[1:]

    def __str__(self) -> str:
        type_text = f"{self.layout.element_type}{list(self.layout.shape)}"
        return f"{type_text} from row {self.first_row} on" if self.first_row else type_text


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPiece:
    """A box on its way from the device `source` to the device `target`.

    number: in the move. section: of the source, by number. cut: its bounds within the source's shard, None for all
    of it.
    """

    number: int
    section: int
    source: int
    target: int
    cut: Slices | None
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetShard:
    """A shard of the target that devices of one node hold: made on the first of them, then copied to the others.

    pieces: row-major over each of `grids`, the numbers of pieces along each dimension, one grid for each section of
    the source that it has rows of; none where it is only padding.
    padding: zeros to add to the pieces at the end of each dimension.
    """

    positions: tuple[int, ...]
    pieces: tuple[TransferPiece, ...]
    grids: tuple[tuple[int, ...], ...]
    padding: tuple[int, ...]


def plan_resharding(
    sources: Sequence[RowSection], target: RowSection, node_of: Callable[[int], int]
) -> tuple[TargetShard, ...]:
    """The parts of the target, each with the pieces it is made of.

    sources: in the order of their rows. node_of: the node that owns a device. A block with several holders is read
    from one on the receiving node where there is one; else the receivers take turns. Raises PlanError where the sources
    are of another array, or lack some of the target's rows.
    """
    _require_rows(sources, target)
    blocks = [
        {_starts(shard.slices): shard.holders for shard in distinct_shards(source.layout, source.layout.devices)}
        for source in sources
    ]
    by_node: dict[int, list[int]] = {}
    for position in target.layout.devices:
        by_node.setdefault(node_of(position), []).append(position)
    parts: list[TargetShard] = []
    number = 0
    for node, positions in by_node.items():
        for shard in distinct_shards(target.layout, positions):
            pieces: list[TransferPiece] = []
            grids = []
            for section, source in enumerate(sources):
                overlaps = _overlaps(shard, target, source)
                if not all(overlaps):
                    continue
                for box in product(*overlaps):
                    holders = blocks[section][tuple(start for start, _ in box)]
                    near = [holder for holder in holders if node_of(holder) == node] or holders
                    holder = near[len(parts) % len(near)]
                    pieces.append(_piece(number, section, holder, shard.holders[0], box, source.layout))
                    number += 1
                grids.append(tuple(len(along) for along in overlaps))
            padding = _padding(shard, target.layout.shape)
            parts.append(
                TargetShard(positions=shard.holders, pieces=tuple(pieces), grids=tuple(grids), padding=padding)
            )
    return tuple(parts)


def _require_rows(sources: Sequence[RowSection], target: RowSection) -> None:
    at = target.first_row
    for source in sources:
        if source.type_of_row == target.type_of_row and source.first_row <= at:
            at = max(at, source.first_row + source.row_count)
    if at < target.first_row + target.row_count:
        raise PlanError(f"{', '.join(map(str, sources))} cannot be moved to where {target} is expected")


#: Along one dimension: where a block of the source starts, and the bounds of the overlap within it.
_Overlap = tuple[int, slice]


def _overlaps(shard: Shard, target: RowSection, source: RowSection) -> list[list[_Overlap]]:
    """Along each dimension, the blocks of the source that the shard has something of."""
    overlaps = []
    sizes = zip(shard.slices, target.layout.shape, source.layout.shape, source.layout.shard_shape, strict=True)
    for dimension, (part, size, source_size, extent) in enumerate(sizes):
        shift = 0 if dimension else target.first_row - source.first_row
        first = max(min(part.start, size) + shift, 0)
        last = min(min(part.stop, size) + shift, source_size)
        starts = range(first // extent * extent, last, extent) if first < last else ()
        overlaps.append([(at, slice(max(first - at, 0), min(last - at, extent))) for at in starts])
    return overlaps


def _piece(
    number: int, section: int, holder: int, target: int, box: tuple[_Overlap, ...], source: Layout
) -> TransferPiece:
    cut = tuple(bounds for _, bounds in box)
    shape = tuple(bounds.stop - bounds.start for bounds in cut)
    is_whole = shape == source.shard_shape
    return TransferPiece(
        number=number, section=section, source=holder, target=target, cut=None if is_whole else cut, shape=shape
    )


def _padding(shard: Shard, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Elements of the shard, along each dimension, that are no part of the logical array."""
    return tuple(
        part.stop - part.start - max(min(part.stop, size) - min(part.start, size), 0)
        for part, size in zip(shard.slices, shape, strict=True)
    )


def _starts(slices: Slices) -> tuple[int, ...]:
    return tuple(part.start for part in slices)
