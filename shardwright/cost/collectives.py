"""Seconds and wire bytes of collectives: latency per step plus bytes over the links an axis crosses.

Ring algorithms over n devices (Thakur, Rabenseifner, Gropp, "Optimization of
Collective Communication Operations in MPICH", 2005): all-gather and
reduce-scatter send (n-1)/n of the whole array in n-1 steps, an all-reduce is
one of each. An all-to-all sends (n-1)/n of a device's own shard, a permute all
of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from shardwright.cost.profiles import HardwareProfile, Link
from shardwright.errors import InternalError
from shardwright.plans import Mesh

if TYPE_CHECKING:
    from shardwright.cluster import Cluster
    from shardwright.links import Link as ClusterLink


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Which devices share a node, and the links inside and between nodes.

    devices_per_node: devices of each node, in the mesh's device order.
    intra_node / inter_node: what ONE device sends inside its node / to other nodes.
    efficiency: part of a link's bandwidth that collectives attain.
    reduce_scatter_runs_as: the kind whose time a reduce-scatter takes (see `HardwareProfile`).
    latency_counts: what a collective pays latency for (see `HardwareProfile`).
    """

    devices_per_node: tuple[int, ...]
    intra_node: Link
    inter_node: Link
    efficiency: float
    reduce_scatter_runs_as: str = "reduce-scatter"
    latency_counts: str = "ring-steps"

    @classmethod
    def of(cls, cluster: Cluster, profile: HardwareProfile) -> Topology:
        """The cluster's nodes with its own link speeds, the profile's where it names none."""
        return cls(
            devices_per_node=tuple(node.device_count for node in cluster.nodes if node.device_count),
            intra_node=_link(cluster.intra_node, profile.intra_node),
            inter_node=_link(cluster.inter_node, profile.inter_node),
            efficiency=profile.collective_efficiency,
            reduce_scatter_runs_as=profile.reduce_scatter_runs_as,
            latency_counts=profile.latency_counts,
        )


def _link(named: ClusterLink | None, default: Link) -> Link:
    if named is None:
        return default
    latency_s = default.latency_s if named.latency_s is None else named.latency_s
    return Link(bandwidth_bytes_per_s=named.bandwidth_bytes_per_s, latency_s=latency_s)


def wire_bytes(kind: str, payload_bytes: int, group_size: int) -> int:
    """Bytes one device puts on the wire for one collective of `group_size` devices.

    payload_bytes: the larger of the collective's operand and result on one device: the whole
    array of an all-reduce, all-gather or reduce-scatter, one shard of an all-to-all or permute.
    """
    n = group_size
    if n <= 1:
        return 0
    if kind == "all-reduce":
        return round(2 * payload_bytes * (n - 1) / n)
    if kind in ("all-gather", "reduce-scatter", "all-to-all"):
        return round(payload_bytes * (n - 1) / n)
    if kind == "collective-permute":
        return payload_bytes
    raise InternalError(f"unknown collective kind {kind!r}")


def collective_time_s(
    kind: str,
    payload_bytes: int,
    axes: tuple[str, ...],
    mesh: Mesh,
    topology: Topology,
    *,
    group_size: int | None = None,
) -> float:
    """Seconds of one collective over the named mesh axes, all its groups running side by side.

    payload_bytes: as `wire_bytes` takes it. group_size: devices of one group where that is not
    all devices along the axes.
    """
    kind = topology.reduce_scatter_runs_as if kind == "reduce-scatter" else kind
    n = mesh.size(axes) if group_size is None else group_size
    if n <= 1:
        return 0.0
    bandwidth, latency_s = _slowest_link(axes, mesh, topology)
    waits = n if topology.latency_counts == "members" else _ring_steps(kind, n)
    return waits * latency_s + wire_bytes(kind, payload_bytes, n) / (bandwidth * topology.efficiency)


def _ring_steps(kind: str, group_size: int) -> int:
    if kind == "all-reduce":
        return 2 * (group_size - 1)
    return 1 if kind == "collective-permute" else group_size - 1


@cache
def _slowest_link(axes: tuple[str, ...], mesh: Mesh, topology: Topology) -> tuple[float, float]:
    """(bytes a second, latency) that one device of the slowest group over `axes` sees.

    A ring through several nodes leaves each node once; its devices there use their
    links side by side (as NCCL's channels do), so m devices of a node in one group
    have m times one device's bandwidth to other nodes, but no more than inside the node.
    """
    node_of = [node for node, count in enumerate(topology.devices_per_node) for _ in range(count)]
    fewest: int | None = None
    for group in device_groups(axes, mesh):
        nodes = [node_of[device] if device < len(node_of) else -1 for device in group]
        if len(set(nodes)) > 1:
            members = min(nodes.count(node) for node in set(nodes))
            fewest = members if fewest is None else min(fewest, members)
    intra, inter = topology.intra_node, topology.inter_node
    if fewest is None:
        return intra.bandwidth_bytes_per_s, intra.latency_s
    return min(intra.bandwidth_bytes_per_s, fewest * inter.bandwidth_bytes_per_s), inter.latency_s


@cache
def device_groups(axes: tuple[str, ...], mesh: Mesh) -> tuple[tuple[int, ...], ...]:
    """Device positions that differ only along `axes`, one tuple a group; devices lie row-major."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for device in range(mesh.device_count):
        rest, position = [], device
        for axis in reversed(mesh.axes):
            position, coordinate = divmod(position, axis.size)
            if axis.name not in axes:
                rest.append(coordinate)
        groups.setdefault(tuple(rest), []).append(device)
    return tuple(tuple(group) for group in groups.values())
