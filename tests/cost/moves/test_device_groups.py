"""Groups of devices against arrays of device numbers, and how they lie in nodes against counting."""

from __future__ import annotations

import random
from collections import Counter
from itertools import combinations, permutations

import numpy as np
import pytest

from shardwright.cost import Link, Topology, group_time_s
from shardwright.cost.moves.device_groups import device_groups, groups_along, node_spreads
from shardwright.cost.moves.tilings import AtomOrder, along, cut, tiling_of
from shardwright.plans.shardings import Mesh

MESHES = [{"x": 2, "y": 8}, {"x": 12}, {"x": 2, "y": 4, "z": 2}, {"x": 4, "y": 6, "z": 2}, {"x": 9, "y": 4}]
NODES = [(8, 8), (7, 5), (4, 4, 4, 4), (16,), (10, 6), (20, 16, 12), (3, 3)]

Groups = set[frozenset[int]]


def orders(mesh: Mesh) -> list[tuple[AtomOrder, np.ndarray]]:
    """Orders of atoms that resharding on the mesh comes by, with the device numbers in that order: the mesh's own
    numbering transposed, its factors cut anew once and twice."""
    grid = np.arange(mesh.device_count).reshape(list(mesh.sizes.values()))
    results = []
    for names in permutations(mesh.sizes):
        numbers = grid.transpose([list(mesh.sizes).index(name) for name in names]).ravel()
        order = tiling_of((names,), mesh).order
        odd = max(size for size in range(1, mesh.device_count + 1, 2) if mesh.device_count % size == 0)
        for first in (1, odd, 2, mesh.device_count // 2):
            order = sum(cut(order, (first, mesh.device_count // first)), ())
            results.append((order, numbers))
    return results


def count_all(atoms: AtomOrder, order: AtomOrder, numbers: np.ndarray) -> Groups:
    """Devices whose places in the order differ in the digits of some atoms only."""
    array = numbers.reshape([atom.size for atom in order])
    chosen = [order.index(atom) for atom in atoms]
    rest = [place for place in range(len(order)) if place not in chosen]
    rows = array.transpose([*rest, *chosen]).reshape(-1, int(np.prod([atom.size for atom in atoms])))
    return {frozenset(row) for row in rows.tolist()}


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_groups_differ_in_their_atoms_only(sizes: dict[str, int]) -> None:
    mesh = Mesh.of(sizes)
    for order, numbers in orders(mesh):
        for many in range(1, len(order) + 1):
            for atoms in combinations(order, many):
                assert set(map(frozenset, groups_along(atoms, mesh))) == count_all(atoms, order, numbers)


def test_the_orders_have_atoms_that_no_axis_has() -> None:
    """Else the test above would show little."""
    every = {atom for sizes in MESHES for order, _ in orders(Mesh.of(sizes)) for atom in order if atom.cut}
    assert any(len(atom.axes) > 1 for atom in every)
    assert any(before.cut for atom in every if atom.cut for before in atom.cut[0])


@pytest.mark.parametrize("nodes", NODES, ids=str)
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_spreads_count_the_members_on_each_node(sizes: dict[str, int], nodes: tuple[int, ...]) -> None:
    mesh = Mesh.of(sizes)
    node_of = [node for node, count in enumerate(nodes) for _ in range(count)]
    for order, _ in random.Random(0).sample(orders(mesh), 4):
        for atoms in combinations(order, 2):
            members = [
                Counter(node_of[device] if device < len(node_of) else len(nodes) for device in group)
                for group in groups_along(atoms, mesh)
            ]
            assert set(node_spreads(atoms, mesh, nodes)) == {
                tuple(sorted(each.values(), reverse=True)) for each in members
            }


def test_groups_along_axes_are_row_major() -> None:
    mesh = Mesh.of({"x": 2, "y": 4})
    assert device_groups(("y",), mesh) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert device_groups(("x",), mesh) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert device_groups(("x", "y"), mesh) == (tuple(range(8)),)
    assert device_groups((), mesh) == tuple((device,) for device in range(8))


def test_half_an_inner_axis_and_all_of_the_outer_one_cross_nodes() -> None:
    """Two nodes of 8: of the 8 parts that a device sends, 4 leave its node. As all of the inner axis, none would."""
    topology = Topology(
        devices_per_node=(8, 8),
        intra_node=Link(bandwidth_bytes_per_s=100e9, latency_s=1e-6),
        inter_node=Link(bandwidth_bytes_per_s=10e9, latency_s=5e-6),
        efficiency=1.0,
    )
    mesh = Mesh.of({"x": 2, "y": 8})
    (outer,), inner = along(("x",), mesh), along(("y",), mesh)
    size = 1 << 23
    for half in (inner[:2], inner[1:], inner[::2]):
        time_s = group_time_s("all-to-all", size, (outer, *half), mesh, topology)
        assert time_s == pytest.approx(3 * 1e-6 + 4 * 5e-6 + size / 2 / 10e9)
        gathered_s = group_time_s("all-gather", size, (outer, *half), mesh, topology)
        assert gathered_s == pytest.approx(6 * 1e-6 + 5e-6 + size * 7 / 8 / 40e9)
    inside_s = group_time_s("all-to-all", size, inner, mesh, topology)
    assert inside_s == pytest.approx(7 * 1e-6 + size * 7 / 8 / 100e9)
