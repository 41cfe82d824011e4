"""Which borders a shard lacks, against NumPy: the rows that its results read and its neighbours hold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.planner.rules import Halo, exchange_bytes


@st.composite
def _windows(draw: st.DrawFn) -> tuple[Halo, int]:
    """A halo of windows over an evenly split dimension, and the number of devices."""
    parts = draw(st.sampled_from([2, 3, 4]))
    halo = Halo(
        operand=0,
        size=parts * draw(st.integers(1, 6)),
        result_size=parts * draw(st.integers(1, 6)),
        stride=draw(st.integers(1, 3)),
        low=draw(st.integers(-6, 6)),
        extent=draw(st.integers(1, 5)),
        dilation=draw(st.integers(1, 2)),
    )
    return halo, parts


@given(_windows())
def test_borders_reach_all_that_is_read(drawn: tuple[Halo, int]) -> None:
    """With as many rows of each neighbour as the permutes carry, a device has every row that its results read."""
    halo, parts = drawn
    rows = halo.permutes(parts)
    if rows is None:
        return
    shard, count = halo.size // parts, halo.result_size // parts
    lacking = []
    for part in range(parts):
        results = np.arange(part * count, (part + 1) * count)
        positions = halo.stride * results[:, None] - halo.low + np.arange(halo.extent)
        read = np.unique(positions[positions % halo.dilation == 0] // halo.dilation)
        read = read[(read >= 0) & (read < halo.size)]
        assert ((read >= (part - 1) * shard) & (read < (part + 2) * shard)).all()
        lacking += [(read < part * shard).sum(), (read >= (part + 1) * shard).sum()]
    assert max(lacking) <= max(rows, default=0)


@pytest.mark.parametrize(
    ("halo", "parts", "rows"),
    [
        (
            Halo(operand=0, size=8, result_size=8, low=1, extent=3),
            4,
            (1, 1),
        ),  # a 3-wide window, padded to keep the size
        (Halo(operand=0, size=8, result_size=4, stride=2, extent=3), 2, (1,)),
        (Halo(operand=0, size=16, result_size=16, stride=2, extent=2, dilation=2), 4, ()),
        (Halo(operand=0, size=16, result_size=24, low=4), 2, ()),  # padded on both sides alike: nothing crosses
        (Halo(operand=0, size=16, result_size=24, low=8), 2, (4,)),
        (Halo(operand=0, size=8, result_size=8, mirrored=True), 4, (2,)),
    ],
)
def test_rows(halo: Halo, parts: int, rows: tuple[int, ...]) -> None:
    assert halo.permutes(parts) == rows


def test_none_where_more_than_the_neighbours_is_needed_or_parts_are_uneven() -> None:
    assert Halo(operand=0, size=24, result_size=8).permutes(8) is None
    assert Halo(operand=0, size=8, result_size=6, extent=3).permutes(4) is None


def test_borders_of_a_second_dimension_are_wider() -> None:
    halo = Halo(operand=0, size=8, result_size=8, low=1, extent=3)
    assert exchange_bytes([(halo, 2)], 256) == [64, 64]
    assert exchange_bytes([(halo, 2), (halo, 2)], 256) == [64, 64, 96, 96]
