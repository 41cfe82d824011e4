"""Arrays of a snapshot in other layouts: what each device gets is cut out of the whole array by numpy."""

from __future__ import annotations

import random
from math import prod

import numpy as np
import pytest

from shardwright.plans.layouts import Layout, distinct_shards, pad_to_stored
from shardwright.plans.shardings import Mesh, TensorSharding
from shardwright.server.runtime.relayout import Relayout, StoredSection
from shardwright.server.runtime.resharding import RowSection

MESHES = [{"x": 1}, {"x": 6}, {"x": 4}, {"x": 2, "y": 3}, {"x": 2, "y": 2}, {"y": 3}]


def random_layout(chance: random.Random, shape: tuple[int, ...], view_of: tuple[int, ...] | None = None) -> Layout:
    """On some mesh, each dimension split over some of its axes, padded to what they divide."""
    mesh = Mesh.of(chance.choice(MESHES))
    free = [axis.name for axis in mesh.axes]
    dims, stored = [], []
    for size in shape:
        axes = tuple(name for name in list(free) if chance.random() < 0.4)
        free = [name for name in free if name not in axes]
        dims.append(axes)
        parts = mesh.size(axes)
        stored.append(-(-size // parts) * parts)
    return Layout(
        element_type="f32",
        shape=shape,
        mesh=mesh,
        sharding=TensorSharding(tuple(dims)),
        stored_shape=tuple(stored),
        view_of=view_of,
        first_device=chance.choice([0, 0, 2]),
    )


def store(value: np.ndarray, layout: Layout, array_id: int) -> dict[tuple[int, int], np.ndarray]:
    """The parts of an array, as bytes."""
    stored = pad_to_stored(value, layout)
    return {
        (array_id, number): np.frombuffer(np.ascontiguousarray(stored[shard.slices]).tobytes(), np.uint8)
        for number, shard in enumerate(distinct_shards(layout, layout.devices))
    }


def check(sections: list[StoredSection], contents: dict, target: RowSection, value: np.ndarray) -> None:
    """Each of four nodes gets its shards, and needs no part that it was not given."""
    relayout = Relayout(sections, target)
    stored = pad_to_stored(value, target.layout)
    for here in (range(2), range(2, 4), range(4, 6), range(6, 8)):
        sizes = relayout.part_sizes(here)
        assert all(contents[key].nbytes == size for key, size in sizes.items())
        made = relayout.make(here, {key: contents[key] for key in sizes})
        wanted = distinct_shards(target.layout, here)
        assert len(made) == len(wanted)
        for shard, piece in zip(wanted, made, strict=True):
            np.testing.assert_array_equal(piece, stored[(..., *shard.slices)])


@pytest.mark.parametrize("seed", range(120))
def test_whole_arrays(seed: int) -> None:
    chance = random.Random(seed)
    shape = tuple(chance.choice([1, 4, 5, 6, 12]) for _ in range(chance.randrange(4)))
    value = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    before, after = random_layout(chance, shape), random_layout(chance, shape)
    check([StoredSection(7, RowSection(before))], store(value, before, 7), RowSection(after), value)


@pytest.mark.parametrize("seed", range(60))
def test_rows_of_stages(seed: int) -> None:
    """Stored as rows of several stages, wanted as a whole, and as other rows."""
    chance = random.Random(seed)
    shape = (12, 6)
    value = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    bounds = chance.choice([[(0, 6), (6, 12)], [(0, 2), (2, 8), (8, 12)]])
    sections, contents = [], {}
    for number, (start, stop) in enumerate(bounds):
        layout = random_layout(chance, (stop - start, 6))
        sections.append(StoredSection(number, RowSection(layout, start)))
        contents |= store(value[start:stop], layout, number)
    check(sections, contents, RowSection(random_layout(chance, shape)), value)
    start, stop = chance.choice([(0, 4), (4, 12), (3, 7)])
    check(sections, contents, RowSection(random_layout(chance, (stop - start, 6)), start), value[start:stop])


@pytest.mark.parametrize("seed", range(60))
def test_views_in_other_dimensions(seed: int) -> None:
    chance = random.Random(seed)
    value = np.random.default_rng(seed).normal(size=(4, 18)).astype(np.float32)
    views = [(4, 18), (4, 3, 6), (72,), (2, 2, 18)]
    before, after = chance.choice(views), chance.choice(views)
    old = random_layout(chance, before, None if before == (4, 18) else (4, 18))
    new = random_layout(chance, after, None if after == (4, 18) else (4, 18))
    assert prod(before) == prod(after)
    check([StoredSection(1, RowSection(old))], store(value, old, 1), RowSection(new), value)
