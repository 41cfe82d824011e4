"""Heap size of a set of buffers: live bytes plus fragmentation.

XLA packs a program's temporaries into one allocation, largest first, each at the best-fitting offset beside buffers
live at the same time (GlobalDecreasingSizeBestFitHeap in xla/service/heap_simulator). It tries the orders by size and
by lifetime, and takes the better. Its clock ticks at every allocation and free. In a chain of equal buffers, each made
from the previous one, a later one may be placed before its neighbors: three of them side by side, with room enough in
two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.tuning import PACKED_SHARE

Ints = NDArray[np.int64]


class Interval(NamedTuple):
    """A buffer: its bytes, and its first and last live time."""

    size_bytes: int
    start: int
    end: int


def live_bytes(intervals: Sequence[Interval]) -> int:
    """Maximum of live bytes over time."""
    return int(_live(intervals).max(initial=0))


def peak_time(intervals: Sequence[Interval]) -> int:
    """The first time of maximum live bytes. Raises ValueError on no intervals."""
    return int(np.argmax(_live(intervals)))


def _live(intervals: Sequence[Interval]) -> Ints:
    """Live bytes at each time."""
    if not intervals:
        return np.zeros(0, dtype=np.int64)
    sizes, starts, ends = (np.array(column, dtype=np.int64) for column in zip(*intervals, strict=True))
    change = np.zeros(int(ends.max()) + 2, dtype=np.int64)
    np.add.at(change, starts, sizes)
    np.subtract.at(change, ends + 1, sizes)
    return np.cumsum(change)[:-1]


def intervals_outside(intervals: Sequence[Interval], free: Sequence[Interval]) -> list[Interval]:
    """The buffers left to the heap after placing buffers in `free` memory, each piece during its interval.

    XLA's buffer assignment tries arguments and results first: largest buffers first, each in the smallest piece that
    holds it (BufferAssigner::AssignSingleHloBuffer in xla/service/buffer_assignment.cc).
    """
    tenants: dict[int, list[Interval]] = {number: [] for number in range(len(free))}
    pieces = sorted(tenants, key=lambda number: free[number].size_bytes)
    least = (1 - PACKED_SHARE) * max((piece.size_bytes for piece in free), default=0)
    sizes, starts, ends = (np.array([free[number][part] for number in pieces], np.int64) for part in range(3))

    def has_room(number: int, buffer: Interval) -> bool:
        return all(other.end < buffer.start or buffer.end < other.start for other in tenants[number])

    remaining = []
    for buffer in sorted(intervals, reverse=True):
        first = int(np.searchsorted(sizes, buffer.size_bytes)) if buffer.size_bytes >= least else len(pieces)
        fitting = np.flatnonzero((starts[first:] <= buffer.start) & (ends[first:] >= buffer.end))
        number = next((pieces[first + index] for index in fitting if has_room(pieces[first + index], buffer)), None)
        if number is None:
            remaining.append(buffer)
        else:
            tenants[number].append(buffer)
    return remaining


def heap_bytes(intervals: Sequence[Interval]) -> int:
    """Bytes of XLA's heap with these buffers packed."""
    if not intervals:
        return 0
    sizes, starts, ends = (np.array(column, dtype=np.int64) for column in zip(*intervals, strict=True))
    ticks = _ticks(starts, ends)
    by_size = np.lexsort((starts, -ticks, -sizes))
    count = int(np.searchsorted(np.cumsum(sizes[by_size]), PACKED_SHARE * sizes.sum())) + 1
    large, least = by_size[:count], live_bytes(intervals)
    packed = _pack([intervals[index] for index in large])
    if packed > least:
        by_lifetime = large[np.lexsort((starts[large], -sizes[large], -ticks[large]))]
        packed = min(packed, _pack([intervals[index] for index in by_lifetime]))
    return max(packed, least)


def _ticks(starts: Ints, ends: Ints) -> Ints:
    """Clock ticks of each buffer's allocation and free: at equal times, allocations precede frees."""
    count = len(starts)
    is_free = np.repeat((False, True), count)
    others = np.concatenate((ends, starts))
    order = np.lexsort((others, is_free, np.concatenate((starts, ends))))
    tick = np.empty(2 * count, dtype=np.int64)
    tick[order] = np.arange(2 * count)
    return tick[count:] - tick[:count]


def _pack(intervals: Sequence[Interval]) -> int:
    """The highest byte used after placing each interval in turn in the smallest gap that fits."""
    starts, ends, bottoms, tops = (np.zeros(len(intervals), dtype=np.int64) for _ in range(4))
    for count, (size, start, end) in enumerate(intervals):
        beside = np.flatnonzero((starts[:count] <= end) & (ends[:count] >= start))
        beside = beside[np.argsort(bottoms[beside], kind="stable")]
        offset = _best_gap(size, bottoms[beside], tops[beside])
        starts[count], ends[count], bottoms[count], tops[count] = start, end, offset, offset + size
    return int(tops.max(initial=0))


def _best_gap(size: int, bottoms: Ints, tops: Ints) -> int:
    """Offset of the smallest gap of at least `size` between chunks in order of their bottoms; else above them all."""
    if not len(bottoms):
        return 0
    reached = np.maximum.accumulate(tops)
    gaps = bottoms - np.concatenate(([0], reached[:-1]))
    fitting = np.flatnonzero(gaps >= size)
    if not len(fitting):
        return int(reached[-1])
    best = fitting[np.argmin(gaps[fitting])]
    return int(bottoms[best] - gaps[best])
