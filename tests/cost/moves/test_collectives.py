"""Wire bytes by counting what a ring really sends; links by what an axis crosses."""

from __future__ import annotations

import dataclasses

import pytest

from shardwright.clusters.cluster import Cluster
from shardwright.cost import Link, Topology, collective_time_s, hardware_profile, wire_bytes
from shardwright.errors import InternalError
from shardwright.plans.shardings import Mesh

MIB = 2**20


def ring_sends(kind: str, group_size: int) -> float:
    """Bytes each device sends per payload byte, by running the ring: what each one lacks goes round."""
    n = group_size
    chunk = 1.0 / n
    if kind == "all-gather":  # each chunk is forwarded until everyone has it
        return sum(chunk for _ in range(n - 1))
    if kind == "reduce-scatter":
        return sum(chunk for _ in range(n - 1))
    if kind == "all-reduce":
        return ring_sends("reduce-scatter", n) + ring_sends("all-gather", n)
    if kind == "all-to-all":  # of its own shard all but the part it keeps
        return sum(chunk for receiver in range(n) if receiver != 0)
    return 1.0


@pytest.mark.parametrize("kind", ["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"])
@pytest.mark.parametrize("group_size", [2, 4, 8, 3])
def test_wire_bytes_equal_a_simulated_ring(kind: str, group_size: int) -> None:
    assert wire_bytes(kind, 24 * MIB, group_size) == pytest.approx(24 * MIB * ring_sends(kind, group_size))


def test_one_device_sends_nothing_and_unknown_kinds_are_refused() -> None:
    assert wire_bytes("all-reduce", MIB, 1) == 0
    with pytest.raises(InternalError):
        wire_bytes("broadcast", MIB, 2)


def topology(*devices_per_node: int) -> Topology:
    return Topology(
        devices_per_node=devices_per_node,
        intra_node=Link(bandwidth_bytes_per_s=100e9, latency_s=1e-6),
        inter_node=Link(bandwidth_bytes_per_s=10e9, latency_s=5e-6),
        efficiency=1.0,
    )


@pytest.mark.parametrize("kind", ["all-reduce", "all-gather", "all-to-all"])
def test_threads_that_wait_for_one_another_pay_latency_per_member(kind: str) -> None:
    waiting = dataclasses.replace(topology(8), latency_counts="members")
    mesh = Mesh.of({"x": 2, "y": 4})
    times = [collective_time_s(kind, 0, axes, mesh, waiting) for axes in (("x",), ("y",), ("x", "y"))]
    assert times == pytest.approx([2e-6, 4e-6, 8e-6])


def test_an_axis_inside_a_node_uses_its_fast_links() -> None:
    mesh = Mesh.of({"x": 2, "y": 4})
    inside = collective_time_s("all-gather", 40 * MIB, ("y",), mesh, topology(4, 4))
    across = collective_time_s("all-gather", 40 * MIB, ("x",), mesh, topology(4, 4))
    assert inside == pytest.approx(3 * 1e-6 + 30 * MIB / 100e9)
    assert across == pytest.approx(1 * 5e-6 + 20 * MIB / 10e9)


def test_a_ring_through_nodes_uses_all_its_devices_links() -> None:
    """By hand: 7/8 of the array out of each device twice, four links of 10 GB/s out of each node of four."""
    mesh = Mesh.of({"x": 8})
    both = collective_time_s("all-gather", 8 * MIB, ("x",), mesh, topology(4, 4))
    assert both == pytest.approx(6 * 1e-6 + 1 * 5e-6 + 7 * MIB / 40e9)
    # A node with one member of the group has one link, and every ring has to pass it.
    lonely = collective_time_s("all-gather", 8 * MIB, ("x",), mesh, topology(7, 1))
    assert lonely == pytest.approx(6 * 1e-6 + 1 * 5e-6 + 7 * MIB / 10e9)
    # Twelve links of 10 GB/s are more than a device's 100 GB/s inside the node.
    wide = collective_time_s("all-gather", 24 * MIB, ("x",), Mesh.of({"x": 24}), topology(12, 12))
    assert wide == pytest.approx(22 * 1e-6 + 1 * 5e-6 + 23 * MIB / 100e9)


def test_small_all_reduces_wait_for_a_tree_over_nodes() -> None:
    """8 nodes of 8: the ring waits 2·(56 inside + 7 between), the tree 2·(7 inside + 3 between)."""
    times = collective_time_s("all-reduce", 0, ("x",), Mesh.of({"x": 64}), topology(*[8] * 8))
    assert times == pytest.approx(2 * (7 * 1e-6 + 3 * 5e-6))
    within = collective_time_s("all-reduce", 0, ("x",), Mesh.of({"x": 8}), topology(8))
    assert within == pytest.approx(14 * 1e-6)
    alone = collective_time_s("all-reduce", 0, ("x",), Mesh.of({"x": 2}), topology(1, 1))
    assert alone == pytest.approx(2 * 5e-6)


