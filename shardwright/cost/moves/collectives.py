"""Seconds and wire bytes of collectives: latency per step plus bytes over the links crossed by a group of devices.

Ring algorithms over n devices (Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in
MPICH", 2005): all-gather and reduce-scatter send (n-1)/n of the whole array in n-1 steps, an all-reduce is one of each.
An all-to-all sends (n-1)/n of a device's own shard, a permute all of it.

Groups across nodes follow NCCL (src/graph/tuning.cc, src/graph/rings.cc):

- A ring enters and leaves each node once. Every member has its own link to other nodes; the number of parallel rings
  equals the members of the smallest node, and each ring carries its part. A node's rate is the sum over its members'
  links, capped per member at the rate inside the node.
- Of a ring's n-1 rounds, nodes-1 wait on a link between nodes, the others on one inside. A small all-reduce goes up and
  down a tree over nodes instead: the algorithm with less latency wins.
- All-to-alls and permutes go straight to their receiver: traffic leaving the node uses the sender's own link.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2
from typing import TYPE_CHECKING

from shardwright.cost.moves.device_groups import Spread, node_spreads
from shardwright.cost.moves.tilings import AtomOrder, along, count
from shardwright.cost.profiles import HardwareProfile, Link
from shardwright.errors import InternalError
from shardwright.plans.shardings import Mesh

if TYPE_CHECKING:
    from shardwright.clusters.cluster import Cluster
    from shardwright.clusters.links import Link as ClusterLink


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Placement of devices on nodes, and the links inside and between nodes.

    devices_per_node: devices of each node, in the mesh's device order.
    intra_node / inter_node: link of ONE device inside its node / to other nodes.
    efficiency: part of a link's bandwidth attained by collectives.
    reduce_scatter_runs_as: the kind that gives a reduce-scatter its time (see `HardwareProfile`).
    latency_counts: the unit of a collective's latency (see `HardwareProfile`).
    combiner_limits: the compiler's maximum of combined bytes per kind (see `HardwareProfile`).
    overlap: part of gradient synchronization time hidden behind compute.
    """

    devices_per_node: tuple[int, ...]
    intra_node: Link
    inter_node: Link
    efficiency: float
    reduce_scatter_runs_as: str = "reduce-scatter"
    latency_counts: str = "ring-steps"
    combiner_limits: tuple[tuple[str, int], ...] = ()
    overlap: float = 0.0

    @classmethod
    def of(cls, cluster: Cluster, profile: HardwareProfile) -> Topology:
        """The cluster's nodes with its own link speeds; the profile's by default."""
        return cls(
            devices_per_node=tuple(node.device_count for node in cluster.nodes if node.device_count),
            intra_node=_link(cluster.intra_node, profile.intra_node),
            inter_node=_link(cluster.inter_node, profile.inter_node),
            efficiency=profile.collective_efficiency,
            reduce_scatter_runs_as=profile.reduce_scatter_runs_as,
            latency_counts=profile.latency_counts,
            combiner_limits=profile.combiner_limits,
            overlap=profile.overlap if cluster.overlap is None else cluster.overlap,
        )

    def max_combined_bytes(self, kind: str, group_size: int) -> int:
        """The maximum combined payload in bytes of a kind of collective over a number of devices; 0 without combining.

        Compilers count the bytes of results; a reduce-scatter's is one part of its payload.
        """
        most_bytes = dict(self.combiner_limits).get(kind, 0)
        return most_bytes * group_size if kind == "reduce-scatter" else most_bytes


def _link(named: ClusterLink | None, default: Link) -> Link:
    if named is None:
        return default
    latency_s = default.latency_s if named.latency_s is None else named.latency_s
    return Link(bandwidth_bytes_per_s=named.bandwidth_bytes_per_s, latency_s=latency_s)


def wire_bytes(kind: str, payload_bytes: int, group_size: int) -> int:
    """Bytes one device puts on the wire in one collective of `group_size` devices.

    payload_bytes: the larger of the collective's operand and result on one device: the whole array of an all-reduce,
        all-gather or reduce-scatter, one shard of an all-to-all or permute.
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


def collective_time_s(kind: str, payload_bytes: int, axes: tuple[str, ...], mesh: Mesh, topology: Topology) -> float:
    """Seconds of one collective over all of the named mesh axes, all its groups running side by side.

    payload_bytes: see `wire_bytes`.
    """
    return group_time_s(kind, payload_bytes, along(axes, mesh), mesh, topology)


def group_time_s(
    kind: str, payload_bytes: int, atoms: AtomOrder, mesh: Mesh, topology: Topology, share: float = 1.0
) -> float:
    """Seconds of one collective with groups over `atoms`, possibly parts of axes.

    share: its fraction of one latency, the rest paid by collectives combined with it.
    """
    n = count(atoms)
    if n <= 1:
        return 0.0
    kind = topology.reduce_scatter_runs_as if kind == "reduce-scatter" else kind
    return max(
        share * _latency_s(kind, n, spread, topology) + _transfer_s(kind, payload_bytes, n, spread, topology)
        for spread in node_spreads(atoms, mesh, topology.devices_per_node)
    )


def latency_share(kind: str, payload_bytes: int, atoms: AtomOrder, topology: Topology, combinable_bytes: int) -> float:
    """The fraction of one latency paid by a collective combined with others: its share of their bytes.

    combinable_bytes: payload of all collectives eligible to combine with it, itself included; 0: none. With a limit of
        L bytes, P bytes take at least P / min(L, P) latencies: shares of payload / min(L, P) are a lower bound.
    """
    most_bytes = topology.max_combined_bytes(kind, count(atoms))
    if not (most_bytes and combinable_bytes):
        return 1.0
    return min(1.0, payload_bytes / min(most_bytes, combinable_bytes))


def _latency_s(kind: str, n: int, spread: Spread, topology: Topology) -> float:
    inside_s, between_s = topology.intra_node.latency_s, topology.inter_node.latency_s
    nodes = len(spread)
    if topology.latency_counts == "members":
        return n * (inside_s if nodes == 1 else between_s)
    if kind == "collective-permute":
        return inside_s if nodes == 1 else between_s
    if kind == "all-to-all":
        beyond = n - min(spread)
        return (n - 1 - beyond) * inside_s + beyond * between_s
    rounds_s = (n - nodes) * inside_s + (nodes - 1) * between_s
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
        most_between, most_inside = n - min(spread), max(spread) - 1
        return payload_bytes / n * max(most_between / between, most_inside / inside)
    return sent / min(inside, min(spread) * between)
