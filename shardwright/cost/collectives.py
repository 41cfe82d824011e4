"""Seconds and wire bytes of collectives: latency per step plus bytes over the links an axis crosses.

Ring algorithms over n devices (Thakur, Rabenseifner, Gropp, "Optimization of
Collective Communication Operations in MPICH", 2005): all-gather and
reduce-scatter send (n-1)/n of the whole array in n-1 steps, an all-reduce is
one of each. An all-to-all sends (n-1)/n of a device's own shard, a permute all
of it.

Groups that lie across nodes, as NCCL runs them (src/graph/tuning.cc, src/graph/rings.cc):

- A ring enters and leaves each node once. Every member has a link of its own to other nodes, and as many rings run
  side by side as the smallest node has members; each carries its part. So a node sends at the pace of all
  its members' links together, but no member faster than inside the node.
- Of a ring's n-1 rounds, one less than there are nodes wait for a link between nodes, the others for one inside. An
  all-reduce of few bytes goes up and down a tree over nodes instead: whichever waits less.
- All-to-alls and permutes go straight to their receiver: what leaves the node goes over the sender's own link.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache
from math import ceil, log2
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
    overlap: part of the time of gradient synchronisation that runs beside compute.
    """

    devices_per_node: tuple[int, ...]
    intra_node: Link
    inter_node: Link
    efficiency: float
    reduce_scatter_runs_as: str = "reduce-scatter"
    latency_counts: str = "ring-steps"
    overlap: float = 0.0

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
            overlap=profile.overlap if cluster.overlap is None else cluster.overlap,
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
    return max(
        _latency_s(kind, n, spread, topology) + _transfer_s(kind, payload_bytes, n, spread, topology)
        for spread in _spreads(axes, mesh, topology.devices_per_node)
    )


#: Members of one group per node, the most first.
Spread = tuple[int, ...]


def _latency_s(kind: str, n: int, spread: Spread, topology: Topology) -> float:
    inside_s, between_s = topology.intra_node.latency_s, topology.inter_node.latency_s
    nodes = len(spread)
    if topology.latency_counts == "members":
        return n * (inside_s if nodes == 1 else between_s)
    if kind == "collective-permute":
        return inside_s if nodes == 1 else between_s
    if kind == "all-to-all":
        alone = max(0, n - min(spread)) if nodes > 1 else 0  # a group of fewer than the axes have may lie inside
        return (n - 1 - alone) * inside_s + alone * between_s
    rounds_s = max(0, n - nodes) * inside_s + (nodes - 1) * between_s
    if kind != "all-reduce":
        return rounds_s
    tree_s = (max(spread) - 1) * inside_s + ceil(log2(nodes)) * between_s
    return 2 * (rounds_s if nodes == 1 else min(rounds_s, tree_s))


def _transfer_s(kind: str, payload_bytes: int, n: int, spread: Spread, topology: Topology) -> float:
    inside = topology.intra_node.bandwidth_bytes_per_s * topology.efficiency
    between = topology.inter_node.bandwidth_bytes_per_s * topology.efficiency
    sent = wire_bytes(kind, payload_bytes, n)
    if len(spread) == 1:
        return sent / inside
    if kind == "collective-permute":
        return sent / min(inside, between)
    if kind == "all-to-all":
        most_between, most_inside = max(0, n - min(spread)), min(n, max(spread)) - 1
        return payload_bytes / n * max(most_between / between, most_inside / inside)
    return sent / min(inside, min(spread) * between)


@cache
def _spreads(axes: tuple[str, ...], mesh: Mesh, devices_per_node: tuple[int, ...]) -> tuple[Spread, ...]:
    """How the groups over `axes` lie in nodes, each way once; devices beyond the last node count as one more."""
    node_of = [node for node, count in enumerate(devices_per_node) for _ in range(count)]
    found: dict[Spread, None] = {}
    for group in device_groups(axes, mesh):
        members = Counter(node_of[device] if device < len(node_of) else -1 for device in group)
        found[tuple(sorted(members.values(), reverse=True))] = None
    return tuple(found)


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
