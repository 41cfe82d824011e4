"""Groups of devices, one per stage: whole neighbouring nodes, or equal parts of nodes; a group's nodes are equal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from math import log
from typing import NamedTuple

from shardwright.clusters.cluster import Cluster, ClusterNode
from shardwright.cost import Topology, hardware_profile
from shardwright.cost.profiles import Link
from shardwright.planner.stages.tuning import MAX_GROUPINGS, MAX_IDLE

#: Measure of devices' speed: the products of large models.
_PRODUCTS = "bf16"


class GroupKind(NamedTuple):
    """The properties shared by groups with equal plan times: their devices, node by node."""

    hardware: str
    memory_bytes: int | None
    nodes: tuple[int, ...]

    @property
    def devices(self) -> int:
        return sum(self.nodes)


@dataclass(frozen=True, kw_only=True)
class DeviceGroups:
    """One group a stage, in the order of the cluster's devices.

    first_devices: first device of each group. nodes: per group, its devices on each of its nodes.
    """

    cluster: Cluster
    first_devices: tuple[int, ...]
    nodes: tuple[tuple[int, ...], ...]

    @cached_property
    def parts(self) -> tuple[Cluster, ...]:
        """The cluster of each group's devices."""
        pairs = zip(self.first_devices, self.nodes, strict=True)
        return tuple(self.cluster.part(first, sum(nodes)) for first, nodes in pairs)

    @cached_property
    def _kind_of(self) -> tuple[GroupKind, ...]:
        pairs = zip(self.parts, self.nodes, strict=True)
        return tuple(GroupKind(part.hardware, part.memory_bytes_per_device, nodes) for part, nodes in pairs)

    @cached_property
    def kinds(self) -> tuple[GroupKind, ...]:
        """The different groups; a stage's kind is its index here."""
        return tuple(dict.fromkeys(self._kind_of))

    def kind(self, stage: int) -> int:
        return self.kinds.index(self._kind_of[stage])

    @property
    def stages(self) -> int:
        return len(self.nodes)

    @property
    def devices(self) -> int:
        return sum(map(sum, self.nodes))

    def part(self, kind: int) -> Cluster:
        """A cluster of the devices of one group of a kind."""
        return self.parts[self._kind_of.index(self.kinds[kind])]

    def link(self, stage: int, other: int) -> Link:
        """The link of one device of a group to those of another."""
        return link_between(self.parts[stage], self.parts[other])


def link_between(one: Cluster, other: Cluster) -> Link:
    """The link of one device of a part of a cluster to those of another part: the slower of the two."""
    links = []
    for part in (one, other):
        topology = Topology.of(part, hardware_profile(part.hardware))
        indices = {node.index for cluster in (one, other) for node in cluster.nodes}
        links.append(topology.intra_node if len(indices) == 1 else topology.inter_node)
    return Link(
        bandwidth_bytes_per_s=min(link.bandwidth_bytes_per_s for link in links),
        latency_s=max(link.latency_s for link in links),
    )


def device_groups(cluster: Cluster, stages: int, *, nodes_each: int | None = None) -> DeviceGroups | None:
    """The cluster's devices in `stages` groups; None: nodes divide neither evenly nor into rows of one kind.

    nodes_each: nodes of every group; the cluster's last ones stay unused. Without it, rows of equal nodes get stages in
    proportion to their share of the cluster's speed: stages of similar speed.
    """
    nodes = cluster.workers
    if nodes_each:
        groups = [(node.device_count,) * nodes_each for node in nodes[: stages * nodes_each : nodes_each]]
    else:
        rows = [list(row) for _, row in groupby(nodes, key=lambda node: _node_kind(cluster, node))]
        counts = _stages_of(cluster, rows, stages)
        if counts is None:
            return None
        groups = [group for row, count in zip(rows, counts, strict=True) for group in _divide_row(row, count)]
    starts, device = [], 0
    for group in groups:
        starts.append(device)
        device += sum(group)
    return DeviceGroups(cluster=cluster, first_devices=tuple(starts), nodes=tuple(groups))


def _node_kind(cluster: Cluster, node: ClusterNode) -> tuple[object, ...]:
    return node.device_count, node.hardware or cluster.hardware, node.memory_bytes


def _divide_row(row: Sequence[ClusterNode], stages: int) -> Iterator[tuple[int, ...]]:
    """Equal nodes divided into the groups of `stages` stages."""
    devices = row[0].device_count
    if stages > len(row):
        parts = stages // len(row)
        yield from [(devices // parts,)] * stages
        return
    size, more = divmod(len(row), stages)
    yield from ((devices,) * (size + (stage < more)) for stage in range(stages))


def _stages_of(cluster: Cluster, rows: Sequence[Sequence[ClusterNode]], stages: int) -> list[int] | None:
    """Stages per row of equal nodes, with the least differences in speed; None: impossible."""
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for row in rows:
        devices, node = row[0].device_count, row[0]
        speed = len(row) * devices * hardware_profile(node.hardware or cluster.hardware).matmul_flops_per_s(_PRODUCTS)
        inside = [len(row) * parts for parts in range(2, devices + 1) if devices % parts == 0]
        extended: dict[int, tuple[float, list[int]]] = {}
        for used, (uneven, counts) in best.items():
            for count in (*range(1, len(row) + 1), *inside):
                total = uneven + speed**2 / count  # the sum of squares is least where all are equal
                if used + count <= stages and total < extended.get(used + count, (float("inf"),))[0]:
                    extended[used + count] = total, [*counts, count]
        best = extended
    return best[stages][1] if stages in best else None


def enumerate_groupings(cluster: Cluster, most: int, batch: int) -> tuple[DeviceGroups, ...]:
    """Candidate groups for 2 to `most` stages.

    If all nodes are equal, all groups are: they leave at most a fraction `MAX_IDLE` of the cluster idle. Numbers of
    nodes that divide the batch are preferred. Of many numbers of stages a few are selected, in increasing order.
    """
    counts = [node.device_count for node in cluster.workers]
    is_uniform = len({_node_kind(cluster, node) for node in cluster.workers}) == 1
    groupings, dividing = [], []
    for stages in range(2, min(most, cluster.device_count) + 1):
        if not is_uniform or stages > len(counts):
            size, groups = 1, device_groups(cluster, stages)
        else:
            fitting = [n for n in range(1, len(counts) // stages + 1) if n * stages >= (1 - MAX_IDLE) * len(counts)]
            size = max(fitting, key=lambda n: (batch % n == 0, n), default=0)
            groups = device_groups(cluster, stages, nodes_each=size) if size else None
        if groups is not None:
            groupings.append(groups)
            dividing += [groups] if batch % size == 0 else []
    return _select_few(dividing or groupings)


def _select_few(groupings: list[DeviceGroups]) -> tuple[DeviceGroups, ...]:
    """At most `MAX_GROUPINGS`: per range of numbers of stages the one with most devices, then most stages."""
    if len(groupings) <= MAX_GROUPINGS:
        return tuple(groupings)
    low, high = log(groupings[0].stages), log(groupings[-1].stages + 1)
    best: dict[int, DeviceGroups] = {}
    for groups in groupings:
        place = int(MAX_GROUPINGS * (log(groups.stages) - low) / (high - low))
        if place not in best or groups.devices >= best[place].devices:
            best[place] = groups
    return tuple(best.values())
