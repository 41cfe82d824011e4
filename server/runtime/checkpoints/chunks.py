"""Chunks of an array as it is stored: which of them a box touches, and their checksums.

A box is a slice a dimension; a chunk has its place in the grid as its key, as zarr names it ("1.0"; "0" without
dimensions). A checksum is the CRC-32 of the elements in C order, of those within the array.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import prod

import numpy as np
from zlib_ng.zlib_ng import crc32

from shardwright.plans.layouts import Slices


def align(box: Slices, chunk: Sequence[int], shape: Sequence[int]) -> Slices:
    """The smallest box of whole chunks around it."""
    return tuple(
        slice(part.start // step * step, min(-(-part.stop // step) * step, size))
        for part, step, size in zip(box, chunk, shape, strict=True)
    )


def tiles(region: Slices, chunk: Sequence[int], most: int) -> Iterator[Slices]:
    """A box of whole chunks, cut into such boxes of at most so many elements each, or of one chunk."""
    budget = max(1, most // max(1, prod(chunk)))
    steps = []
    for part, size in zip(reversed(region), reversed(chunk), strict=True):
        count = min(budget, max(1, -(-(part.stop - part.start) // size)))
        budget //= count
        steps.append(count * size)
    yield from _cut(region, steps[::-1])


def chunks_in(region: Slices, chunk: Sequence[int]) -> Iterator[tuple[str, Slices]]:
    """Keys and boxes of the chunks of a box of whole ones."""
    for box in _cut(region, chunk):
        yield ".".join(str(part.start // size) for part, size in zip(box, chunk, strict=True)) or "0", box


def checksums_of(values: np.ndarray, region: Slices, chunk: Sequence[int]) -> dict[str, int]:
    """By key, of the chunks of a box of whole ones, with those values."""
    return {key: checksum(values[within(box, region)]) for key, box in chunks_in(region, chunk)}


def checksum(values: np.ndarray) -> int:
    """Of elements in C order."""
    return crc32(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)


def within(box: Slices, region: Slices) -> Slices:
    """The same elements, counted from the beginning of a box around them."""
    return tuple(
        slice(part.start - whole.start, part.stop - whole.start) for part, whole in zip(box, region, strict=True)
    )


def common(boxes: Iterable[Slices]) -> Slices:
    """What boxes that overlap have in common."""
    return tuple(
        slice(max(part.start for part in parts), min(part.stop for part in parts)) for parts in zip(*boxes, strict=True)
    )


def size_of(box: Slices) -> int:
    """Its elements."""
    return prod(part.stop - part.start for part in box)


def _cut(region: Slices, steps: Sequence[int]) -> Iterator[Slices]:
    starts = [range(part.start, part.stop, step) for part, step in zip(region, steps, strict=True)]
    for corner in product(*starts):
        yield tuple(slice(at, min(at + step, part.stop)) for at, step, part in zip(corner, steps, region, strict=True))
