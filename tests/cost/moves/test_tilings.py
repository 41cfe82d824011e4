"""Tile assignments against arrays of device numbers, as XLA keeps them."""

from __future__ import annotations

import random
from math import prod

import numpy as np
import pytest
from numpy.typing import NDArray

from shardwright.cost.moves.tilings import Tiling, count, cut, make_tiling, reshape_tiling, tiling_of
from shardwright.plans.shardings import Mesh

MESH = Mesh.of({"x": 4, "y": 6, "z": 2})


def devices(tiling: Tiling) -> NDArray[np.int64]:
    """The tile assignment: the mesh's numbering, reshaped to its prime factors and transposed."""
    factors = sorted(tiling.order)
    numbers = np.arange(prod(atom.size for atom in factors)).reshape([atom.size for atom in factors])
    return numbers.transpose([factors.index(atom) for atom in tiling.order]).reshape(tiling.sizes)


def test_the_arrays_are_those_of_shardings_on_a_mesh() -> None:
    grid = np.arange(48).reshape(4, 6, 2)
    assert (devices(tiling_of((("x",), ("y",)), MESH)) == grid.reshape(4, 6, 2)).all()
    assert (devices(tiling_of((("y",), ()), MESH)) == grid.transpose(1, 0, 2).reshape(6, 1, 8)).all()
    assert (devices(tiling_of(((), ("z", "x")), MESH)) == grid.transpose(2, 0, 1).reshape(1, 8, 6)).all()


@pytest.mark.parametrize("seed", range(20))
def test_reshaping_keeps_the_order_of_devices(seed: int) -> None:
    rng = random.Random(seed)
    axes = list(MESH.sizes)
    rng.shuffle(axes)
    tiling = tiling_of(((axes[0], axes[1]), (axes[2],)), MESH)
    halves = reshape_tiling(tiling, (2, tiling.tiles[0] // 2, tiling.tiles[1]))
    assert (devices(halves).ravel() == devices(tiling).ravel()).all()
    assert reshape_tiling(halves, tiling.tiles) == tiling


def test_a_cut_inside_a_factor_makes_other_factors() -> None:
    tiling = tiling_of((("z", "y"), ()), Mesh.of({"z": 2, "y": 3}))
    three, two = cut(tiling.order, (3, 2))
    assert (count(three), count(two)) == (3, 2)
    assert {axis for atom in (*three, *two) for axis in atom.axes} == {"z", "y"}
    assert not set(three) & set(tiling.order)
    assert cut(tiling.order, (2, 3)) == (tiling.order[:1], tiling.order[1:])
    assert cut(tiling.order, (1, 6, 1)) == ((), tiling.order, ())


def test_who_shares_a_tile_has_no_order() -> None:
    whole = tiling_of(((),), MESH)
    assert make_tiling([()], tuple(reversed(whole.order))) == whole
    assert whole.is_replicated
    assert not whole.is_partial
    assert tiling_of((("x",),), MESH).is_partial
