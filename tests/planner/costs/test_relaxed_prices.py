"""Prices for bounds against the partitioner's, pair by pair."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shardwright.clusters.cluster import Cluster
from shardwright.cost import hardware_profile
from shardwright.hlo import ArrayShape
from shardwright.planner.costs.prices import Prices
from shardwright.planner.costs.relaxed_prices import RelaxedPrices
from shardwright.planner.strategies.expansion import shardings_of
from shardwright.planner.strategies.padding import divides_or_pays
from shardwright.planner.tuning import EXACT_RANK
from shardwright.plans.shardings import Mesh
from tests.planner.search.test_meshes import cluster


def least_seconds(nodes: Cluster, mesh: Mesh, shape: ArrayShape, **exact: Any) -> np.ndarray:
    """Seconds between all layouts of an array, partial sums included, at least.

    exact: which moves are to be followed; none of many dimensions else.
    """
    return _seconds(RelaxedPrices(mesh, nodes, hardware_profile("a100"), **{"even_rank": 0, **exact}), shape)


def both(nodes: Cluster, mesh: Mesh, shape: ArrayShape, **exact: Any) -> tuple[np.ndarray, np.ndarray]:
    """The same, and as XLA moves it."""
    real = _seconds(Prices(mesh, nodes, hardware_profile("a100")), shape)
    return least_seconds(nodes, mesh, shape, **exact), real


def _seconds(prices: Prices, shape: ArrayShape) -> np.ndarray:
    layouts = shardings_of(shape, prices.mesh, partial=True, may_split=divides_or_pays)
    ids = np.array([prices.identify(each) for each in layouts])
    return prices.reshard_matrix(shape, ids, ids, 1.0)


@pytest.mark.dear
@pytest.mark.parametrize("dims", [(1024, 512), (64, 256, 128), (13, 48), (5, 64, 7), (1001, 24), (4099, 264)])
@pytest.mark.parametrize(
    ("nodes", "sizes"), [(1, (2, 2, 2)), (2, (2, 2, 4)), (2, (4, 2, 2)), (4, (2, 2, 4)), (1, (3, 2, 2)), (2, (3, 4))]
)
def test_no_move_takes_less(nodes: int, sizes: tuple[int, ...], dims: tuple[int, ...]) -> None:
    mesh = Mesh.of(dict(zip(("x", "y", "z"), sizes, strict=False)))
    least, real = both(cluster(*[mesh.device_count // nodes] * nodes), mesh, ArrayShape("f32", dims))
    assert np.all(least <= real * (1 + 1e-9))
    assert np.all((least == 0) | (real > 0))


def test_what_one_collective_does_costs_as_much() -> None:
    mesh = Mesh.of({"x": 2, "y": 2, "z": 2})
    least, real = both(cluster(8), mesh, ArrayShape("f32", (4096, 4096)))
    finite = np.isfinite(real) & (real > 0)
    assert np.array_equal(np.isfinite(least), np.isfinite(real))
    assert np.mean(least[finite] > 0.999 * real[finite]) > 0.3
    assert np.all(least[finite] > 0)


def test_even_moves_are_followed_beside_uneven_ones() -> None:
    mesh, shape = Mesh.of({"x": 2, "y": 2, "z": 2}), ArrayShape("f32", (1024, 27))
    rough, real = both(cluster(8), mesh, shape)
    least = least_seconds(cluster(8), mesh, shape, even_rank=2)
    layouts = list(shardings_of(shape, mesh, partial=True, may_split=divides_or_pays))
    even = np.array([each.is_even(shape.dimensions, mesh) for each in layouts])
    assert 0 < even.sum() < len(even)
    assert np.array_equal(least[np.ix_(even, even)], real[np.ix_(even, even)])
    assert np.any(rough[np.ix_(even, even)] < real[np.ix_(even, even)])
    assert np.all(least <= real * (1 + 1e-9))


def test_uneven_moves_are_followed_where_that_is_asked_for() -> None:
    mesh, shape = Mesh.of({"x": 2, "y": 2, "z": 2}), ArrayShape("f32", (1024, 27))
    least, real = both(cluster(8), mesh, shape, even_rank=2, uneven_rank=2)
    assert np.array_equal(least, real)


@pytest.mark.dear
@pytest.mark.parametrize("sizes", [{"x": 2, "y": 2, "z": 2}, {"x": 2, "y": 4, "z": 2}])
def test_even_moves_of_any_rank_are_followed_where_that_is_asked_for(sizes: dict[str, int]) -> None:
    shape, mesh = ArrayShape("f32", (64, 64, 64, 64)), Mesh.of(sizes)
    least, real = both(cluster(mesh.device_count), mesh, shape, even_rank=shape.rank)
    assert np.array_equal(least, real)
    rough = least_seconds(cluster(mesh.device_count), mesh, shape, even_rank=EXACT_RANK)
    assert np.any(rough < real)


@pytest.mark.parametrize("even_rank", [0, 3])
def test_equal_edges_share_one_matrix(even_rank: int) -> None:
    mesh, shape = Mesh.of({"x": 2, "y": 2, "z": 2}), ArrayShape("f32", (64, 64))
    prices = RelaxedPrices(mesh, cluster(8), hardware_profile("a100"), even_rank=even_rank)
    ids = np.array([prices.identify(each) for each in shardings_of(shape, mesh)])
    once = prices.reshard_matrix(shape, ids, ids, 1.0)
    twice = prices.reshard_matrix(shape, ids, ids, 2.0)
    assert prices.reshard_matrix(shape, ids.copy(), ids, 1.0) is once
    np.testing.assert_allclose(twice, 2 * once)


def test_the_same_prices_with_more_moves_followed() -> None:
    mesh, shape = Mesh.of({"x": 2, "y": 2, "z": 2}), ArrayShape("f32", (16, 64, 8, 32))
    nodes, profile = cluster(8), hardware_profile("a100")
    rough, real = RelaxedPrices(mesh, nodes, profile), Prices(mesh, nodes, profile)
    layouts = list(shardings_of(shape, mesh, partial=True))
    ids = np.array([rough.identify(each) for each in layouts])
    before = rough.reshard_matrix(shape, ids, ids, 1.0)
    followed = rough.with_exact_rank(4).reshard_matrix(shape, ids, ids, 1.0)
    numbers = np.array([real.identify(each) for each in layouts])
    assert np.array_equal(followed, real.reshard_matrix(shape, numbers, numbers, 1.0))
    assert np.any(before < followed)
    assert np.array_equal(rough.with_exact_rank(EXACT_RANK).reshard_matrix(shape, ids, ids, 1.0), before)


def test_uneven_arrays_of_equal_size_are_told_apart() -> None:
    mesh, shapes = Mesh.of({"x": 2, "y": 2, "z": 2}), ((9, 8, 8, 64), (8, 8, 9, 64))
    first, second = (ArrayShape("f32", dimensions) for dimensions in shapes)
    nodes, profile = cluster(8), hardware_profile("a100")
    both_of_them, alone = RelaxedPrices(mesh, nodes, profile), RelaxedPrices(mesh, nodes, profile)
    layouts = list(shardings_of(first, mesh))
    ids = np.array([both_of_them.identify(each) for each in layouts])
    of_first = both_of_them.reshard_matrix(first, ids, ids, 1.0)
    of_second = both_of_them.reshard_matrix(second, ids, ids, 1.0)
    numbers = np.array([alone.identify(each) for each in layouts])
    assert np.array_equal(of_second, alone.reshard_matrix(second, numbers, numbers, 1.0))
    assert not np.array_equal(of_first, of_second)
