"""Splits over axes that do not divide a dimension.

XLA pads the last shards: every device computes, keeps and moves as much as the first one. Rules decide legality
(`Factor.may_pad`); this module decides profitability. With few elements over many devices most of a shard is padding,
and each additional split makes the search slower.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from shardwright.planner.tuning import MAX_PADDING, MIN_PADDED_SIZE

#: Whether a dimension of so many elements may be split over axes of these sizes.
MaySplit = Callable[[int, Sequence[int]], bool]


def divides(size: int, axes: Sequence[int]) -> bool:
    """Even shards only."""
    return size % prod(axes) == 0


def divides_or_pays(size: int, axes: Sequence[int]) -> bool:
    """Even shards, and padded ones with mostly real elements."""
    padding = -size % prod(axes)
    return padding == 0 or (size >= MIN_PADDED_SIZE and padding <= MAX_PADDING * size)


def divides_or_pays_along_one(size: int, axes: Sequence[int]) -> bool:
    """The same, padded over one axis only.

    Several axes are no better than one axis of another mesh in the search, and problems with all of them take twice the
    time to solve.
    """
    return divides(size, axes) or (sum(axis > 1 for axis in axes) == 1 and divides_or_pays(size, axes))
