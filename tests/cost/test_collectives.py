"""Wire bytes by counting what a ring really sends; links by what an axis crosses."""

from __future__ import annotations

import dataclasses

import pytest

from shardwright.cluster import Cluster
from shardwright.cost import Link, Topology, collective_time_s, hardware_profile, wire_bytes
from shardwright.cost.collectives import device_groups
from shardwright.errors import InternalError
from shardwright.plans import Mesh

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


def test_groups_are_row_major() -> None:
    mesh = Mesh.of({"x": 2, "y": 4})
    assert device_groups(("y",), mesh) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert device_groups(("x",), mesh) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert device_groups(("x", "y"), mesh) == (tuple(range(8)),)


def test_an_axis_inside_a_node_uses_its_fast_links() -> None:
    mesh = Mesh.of({"x": 2, "y": 4})
    inside = collective_time_s("all-gather", 40 * MIB, ("y",), mesh, topology(4, 4))
    across = collective_time_s("all-gather", 40 * MIB, ("x",), mesh, topology(4, 4))
    assert inside == pytest.approx(3 * 1e-6 + 30 * MIB / 100e9)
    assert across == pytest.approx(1 * 5e-6 + 20 * MIB / 10e9)


def test_a_ring_through_nodes_uses_all_its_devices_links() -> None:
    mesh = Mesh.of({"x": 8})
    both = collective_time_s("all-reduce", 8 * MIB, ("x",), mesh, topology(4, 4))
    assert both == pytest.approx(14 * 5e-6 + 14 * MIB / 40e9)
    lonely = collective_time_s("all-reduce", 8 * MIB, ("x",), mesh, topology(7, 1))
    assert lonely == pytest.approx(14 * 5e-6 + 14 * MIB / 10e9)


def test_cluster_link_speeds_take_precedence() -> None:
    text = """{"master": {"ip": "127.0.0.1", "port": 1, "devices": 4},
               "workers": [{"ip": "127.0.0.1", "port": 2, "devices": 4}]}"""
    profile = hardware_profile("a100")
    made = Topology.of(Cluster.from_json(text), profile)
    assert made.devices_per_node == (4, 4)
    assert made.inter_node == profile.inter_node


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
