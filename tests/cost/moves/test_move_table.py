"""Moves of many pairs at once, against those that are worked out one by one."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from shardwright.cost import reshard
from shardwright.cost.moves.move_table import LayoutIds, Moves
from shardwright.errors import UnpartitionableError
from shardwright.plans.shardings import Mesh, TensorSharding


def shardings(mesh: Mesh, rank: int) -> list[TensorSharding]:
    """Every sharding of an array: an axis is idle (-2), holds sums (-1) or splits a dimension."""
    results = []
    for roles in product(range(-2, rank), repeat=len(mesh.axes)):

        def doing(what: int, roles: tuple[int, ...] = roles) -> tuple[str, ...]:
            return tuple(axis.name for axis, role in zip(mesh.axes, roles, strict=True) if role == what)

        results.append(TensorSharding(tuple(map(doing, range(rank))), doing(-1)))
    return results


def one_by_one(source: TensorSharding, target: TensorSharding, mesh: Mesh, shape: tuple[int, ...]) -> Moves | None:
    try:
        moves = reshard("u8", shape, source, target, mesh)
    except UnpartitionableError:
        return None
    return tuple(
        (move.kind, move.atoms, move.payload_bytes / np.prod(shape), move.reads, move.writes) for move in moves
    )


def all_at_once(
    pairs: list[tuple[TensorSharding, TensorSharding]], mesh: Mesh, shape: tuple[int, ...]
) -> list[Moves | None]:
    bit = {axis.name: 1 << i for i, axis in enumerate(mesh.axes)}
    layouts = LayoutIds(mesh, len(shape))
    lists, places = layouts.moves(layouts.kind(shape)).between(
        np.array([layouts.number(source.dims) for source, _ in pairs]),
        np.array([layouts.number(target.dims) for _, target in pairs]),
        np.array([sum(bit[a] for a in source.unreduced if a not in target.unreduced) for source, target in pairs]),
    )
    return [lists[place] for place in places.tolist()]


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ((2, 2, 2), (64, 64)),
        ((2, 4, 2), (16,)),
        ((4, 2), (8, 24, 16)),
        ((3, 2), (6, 36)),
        ((2, 1, 4), (32, 8)),
        ((8,), ()),
        ((12,), (144, 12)),
        ((4, 2), (13, 16)),
        ((2, 2, 2), (7, 5)),
        ((2, 3), (16, 12, 7)),
        ((3, 2, 2), (16, 2)),
        ((12,), (30, 4)),
    ],
)
def test_all_at_once_are_those_one_by_one(sizes: tuple[int, ...], shape: tuple[int, ...]) -> None:
    mesh = Mesh.of(dict(zip("xyz", sizes, strict=False)))
    pairs = [
        (source, target)
        for source, target in product(shardings(mesh, len(shape)), repeat=2)
        if not set(target.unreduced) & set(source.axes)
    ]
    for (source, target), item in zip(pairs, all_at_once(pairs, mesh, shape), strict=True):
        expected = one_by_one(source, target, mesh, shape)
        assert (item is None) == (expected is None), f"{source} -> {target}"
        if item is not None and expected is not None:
            sizes, expected_sizes = ([move[2] for move in moves] for moves in (item, expected))
            assert sizes == pytest.approx(expected_sizes)
            others, expected_others = ([(*move[:2], *move[3:]) for move in moves] for moves in (item, expected))
            assert others == expected_others, f"{source} -> {target}"


def test_arrays_that_differ_in_even_dimensions_only_are_of_one_kind() -> None:
    layouts = LayoutIds(Mesh.of({"x": 2, "y": 4}), 3)
    assert layouts.kind((8, 7, 24)) == layouts.kind((64, 7, 16)) != layouts.kind((8, 5, 24))
    assert layouts.kind((8, 16, 24)) == layouts.even_kind


def test_what_the_partitioner_ends_its_process_at_has_no_moves() -> None:
    mesh, shape = Mesh.of({"x": 2, "y": 4, "z": 2}), (256,) * 4
    ways = [each for each in shardings(mesh, 4) if not each.unreduced]
    pairs = [(source, target) for source, target in product(ways[::7], ways)]
    ends = [pair for pair in pairs if one_by_one(*pair, mesh, shape) is None]
    assert ends
    assert set(all_at_once(ends, mesh, shape)) == {None}
