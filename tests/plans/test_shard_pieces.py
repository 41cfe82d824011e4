"""The boxes of shards against numpy: whatever the view, padding and sharding, they tile the user's array."""

from __future__ import annotations

from math import prod

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.plans.layouts import Layout, distinct_shards, pad_to_stored, shard_slices
from shardwright.plans.shard_pieces import ShardPiece, chunk_shape, shard_pieces
from shardwright.plans.shardings import Mesh, TensorSharding

MESHES = [Mesh.of({"x": 4}), Mesh.of({"x": 2, "y": 4}), Mesh.of({"x": 3, "y": 2})]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any sharding of any view of any array; dimensions that their axes do not divide are padded."""
    mesh = draw(st.sampled_from(MESHES))
    factors = draw(st.lists(st.integers(1, 5), max_size=4))
    view = _joined(draw, factors)
    dims: list[tuple[str, ...]] = [() for _ in view]
    for axis in draw(st.permutations([axis.name for axis in mesh.axes])):
        at = draw(st.integers(-1, len(view) - 1)) if view else -1
        if at >= 0:
            dims[at] = (*dims[at], axis)
    stored = tuple(-(-size // mesh.size(dim)) * mesh.size(dim) for size, dim in zip(view, dims, strict=True))
    return Layout(
        element_type="s32",
        shape=view,
        mesh=mesh,
        sharding=TensorSharding(tuple(dims)),
        stored_shape=stored,
        view_of=_joined(draw, factors),
    )


def _joined(draw: st.DrawFn, factors: list[int]) -> tuple[int, ...]:
    """Dimensions made of neighbouring factors."""
    dims: list[int] = []
    for factor in factors:
        if dims and draw(st.booleans()):
            dims[-1] *= factor
        else:
            dims.append(factor)
    return tuple(dims)


@settings(max_examples=300, deadline=None)
@given(layouts())
def test_pieces_hold_each_element_of_a_shard_once(layout: Layout) -> None:
    user = np.arange(1, prod(layout.user_shape) + 1, dtype=np.int32).reshape(layout.user_shape)
    stored = pad_to_stored(user, layout)
    written = np.zeros(user.shape, np.int32)
    for shard in distinct_shards(layout, layout.devices):
        data = stored[shard_slices(layout, shard.holders[0])]
        for piece in shard_pieces(layout, shard.holders[0]):
            np.testing.assert_array_equal(data[piece.within].reshape(piece.shape), user[piece.box])
            written[piece.box] += 1
    np.testing.assert_array_equal(written, 1)


@settings(max_examples=150, deadline=None)
@given(layouts())
def test_no_two_pieces_share_a_chunk(layout: Layout) -> None:
    chunk_of = np.zeros(layout.user_shape, np.int64)
    for dim, size in enumerate(chunk_shape(layout.user_shape, ((layout, 0),))):
        along = np.arange(layout.user_shape[dim]) // size
        chunk_of = chunk_of * layout.user_shape[dim] + np.expand_dims(along, tuple(range(1, chunk_of.ndim - dim)))
    owner: dict[int, ShardPiece] = {}
    for shard in distinct_shards(layout, layout.devices):
        for piece in shard_pieces(layout, shard.holders[0]):
            for chunk in np.unique(chunk_of[piece.box]):
                assert owner.setdefault(chunk, piece) is piece


def test_a_third_of_every_projection_is_three_boxes_of_the_fused_weight() -> None:
    mesh = Mesh.of({"model": 4})
    layout = Layout(
        element_type="f32",
        shape=(8, 3, 8),
        mesh=mesh,
        sharding=TensorSharding(((), (), ("model",))),
        stored_shape=(8, 3, 8),
        view_of=(8, 24),
    )
    boxes = [piece.box for piece in shard_pieces(layout, 1)]
    assert boxes == [(slice(0, 8), slice(start, start + 2)) for start in (2, 10, 18)]
    assert chunk_shape((8, 24), ((layout, 0),)) == (8, 2)


def test_padding_does_not_make_chunks_small() -> None:
    layout = Layout(
        element_type="f32",
        shape=(29, 6),
        mesh=Mesh.of({"x": 4}),
        sharding=TensorSharding((("x",), ())),
        stored_shape=(32, 6),
    )
    assert chunk_shape((29, 6), ((layout, 0),)) == (8, 6)


def test_rows_that_are_kept_apart_do_not_share_a_chunk() -> None:
    def rows(count: int, first_device: int) -> Layout:
        sharding = TensorSharding(((), ("model",)))
        mesh = Mesh.of({"model": 2})
        return Layout(
            element_type="f32", shape=(count, 6), stored_shape=(count, 6), mesh=mesh, sharding=sharding,
            first_device=first_device,
        )  # fmt: skip

    assert chunk_shape((13, 6), ((rows(8, 0), 0), (rows(5, 2), 8))) == (8, 3)
    assert chunk_shape((12, 6), ((rows(4, 0), 0), (rows(6, 2), 4), (rows(2, 4), 10))) == (2, 3)
