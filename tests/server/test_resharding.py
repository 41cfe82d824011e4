"""Moves between layouts, carried out in numpy: every element arrives where the target wants it, and once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import PlanError
from shardwright.plans.layouts import Layout, pad_to_stored, shard_slices
from shardwright.plans.shardings import Mesh
from shardwright.server.runtime.resharding import RowSection, TargetShard, plan_resharding
from tests.plans.layout_strategies import layouts_of, shapes


def carry_out(array: np.ndarray, sources: Sequence[RowSection], target: Layout, part: TargetShard) -> np.ndarray:
    """The shard that a part puts together, from the shards of the source's sections."""
    if not part.pieces:
        return np.zeros(target.shard_shape, array.dtype)
    pieces = iter(part.pieces)
    blocks = []
    for numbers in part.grids:
        grid = np.empty(numbers, dtype=object)
        for at in np.ndindex(*numbers):
            piece = next(pieces)
            box = stored_rows(array, sources[piece.section])[shard_slices(sources[piece.section].layout, piece.source)]
            grid[at] = box if piece.cut is None else box[piece.cut]
            assert grid[at].shape == piece.shape
        blocks.append(np.block(grid.tolist()) if array.ndim else grid[()])
    assert next(pieces, None) is None
    return np.pad(np.concatenate(blocks), [(0, extra) for extra in part.padding]) if array.ndim else blocks[0]


def stored_rows(array: np.ndarray, section: RowSection) -> np.ndarray:
    rows = array[section.first_row :][: section.row_count] if array.ndim else array
    return pad_to_stored(rows, section.layout)


@st.composite
def sections_of(draw: st.DrawFn, shape: tuple[int, ...]) -> list[RowSection]:
    """An array of a shape, cut into up to three sections of rows, each on a mesh of its own."""
    rows = shape[0] if shape else 1
    cuts = sorted(draw(st.sets(st.integers(1, rows - 1), max_size=2))) if rows > 1 else []
    results = []
    for first, last in pairwise([0, *cuts, rows]):
        layout = draw(layouts_of((last - first, *shape[1:]) if shape else shape))
        results.append(RowSection(replace(layout, first_device=draw(st.integers(0, 12))), first))
    return results


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(1, 8))
def test_every_device_gets_its_shard_and_each_element_once_a_node(data: st.DataObject, node_size: int) -> None:
    """Between sections of rows, whole arrays among them."""
    shape = data.draw(shapes())
    sources, targets = data.draw(sections_of(shape)), data.draw(sections_of(shape))
    array = np.arange(1, np.prod(shape, dtype=int) + 1, dtype=np.int32).reshape(shape)
    for target in targets:
        expected = stored_rows(array, target)
        parts = plan_resharding(sources, target, lambda position: position // node_size)
        assert sorted(position for part in parts for position in part.positions) == list(target.layout.devices)
        numbers = [piece.number for part in parts for piece in part.pieces]
        assert numbers == list(range(len(numbers)))
        for part in parts:
            assert len({position // node_size for position in part.positions}) == 1
            for position in part.positions:
                shard = shard_slices(target.layout, position)
                np.testing.assert_array_equal(carry_out(array, sources, target.layout, part), expected[shard])
            clipped = expected[shard_slices(target.layout, part.positions[0])]
            assert sum(int(np.prod(piece.shape)) for piece in part.pieces) == np.count_nonzero(clipped)


def plan_transfer(source: Layout, target: Layout, node_of: Callable[[int], int]) -> tuple[TargetShard, ...]:
    return plan_resharding([RowSection(source)], RowSection(target), node_of)


def test_a_copy_on_the_receiving_node_is_read_first() -> None:
    source = Layout.replicated("f32", (4,), Mesh.of({"x": 4}))
    target = Layout.replicated("f32", (4,), Mesh.of({"x": 2}), first_device=2)
    (part,) = plan_transfer(source, target, lambda position: position // 2)
    assert [piece.source for piece in part.pieces] == [2]


def test_receivers_share_the_work_of_reading_copies() -> None:
    mesh = Mesh.of({"x": 2})
    source = Layout.replicated("f32", (4,), mesh)
    target = replace(Layout.replicated("f32", (4,), mesh, first_device=2))
    parts = plan_transfer(source, target, lambda position: position)
    assert [piece.source for part in parts for piece in part.pieces] == [0, 1]


def test_arrays_of_different_shapes_cannot_be_moved() -> None:
    mesh = Mesh.of({"x": 2})
    with pytest.raises(PlanError, match=r"f32\[4\] cannot be moved to where f32\[2, 2\]"):
        plan_transfer(Layout.replicated("f32", (4,), mesh), Layout.replicated("f32", (2, 2), mesh), lambda position: 0)


def test_rows_that_no_section_has_are_missed() -> None:
    mesh = Mesh.of({"x": 2})
    row = Layout.replicated("f32", (1, 4), mesh)
    with pytest.raises(PlanError, match=r"f32\[1, 4\], f32\[1, 4\] from row 2 on cannot be moved to where f32\[3, 4\]"):
        plan_resharding(
            [RowSection(row), RowSection(row, 2)],
            RowSection(Layout.replicated("f32", (3, 4), mesh)),
            lambda position: 0,
        )
