"""Bytes that buffers take in one heap: what is live at once, and the gaps between.

XLA packs the temporary buffers of a program into one allocation, the largest first, each at the offset where it
fits best beside those that are live at the same time (GlobalDecreasingSizeBestFitHeap in
xla/service/heap_simulator). It tries that in order of size and in order of lifetime, and takes the better.
Its clock ticks whenever a buffer is allocated or freed. So of equal buffers in a chain, each made from the one before,
a later one may be placed before its neighbours, and three of them lie side by side where two would do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

#: Part of all bytes that is packed; the many small buffers fill gaps.
_PACKING_CACHE = 0.995

Ints = NDArray[np.int64]


class Interval(NamedTuple):
    """A buffer: its bytes, and the first and last time at which it is live."""

    size_bytes: int
    start: int
    end: int


def live_bytes(intervals: Sequence[Interval]) -> int:
    """The most bytes that are live at one time."""
    return int(_live(intervals).max(initial=0))


def peak_time(intervals: Sequence[Interval]) -> int:
    """The first time at which most bytes are live. Raises ValueError where there are no intervals."""
    return int(np.argmax(_live(intervals)))


def _live(intervals: Sequence[Interval]) -> Ints:
    """Bytes that are live at each time."""
    if not intervals:
        return np.zeros(0, dtype=np.int64)
    sizes, starts, ends = (np.array(column, dtype=np.int64) for column in zip(*intervals, strict=True))
    change = np.zeros(int(ends.max()) + 2, dtype=np.int64)
    np.add.at(change, starts, sizes)
    np.subtract.at(change, ends + 1, sizes)
    return np.cumsum(change)[:-1]


def intervals_outside(intervals: Sequence[Interval], free: Sequence[Interval]) -> list[Interval]:
    """The buffers that remain for the heap once `free` memory, each piece while it is there, took what fits.

    XLA's buffer assignment looks for room in arguments and results first: the largest buffers first, each in the
    smallest piece that holds it (BufferAssigner::AssignSingleHloBuffer in xla/service/buffer_assignment.cc).
    """
    taken: dict[int, list[Interval]] = {number: [] for number in range(len(free))}
    pieces = sorted(taken, key=lambda number: free[number].size_bytes)
    least = (1 - _PACKING_CACHE) * max((piece.size_bytes for piece in free), default=0)
    sizes, starts, ends = (np.array([free[number][part] for number in pieces], np.int64) for part in range(3))

    def has_room(number: int, buffer: Interval) -> bool:
        return all(other.end < buffer.start or buffer.end < other.start for other in taken[number])

    remaining = []
    for buffer in sorted(intervals, reverse=True):
        first = int(np.searchsorted(sizes, buffer.size_bytes)) if buffer.size_bytes >= least else len(pieces)
        fitting = np.flatnonzero((starts[first:] <= buffer.start) & (ends[first:] >= buffer.end))
        number = next((pieces[first + each] for each in fitting if has_room(pieces[first + each], buffer)), None)
        if number is None:
            remaining.append(buffer)
        else:
            taken[number].append(buffer)
    return remaining


def heap_bytes(intervals: Sequence[Interval]) -> int:
    """Bytes of the heap that XLA packs the buffers into."""
    if not intervals:
        return 0
    sizes, starts, ends = (np.array(column, dtype=np.int64) for column in zip(*intervals, strict=True))
    ticks = _ticks(starts, ends)
    by_size = np.lexsort((starts, -ticks, -sizes))
    count = int(np.searchsorted(np.cumsum(sizes[by_size]), _PACKING_CACHE * sizes.sum())) + 1
    large, least = by_size[:count], live_bytes(intervals)
    packed = _pack([intervals[each] for each in large])
    if packed > least:
        by_lifetime = large[np.lexsort((starts[large], -sizes[large], -ticks[large]))]
        packed = min(packed, _pack([intervals[each] for each in by_lifetime]))
    return max(packed, least)


def _ticks(starts: Ints, ends: Ints) -> Ints:
    """Allocations and frees between each buffer's own: at one time all that begin are allocated before any is freed."""
    count = len(starts)
    is_free = np.repeat((False, True), count)
    others = np.concatenate((ends, starts))
    order = np.lexsort((others, is_free, np.concatenate((starts, ends))))
    tick = np.empty(2 * count, dtype=np.int64)
    tick[order] = np.arange(2 * count)
    return tick[count:] - tick[:count]


def _pack(intervals: Sequence[Interval]) -> int:
    """The highest byte used when each interval in turn takes the smallest gap it fits into."""
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
