"""Packing of buffers: against hand-made layouts and an exhaustive search for the least heap."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from shardwright.cost.peak.heap_simulator import Interval, heap_bytes, intervals_outside, live_bytes, peak_time


def test_buffers_that_do_not_meet_share_memory() -> None:
    assert heap_bytes([Interval(8, 0, 1), Interval(8, 2, 3)]) == 8
    assert heap_bytes([Interval(8, 0, 2), Interval(8, 2, 3)]) == 16
    assert heap_bytes([]) == 0


def test_the_peak_is_at_the_first_time_at_which_most_bytes_are_live() -> None:
    assert peak_time([Interval(8, 0, 2), Interval(4, 2, 5), Interval(9, 4, 5), Interval(13, 7, 7)]) == 4


def least_heap(intervals: list[Interval]) -> int:
    """First fit in every order: one of them is optimal."""
    best = sum(each.size_bytes for each in intervals)
    for order in permutations(intervals):
        placed: list[tuple[Interval, int]] = []
        for each in order:
            beside = sorted((o, o + p.size_bytes) for p, o in placed if p.start <= each.end and each.start <= p.end)
            offset = 0
            for bottom, top in beside:
                if offset + each.size_bytes <= bottom:
                    break
                offset = max(offset, top)
            placed.append((each, offset))
        best = min(best, max(o + p.size_bytes for p, o in placed))
    return best


@pytest.mark.parametrize("seed", range(20))
def test_the_heap_is_never_less_than_possible_and_seldom_much_more(seed: int) -> None:
    random = np.random.default_rng(seed)
    intervals = []
    for _ in range(6):
        start, length = random.integers(0, 8), random.integers(0, 4)
        intervals.append(Interval(int(random.integers(1, 9)), int(start), int(start + length)))
    least = least_heap(intervals)
    assert live_bytes(intervals) <= least <= heap_bytes(intervals) <= 1.5 * least


def test_equal_buffers_are_placed_by_what_is_allocated_and_freed_while_they_live() -> None:
    """The first and the last of a chain see most and share memory; then neither has room for both between."""
    chain = [Interval(1000, time, time + 1) for time in range(5, 9)]
    assert heap_bytes(chain) == 2000
    beside = [Interval(1, 3, 5), Interval(1, 4, 5), Interval(1, 3, 9), Interval(1, 9, 9)]
    assert 3000 <= heap_bytes([*chain, *beside]) < 3010


def test_free_memory_takes_the_largest_that_fits_while_it_is_there() -> None:
    free = [Interval(100, 2, 8)]
    inside, beside, early, large = Interval(90, 3, 5), Interval(80, 4, 8), Interval(90, 1, 3), Interval(110, 3, 4)
    after = Interval(70, 6, 8)
    assert intervals_outside([beside, inside, early, large, after], free) == [large, early, beside]


def test_the_smallest_piece_is_taken() -> None:
    free = [Interval(100, 0, 9), Interval(50, 0, 9)]
    assert intervals_outside([Interval(40, 0, 9), Interval(90, 0, 9)], free) == []
    assert intervals_outside([Interval(40, 0, 9), Interval(45, 0, 9), Interval(90, 0, 9)], free) == [Interval(40, 0, 9)]
