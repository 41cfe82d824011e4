"""Shard arithmetic against jax's own, and its refusals."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import PlanError
from shardwright.plans.layouts import Layout, distinct_shards, logical_part, pad_to_stored, shard_slices, slice_stored
from shardwright.plans.shardings import Mesh, TensorSharding
from shardwright.xla.jax_shardings import jax_mesh, to_named_sharding
from tests.plans.layout_strategies import MESHES, layouts_of, shapes


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    return draw(layouts_of(draw(shapes()), MESHES))


@settings(max_examples=150, deadline=None)
@given(layouts())
def test_shards_lie_where_jax_puts_them(layout: Layout) -> None:
    mesh = jax_mesh(layout.mesh)
    where = to_named_sharding(mesh, layout.sharding).devices_indices_map(layout.stored_shape)
    for position, device in enumerate(mesh.devices.flat):
        expected = tuple(
            slice(*part.indices(size)[:2]) for part, size in zip(where[device], layout.stored_shape, strict=True)
        )
        assert shard_slices(layout, position) == expected


@pytest.mark.dear
@settings(max_examples=100, deadline=None)
@given(layouts())
def test_distinct_shards_put_the_array_together(layout: Layout) -> None:
    array = np.arange(np.prod(layout.shape, dtype=int), dtype=np.int32).reshape(layout.shape)
    stored = pad_to_stored(array, layout)
    assert stored.shape == layout.stored_shape
    rebuilt = np.full(layout.stored_shape, -1, np.int32)
    shards = distinct_shards(layout, range(layout.mesh.device_count))
    for shard in shards:
        assert stored[shard.slices].shape == layout.shard_shape
        assert stored[shard.slices].nbytes == layout.shard_bytes
        rebuilt[shard.slices] = stored[shard.slices]
        np.testing.assert_array_equal(slice_stored(array, layout, shard.slices), stored[shard.slices])
    assert sorted(at for shard in shards for at in shard.holders) == list(range(layout.mesh.device_count))
    np.testing.assert_array_equal(logical_part(rebuilt, layout), array)


@pytest.mark.parametrize(
    ("shape", "stored", "dims", "message"),
    [
        ((4,), (4, 1), ((),), "layout of rank 1"),
        ((4,), (4,), (("nowhere",),), "which mesh"),
        ((5,), (5,), (("x",),), "not divided"),
        ((5,), (4,), (("x",),), "not divided"),
    ],
)
def test_impossible_layouts_are_refused(
    shape: tuple[int, ...], stored: tuple[int, ...], dims: tuple[tuple[str, ...], ...], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        Layout(
            element_type="f32", shape=shape, mesh=Mesh.of({"x": 2}), sharding=TensorSharding(dims), stored_shape=stored
        )


def test_a_device_outside_the_mesh_is_refused() -> None:
    layout = Layout.replicated("f32", (4,), Mesh.of({"x": 2}))
    with pytest.raises(PlanError, match="outside mesh"):
        shard_slices(layout, 2)


@settings(max_examples=50, deadline=None)
@given(layouts())
def test_a_mesh_that_begins_later_has_the_same_shards_on_later_devices(layout: Layout) -> None:
    moved = replace(layout, first_device=3)
    for position in layout.devices:
        assert shard_slices(moved, position + 3) == shard_slices(layout, position)
    with pytest.raises(PlanError, match="outside mesh"):
        shard_slices(moved, 2)
    assert distinct_shards(moved, range(3)) == ()
    assert [shard.slices for shard in distinct_shards(moved, range(100))] == [
        shard.slices for shard in distinct_shards(layout, layout.devices)
    ]


def test_the_suite_has_eight_devices() -> None:
    assert jax.device_count() == 8, "the comparison with jax above needs every mesh to fit"
