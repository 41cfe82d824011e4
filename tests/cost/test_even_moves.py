"""Moves of many pairs at once, against those that are worked out one by one."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from shardwright.cost import reshard
from shardwright.cost.even_moves import EvenMoves, Moves
from shardwright.errors import UnpartitionableError
from shardwright.plans import Mesh, TensorSharding


def shardings(mesh: Mesh, rank: int) -> list[TensorSharding]:
    """Every sharding of an array: an axis is idle (-2), holds sums (-1) or splits a dimension."""
    found = []
    for roles in product(range(-2, rank), repeat=len(mesh.axes)):

        def doing(what: int, roles: tuple[int, ...] = roles) -> tuple[str, ...]:
            return tuple(axis.name for axis, role in zip(mesh.axes, roles, strict=True) if role == what)

        found.append(TensorSharding(tuple(map(doing, range(rank))), doing(-1)))
    return found


def one_by_one(source: TensorSharding, target: TensorSharding, mesh: Mesh) -> Moves | None:
    shape = (mesh.device_count**2,) * len(source.dims)
    try:
        moves = reshard("u8", shape, source, target, mesh)
    except UnpartitionableError:
        return None
    return tuple((move.kind, move.atoms, move.payload_bytes / np.prod(shape)) for move in moves)


@pytest.mark.parametrize(
    ("sizes", "rank"), [((2, 2, 2), 2), ((2, 4, 2), 1), ((4, 2), 3), ((3, 2), 2), ((2, 1, 4), 2), ((8,), 0), ((12,), 2)]
)
def test_all_at_once_are_those_one_by_one(sizes: tuple[int, ...], rank: int) -> None:
    mesh = Mesh.of(dict(zip("xyz", sizes, strict=False)))
    bit = {axis.name: 1 << i for i, axis in enumerate(mesh.axes)}
    pairs = [
        (source, target)
        for source, target in product(shardings(mesh, rank), repeat=2)
        if not set(target.unreduced) & set(source.axes)
    ]
    moves = EvenMoves(mesh, rank)
    lists, places = moves.between(
        np.array([moves.layout(source.dims) for source, _ in pairs]),
        np.array([moves.layout(target.dims) for _, target in pairs]),
        np.array([sum(bit[a] for a in source.unreduced if a not in target.unreduced) for source, target in pairs]),
    )
    for (source, target), place in zip(pairs, places.tolist(), strict=True):
        assert lists[place] == one_by_one(source, target, mesh), f"{source} -> {target}"


def test_what_the_partitioner_ends_its_process_at_has_no_moves() -> None:
    mesh = Mesh.of({"x": 2, "y": 4, "z": 2})
    ways = [each for each in shardings(mesh, 4) if not each.unreduced]
    ends = [(source, target) for source, target in product(ways[::7], ways) if one_by_one(source, target, mesh) is None]
    assert ends
    moves = EvenMoves(mesh, 4)
    have, want = (np.array([moves.layout(pair[i].dims) for pair in ends]) for i in (0, 1))
    lists, _ = moves.between(have, want, np.zeros(len(ends), np.int64))
    assert lists == [None]
