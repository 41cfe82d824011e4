"""Moves between layouts, carried out in numpy: every element arrives where the target wants it, and once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import PlanError
from shardwright.layouts import Layout, pad_to_stored, shard_slices
from shardwright.plans import Mesh
from shardwright.server.runtime.moves import Part, plan_move
from tests.layout_strategies import layouts_of, shapes


def carry_out(array: np.ndarray, source: Layout, target: Layout, part: Part) -> np.ndarray:
    """The shard that a part puts together, from the source's shards."""
    stored = pad_to_stored(array, source)
    grid = np.empty(part.grid, dtype=object)
    for at, piece in zip(np.ndindex(*part.grid), part.pieces, strict=True):
        box = stored[shard_slices(source, piece.source)]
        grid[at] = box if piece.cut is None else box[piece.cut]
        assert grid[at].shape == piece.shape
    if not part.pieces:
        return np.zeros(target.shard_shape, array.dtype)
    if not array.ndim:
        return grid[()]
    return np.pad(np.block(grid.tolist()), [(0, extra) for extra in part.padding])


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(1, 8))
def test_every_device_gets_its_shard_and_each_element_once_a_node(data: st.DataObject, node_size: int) -> None:
    shape = data.draw(shapes())
    source = replace(data.draw(layouts_of(shape)), first_device=data.draw(st.integers(0, 5)))
    target = replace(data.draw(layouts_of(shape)), first_device=data.draw(st.integers(0, 12)))
    array = np.arange(1, np.prod(shape, dtype=int) + 1, dtype=np.int32).reshape(shape)
    expected = pad_to_stored(array, target)
    parts = plan_move(source, target, lambda position: position // node_size)
    assert sorted(position for part in parts for position in part.positions) == list(target.devices)
    numbers = [piece.number for part in parts for piece in part.pieces]
    assert numbers == list(range(len(numbers)))
    for part in parts:
        assert len({position // node_size for position in part.positions}) == 1
        for position in part.positions:
            shard = shard_slices(target, position)
            np.testing.assert_array_equal(carry_out(array, source, target, part), expected[shard])
        clipped = expected[shard_slices(target, part.positions[0])]
        assert sum(int(np.prod(piece.shape)) for piece in part.pieces) == np.count_nonzero(clipped)


def test_a_copy_on_the_receiving_node_is_read_first() -> None:
    source = Layout.replicated("f32", (4,), Mesh.of({"x": 4}))
    target = Layout.replicated("f32", (4,), Mesh.of({"x": 2}), first_device=2)
    (part,) = plan_move(source, target, lambda position: position // 2)
    assert [piece.source for piece in part.pieces] == [2]


def test_receivers_share_the_work_of_reading_copies() -> None:
    mesh = Mesh.of({"x": 2})
    source = Layout.replicated("f32", (4,), mesh)
    target = replace(Layout.replicated("f32", (4,), mesh, first_device=2))
    parts = plan_move(source, target, lambda position: position)
    assert [piece.source for part in parts for piece in part.pieces] == [0, 1]


def test_arrays_of_different_shapes_cannot_be_moved() -> None:
    mesh = Mesh.of({"x": 2})
    with pytest.raises(PlanError, match=r"f32\[4\] cannot be moved to where f32\[2, 2\]"):
        plan_move(Layout.replicated("f32", (4,), mesh), Layout.replicated("f32", (2, 2), mesh), lambda position: 0)
