"""Which meshes are tried: all factorizations, and of those that are one problem, one."""

from __future__ import annotations

from itertools import combinations, permutations, product
from math import prod

import pytest

from shardwright.clusters.cluster import Cluster, ClusterNode
from shardwright.cost import hardware_profile
from shardwright.cost.moves.collectives import Topology, collective_time_s
from shardwright.errors import OptionError
from shardwright.options.plan_options import PlanOptions
from shardwright.planner.search.meshes import candidate_meshes, mesh_from_options, refines
from shardwright.plans.shardings import Mesh
from tests.planner.programs import PLAIN_A100


def cluster(*devices: int) -> Cluster:
    nodes = (ClusterNode(index=i, ip=f"10.0.0.{i}", port=2222, device_count=n) for i, n in enumerate(devices))
    return Cluster(name="test", nodes=tuple(nodes), platform="cuda", hardware=PLAIN_A100)


def factorizations(devices: int, most: int) -> set[tuple[int, ...]]:
    """By trying all sizes."""
    sizes = [size for size in range(2, devices + 1) if devices % size == 0]
    return {
        found for count in range(1, most + 1) for found in product(sizes, repeat=count) if prod(found) == devices
    } or {(1,)}


def sizes_of(meshes: tuple[Mesh, ...]) -> list[tuple[int, ...]]:
    return [tuple(axis.size for axis in mesh.axes) for mesh in meshes]


def times(mesh: Mesh, order: tuple[int, ...], where: Cluster) -> list[float]:
    """Seconds of each kind of collective over each set of axes, the axes taken in `order`."""
    topology = Topology.of(where, hardware_profile("a100"))
    names = [mesh.axes[place].name for place in order]
    return [
        collective_time_s(kind, 1 << 24, tuple(chosen), mesh, topology)
        for count in range(1, len(names) + 1)
        for chosen in combinations(names, count)
        for kind in ("all-reduce", "all-gather", "all-to-all", "collective-permute")
    ]


@pytest.mark.parametrize("devices", [1, 2, 7, 8, 12, 30, 36, 64])
def test_every_factorization_is_there_in_some_order(devices: int) -> None:
    values = {tuple(sorted(sizes)) for sizes in sizes_of(candidate_meshes(cluster(devices)))}
    assert values == {tuple(sorted(sizes)) for sizes in factorizations(devices, 3)}
    everything = candidate_meshes(cluster(devices), is_ordered=True)
    assert set(sizes_of(everything)) == factorizations(devices, 3)
    assert all(mesh.device_count == devices for mesh in everything)


@pytest.mark.parametrize("nodes", [(8,), (4, 4), (2, 2, 2), (8, 8), (5, 3), (6, 6), (4, 4, 4, 4), (7, 5)])
def test_a_mesh_that_is_left_out_costs_the_same_as_one_that_is_kept(nodes: tuple[int, ...]) -> None:
    where = cluster(*nodes)
    result = candidate_meshes(where)
    for mesh in candidate_meshes(where, is_ordered=True):
        if mesh in result:
            continue
        own = times(mesh, tuple(range(len(mesh.axes))), where)
        assert any(
            times(other, order, where) == own
            for other in result
            if len(other.axes) == len(mesh.axes)
            for order in permutations(range(len(mesh.axes)))
            if [other.axes[place].size for place in order] == [axis.size for axis in mesh.axes]
        ), mesh


def test_where_links_differ_both_orders_are_kept() -> None:
    assert sizes_of(candidate_meshes(cluster(8), max_axes=2)) == [(8,), (4, 2)]
    assert sizes_of(candidate_meshes(cluster(4, 4), max_axes=2)) == [(8,), (2, 4), (4, 2)]
    assert sizes_of(candidate_meshes(cluster(5, 3), max_axes=2)) == [(8,), (4, 2), (2, 4)]


def test_axes_that_lie_within_nodes_or_across_them_come_first() -> None:
    meshes = sizes_of(candidate_meshes(cluster(*[8] * 8)))
    assert meshes[:2] == [(64,), (8, 8)]
    assert [len(sizes) for sizes in meshes] == sorted(len(sizes) for sizes in meshes)


def test_names_are_in_every_mesh_and_in_every_place() -> None:
    meshes = [mesh.sizes for mesh in candidate_meshes(cluster(8), names=("rows",), max_axes=2)]
    assert meshes == [{"rows": 8}, {"rows": 4, "data": 2}, {"data": 4, "rows": 2}]
    both = candidate_meshes(cluster(8), names=("rows", "data"), max_axes=2)
    assert {tuple(sorted(mesh.sizes.items())) for mesh in both} == {
        (("data", 2), ("rows", 4)),
        (("data", 4), ("rows", 2)),
    }


def test_too_few_factors_for_the_names_leave_axes_of_size_one() -> None:
    meshes = [mesh.sizes for mesh in candidate_meshes(cluster(2), names=("rows", "columns"))]
    assert sorted(map(sorted, (mesh.items() for mesh in meshes))) == [
        [("columns", 1), ("rows", 2)],
        [("columns", 2), ("rows", 1)],
    ]
    assert [mesh.sizes for mesh in candidate_meshes(cluster(1), names=("a", "b"))] == [{"a": 1, "b": 1}]
    with pytest.raises(OptionError, match="axes a, b, c, d are named, a mesh has at most 3"):
        candidate_meshes(cluster(16), names=("a", "b", "c", "d"))


@pytest.mark.parametrize(
    ("fine", "coarse", "expected"),
    [
        ((2, 2, 2), (8,), True), ((2, 2, 2), (4, 2), True), ((2, 2, 2), (2, 4), True), ((4, 2), (8,), True),
        ((4, 2), (2, 4), False), ((8,), (4, 2), False), ((2, 3, 2), (6, 2), True), ((2, 3, 2), (4, 3), False),
        ((2, 4), (2, 4), True), ((2, 2, 2), (2, 2), False),
    ],
)  # fmt: skip
def test_refinement(fine: tuple[int, ...], coarse: tuple[int, ...], expected: bool) -> None:
    names = ("data", "model", "sequence")
    meshes = [Mesh.of(dict(zip(names, sizes, strict=False))) for sizes in (fine, coarse)]
    assert refines(*meshes) == expected


def test_a_given_mesh_has_up_to_three_axes() -> None:
    assert mesh_from_options(PlanOptions(mesh={"a": 2, "b": 3, "c": 2}), 12) == Mesh.of({"a": 2, "b": 3, "c": 2})
    with pytest.raises(OptionError, match="mesh has 4 axes"):
        mesh_from_options(PlanOptions(mesh={"a": 2, "b": 2, "c": 2, "d": 1}), 8)
    with pytest.raises(OptionError, match="has 4 devices, the cluster 8"):
        mesh_from_options(PlanOptions(mesh={"a": 4}), 8)
