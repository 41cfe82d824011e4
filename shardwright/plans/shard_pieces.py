"""Which boxes of the user's array one device's shard holds: views and padding undone, by index arithmetic.

A shard is a box of the *stored* array. A view splits or joins dimensions of the user's
array without moving elements, so both are cut into groups of dimensions that hold the
same elements (`[d | 3·d]` and `[d | 3, d]`). Within a group the shard holds a few runs of
consecutive elements, and a run is a few boxes of the user's dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import gcd, prod

from shardwright.plans.layouts import Layout, Slices, distinct_shards, shard_slices


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPiece:
    """A box of the user's array, and the place of its elements in a shard, in the same order.

    box: one slice a dimension of `layout.user_shape`. within: one slice a dimension of the shard; it has as many
    elements as `box`.
    """

    box: Slices
    within: Slices

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(part.stop - part.start for part in self.box)


@lru_cache(maxsize=4096)
def shard_pieces(layout: Layout, position: int) -> tuple[ShardPiece, ...]:
    """All elements of the user's array that the device at `position` holds, each once; padding is in none."""
    if not prod(layout.shape):
        return ()
    shard = shard_slices(layout, position)
    held = [range(part.start, min(part.stop, size)) for part, size in zip(shard, layout.shape, strict=True)]
    if not all(held):
        return ()
    by_group = [
        list(_common_boxes(held[view.start : view.stop], layout.shape[view], layout.user_shape[user]))
        for view, user in _groups(layout.shape, layout.user_shape)
    ]
    return tuple(
        ShardPiece(
            box=tuple(part for box, _ in choice for part in box),
            within=tuple(
                slice(part.start - whole.start, part.stop - whole.start)
                for part, whole in zip((part for _, within in choice for part in within), shard, strict=True)
            ),
        )
        for choice in product(*by_group)
    )


@lru_cache(maxsize=4096)
def chunk_shape(shape: tuple[int, ...], parts: tuple[tuple[Layout, int], ...]) -> tuple[int, ...]:
    """The largest chunk of an array such that every piece of every shard of its parts is made of whole chunks.

    Then no two writers share a chunk, and none has to read another's data. parts: layouts of the separately kept rows,
    and their first rows in the first dimension of `shape`.
    """
    borders = [0] * len(
        shape
    )  # the greatest common divisor of where pieces begin and end; the last chunk may be smaller
    for layout, first_row in parts:
        for shard in distinct_shards(layout, layout.devices):
            for piece in shard_pieces(layout, shard.holders[0]):
                for dim, (part, size) in enumerate(zip(shift_rows(piece.box, first_row), shape, strict=True)):
                    borders[dim] = gcd(borders[dim], part.start, part.stop if part.stop != size else 0)
    return tuple(border or size for border, size in zip(borders, shape, strict=True))


def shift_rows(box: Slices, rows: int) -> Slices:
    """The box, so many rows further along the first dimension."""
    return (slice(box[0].start + rows, box[0].stop + rows), *box[1:]) if rows else box


def _groups(view: Sequence[int], user: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """The smallest runs of dimensions of both that have equal products, in order."""
    at, user_at = 0, 0
    while at < len(view) or user_at < len(user):
        end, user_end = min(at + 1, len(view)), min(user_at + 1, len(user))
        while (size := prod(view[at:end])) != (user_size := prod(user[user_at:user_end])):
            if size < user_size:
                end += 1
            else:
                user_end += 1
        yield slice(at, end), slice(user_at, user_end)
        at, user_at = end, user_end


def _common_boxes(
    box: Sequence[range], extents: Sequence[int], user_extents: Sequence[int]
) -> Iterator[tuple[Slices, Slices]]:
    """(box of the user's dimensions, box of the view's) of one group, in pairs of the same elements."""
    for first, count in _runs(box, extents):
        for start, size in _cut(first, count, user_extents, extents):
            yield _box(start, size, user_extents), _box(start, size, extents)


def _runs(box: Sequence[range], extents: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first, count) of the longest runs of consecutive elements in a box of the group."""
    split = len(box) - 1  # the last dimension that is not held whole; those behind it belong to the runs
    while split > 0 and len(box[split]) == extents[split]:
        split -= 1
    inner = prod(extents[split + 1 :])
    for leading in product(*box[: max(split, 0)]):
        first, count = 0, 1
        for index, extent in zip(leading, extents, strict=False):
            first = first * extent + index
        if box:
            first, count = first * extents[split] + box[split].start, len(box[split])
        yield first * inner, count * inner


def _cut(first: int, count: int, *shapes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The run, cut until each part is a box of every shape."""
    for shape in shapes:
        parts = list(_box_runs(first, count, shape))
        if len(parts) > 1:
            for part in parts:
                yield from _cut(*part, *shapes)
            return
    yield first, count


def _box_runs(first: int, count: int, extents: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The run in boxes of `extents`: the rest of the first row, whole rows, the beginning of the last."""
    if len(extents) <= 1 or not count:
        yield first, count
        return
    row = prod(extents[1:])
    before = min(count, -first % row)
    whole = (count - before) // row * row
    after = count - before - whole
    for start, size in ((first, before), (first + before + whole, after)):
        if size:
            base = start - start % row
            yield from ((base + at, length) for at, length in _box_runs(start % row, size, extents[1:]))
    if whole:
        yield first + before, whole


def _box(first: int, count: int, extents: Sequence[int]) -> Slices:
    """The box that a run of `count` elements is."""
    low, high = _coordinates(first, extents), _coordinates(first + count - 1, extents)
    return tuple(slice(start, stop + 1) for start, stop in zip(low, high, strict=True))


def _coordinates(position: int, extents: Sequence[int]) -> list[int]:
    coordinates = []
    for extent in reversed(extents):
        position, at = divmod(position, extent)
        coordinates.append(at)
    return coordinates[::-1]
