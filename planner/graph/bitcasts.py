"""A `bitcast` as equivalent reshapes and transpositions.

A bitcast reads the memory of one array as another; elements stay in place. Between the dimensions of both in memory
order, major to minor, it is a reshape; a layout different from the shape's order adds a transposition on its side.
`f32[2,3]{1,0}` → `f32[3,2]{0,1}` is a transposition, `f32[2,3]{1,0}` → `f32[3,2]{1,0}` a reshape.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from shardwright.hlo import ArrayShape
from shardwright.hlo.shapes import ELEMENT_BITS

_TILES = re.compile(r"T(\([^()]*\)\s*)+", re.ASCII)


class BitcastStep(NamedTuple):
    """`reshape`, `transpose` (by `dimensions`) or `bitcast-convert` to a shape."""

    opcode: str
    shape: ArrayShape
    dimensions: tuple[int, ...] = ()


def bitcast_steps(before: ArrayShape, after: ArrayShape) -> list[BitcastStep] | None:
    """Steps from `before` to `after`, at least one; None when not known exactly."""
    if before.dynamic or after.dynamic or prod(before.dimensions) != prod(after.dimensions):
        return None
    if ELEMENT_BITS[before.element_type] != ELEMENT_BITS[after.element_type] or not _has_same_memory_order(
        before, after
    ):
        return None
    return list(_steps(before, after)) or [BitcastStep("reshape", after)]


def _steps(before: ArrayShape, after: ArrayShape) -> Iterator[BitcastStep]:
    kind, dims = after.element_type, before.dimensions
    if before.element_type != kind:
        yield BitcastStep("bitcast-convert", ArrayShape(kind, dims))
    order = _order(before)
    if not _is_identity(order, dims):
        dims = tuple(dims[dim] for dim in order)
        yield BitcastStep("transpose", ArrayShape(kind, dims), order)
    order = _order(after)
    is_turned = not _is_identity(order, after.dimensions)
    lying = tuple(after.dimensions[dim] for dim in order) if is_turned else after.dimensions
    if lying != dims:
        yield BitcastStep("reshape", ArrayShape(kind, lying))
    if is_turned:
        yield BitcastStep("transpose", after, tuple(order.index(dim) for dim in range(after.rank)))


def _order(shape: ArrayShape) -> tuple[int, ...]:
    """Its dimensions in memory order, major to minor."""
    minor_to_major = (shape.layout or "").split(":")[0].strip()
    if not minor_to_major:
        return tuple(range(shape.rank))
    return tuple(int(number) for number in reversed(minor_to_major.split(",")))


def _is_identity(order: Sequence[int], dims: Sequence[int]) -> bool:
    """Whether this memory order equals the shape's order; dimensions of one element may stand anywhere."""
    moving = [dim for dim in order if dims[dim] != 1]
    return moving == sorted(moving)


def _has_same_memory_order(before: ArrayShape, after: ArrayShape) -> bool:
    """Whether both arrays are linear, or both have the same tiles over the same dimensions.

    Otherwise memory is blocked: other dimensions are no reshape.
    """
    if _is_linear(before) and _is_linear(after):
        return True
    lying = [[shape.dimensions[dim] for dim in _order(shape)] for shape in (before, after)]
    return _tiles(before) == _tiles(after) and min(map(len, lying)) >= 2 and lying[0][-2:] == lying[1][-2:]


def _is_linear(shape: ArrayShape) -> bool:
    """Whether elements are contiguous in memory, padding aside: no tile spans a second of several rows."""
    tiles = _tiles(shape)
    if not tiles:
        return True
    sizes = tiles[0].split(",")
    if len(tiles) > 1 or len(sizes) > 2 or "*" in sizes:
        return False
    rows = [shape.dimensions[dim] for dim in _order(shape)][-2:-1]
    return len(sizes) == 1 or sizes[0] == "1" or rows in ([], [1])


def _tiles(shape: ArrayShape) -> list[str]:
    """Its tiles, each within the previous one: `T(8,128)(2,1)` has `8,128` and `2,1`."""
    match = _TILES.search(shape.layout or "")
    return [] if match is None else [tile.replace(" ", "") for tile in re.findall(r"\(([^()]*)\)", match[0])]
