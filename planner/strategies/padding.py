"""Splits over axes that do not divide a dimension: XLA pads the last shards, so that every device computes, keeps and
moves as much as the first one.

Rules say where that is right (`Factor.may_pad`); here is where it can pay. Few elements over many devices leave most of
a shard to padding, and each split that may be chosen makes the search slower.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

#: Whether a dimension of so many elements may be split over axes of these sizes.
MaySplit = Callable[[int, Sequence[int]], bool]

#: What is padding of all shards together may be this part of the elements: 12 over 8 devices are 16.
MAX_PADDING = 1 / 3

#: Dimensions of fewer elements are not padded: the three projections of a fused attention.
MIN_SIZE = 4


def divides(size: int, axes: Sequence[int]) -> bool:
    """Even shards only."""
    return size % prod(axes) == 0


def divides_or_pays(size: int, axes: Sequence[int]) -> bool:
    """Even shards, and padded ones of which most is elements."""
    padding = -size % prod(axes)
    return padding == 0 or (size >= MIN_SIZE and padding <= MAX_PADDING * size)


def divides_or_pays_along_one(size: int, axes: Sequence[int]) -> bool:
    """The same, padded over one axis only. Several axes are as good as one of another mesh that is searched, and
    problems with all of them take twice as long to solve."""
    return divides(size, axes) or (sum(axis > 1 for axis in axes) == 1 and divides_or_pays(size, axes))