def test_what_leaves_a_node_in_an_all_to_all_goes_over_the_senders_own_link() -> None:
    """Two nodes of 8: 8 of 16 parts leave, 7 stay; 8 nodes of 8: 56 of 64 leave."""
    two = collective_time_s("all-to-all", 16 * MIB, ("x",), Mesh.of({"x": 16}), topology(8, 8))
    assert two == pytest.approx(7 * 1e-6 + 8 * 5e-6 + 8 * MIB / 10e9)
    eight = collective_time_s("all-to-all", 64 * MIB, ("x",), Mesh.of({"x": 64}), topology(*[8] * 8))
    assert eight == pytest.approx(7 * 1e-6 + 56 * 5e-6 + 56 * MIB / 10e9)
    permuted = collective_time_s("collective-permute", MIB, ("x",), Mesh.of({"x": 16}), topology(8, 8))
    assert permuted == pytest.approx(5e-6 + MIB / 10e9)


def test_three_axes_over_nodes_of_eight() -> None:
    """2 nodes × 8 devices as 2 × 2 × 4: the first axis pairs nodes, each pair with a link of its own."""
    mesh = Mesh.of({"x": 2, "y": 2, "z": 4})
    times = {axes: collective_time_s("all-gather", 16 * MIB, axes, mesh, topology(8, 8)) for axes in AXES_OF_THREE}
    assert times["x",] == pytest.approx(5e-6 + 8 * MIB / 10e9)
    assert times["y",] == pytest.approx(1e-6 + 8 * MIB / 100e9)
    assert times["y", "z"] == pytest.approx(7 * 1e-6 + 14 * MIB / 100e9)
    assert times["x", "z"] == pytest.approx(6 * 1e-6 + 5e-6 + 14 * MIB / 40e9)


AXES_OF_THREE = (("x",), ("y",), ("z",), ("x", "y"), ("y", "z"), ("x", "z"), ("x", "y", "z"))


def test_the_slowest_group_counts_where_nodes_are_unequal() -> None:
    """5 + 3 devices as 2 × 4: one group lies in the first node, the other has one member there and three beyond."""
    mesh = Mesh.of({"x": 2, "y": 4})
    gathered = collective_time_s("all-gather", 4 * MIB, ("y",), mesh, topology(5, 3))
    assert gathered == pytest.approx(2 * 1e-6 + 1 * 5e-6 + 3 * MIB / 10e9)
    exchanged = collective_time_s("all-to-all", 4 * MIB, ("y",), mesh, topology(5, 3))
    assert exchanged == pytest.approx(3 * 5e-6 + 3 * MIB / 10e9)


@pytest.mark.parametrize("kind", ["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"])
def test_more_bytes_and_slower_links_never_cost_less(kind: str) -> None:
    for sizes in ({"x": 16}, {"x": 2, "y": 8}, {"x": 4, "y": 2, "z": 2}):
        mesh = Mesh.of(sizes)
        for nodes in ((16,), (8, 8), (4, 4, 4, 4), (10, 6), (1,) * 16):
            for axes in (("x",), tuple(sizes)):
                times = [collective_time_s(kind, size, axes, mesh, topology(*nodes)) for size in (0, MIB, 8 * MIB)]
                assert times == sorted(times)
                one_node = collective_time_s(kind, MIB, axes, mesh, topology(16))
                assert times[1] >= one_node or kind == "all-reduce"


def test_cluster_link_speeds_take_precedence() -> None:
    text = """{"master": {"ip": "127.0.0.1", "port": 1, "devices": 4},
               "workers": [{"ip": "127.0.0.1", "port": 2, "devices": 4}]}"""
    profile = hardware_profile("a100")
    result = Topology.of(Cluster.from_json(text), profile)
    assert result.devices_per_node == (4, 4)
    assert result.inter_node == profile.inter_node


def test_a_reduce_scatter_costs_what_the_compiler_makes_of_it() -> None:
    """XLA:CPU runs an all-reduce and slices; what is counted on the wire is the reduce-scatter all the same."""
    mesh = Mesh.of({"x": 8})
    cluster = Cluster.local(8)
    times = {
        (name, kind): collective_time_s(kind, 8 * MIB, ("x",), mesh, Topology.of(cluster, hardware_profile(name)))
        for name in ("cpu", "a100", "tpu-v5e")
        for kind in ("reduce-scatter", "all-reduce")
    }
    assert times["cpu", "reduce-scatter"] == times["cpu", "all-reduce"]
    assert times["a100", "reduce-scatter"] == pytest.approx(times["a100", "all-reduce"] / 2)
    assert times["tpu-v5e", "reduce-scatter"] == pytest.approx(times["tpu-v5e", "all-reduce"] / 2)
    assert wire_bytes("reduce-scatter", 8 * MIB, 8) * 2 == wire_bytes("all-reduce", 8 * MIB, 8)
