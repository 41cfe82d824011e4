"""Which values lie on the chip, and take no main memory."""

from __future__ import annotations

import pytest

from shardwright.cost.peak.memory_space_assignment import select_off_chip


@pytest.mark.parametrize(
    ("lifetimes", "chip_bytes", "expected"),
    [
        ([(60, 0, 1), (40, 1, 2)], 100, []),
        ([(60, 0, 1), (50, 1, 2)], 100, [(60, 0, 1)]),  # both are there at 1
        ([(60, 0, 1), (50, 2, 3)], 100, []),
        ([(60, 0, 4), (60, 3, 4)], 100, [(60, 0, 4)]),  # the shorter life first
        ([(60, 0, 8), (30, 0, 9)], 100, [(30, 0, 9)]),  # lives for too long
        ([(1, 0, 1)], 0, [(1, 0, 1)]),
    ],
)
def test_what_is_left(
    lifetimes: list[tuple[int, int, int]], chip_bytes: int, expected: list[tuple[int, int, int]]
) -> None:
    assert list(select_off_chip(lifetimes, chip_bytes)) == expected
