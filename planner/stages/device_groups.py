"""Groups of devices for the stages of a pipeline: whole nodes in a row, or equal parts of nodes; the nodes of one group
are alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from math import log
from typing import NamedTuple

from shardwright.cluster import Cluster, ClusterNode
from shardwright.cost import Topology, hardware_profile
from shardwright.cost.profiles import Link

#: Part of the devices that may be left over where their number does not suit the stages.
MAX_IDLE = 0.1

#: Numbers of stages that are looked at.
MAX_GROUPINGS = 8

#: What devices are compared by: the products of large models.
_PRODUCTS = "bf16"


class GroupKind(NamedTuple):
    """What groups have in common that a plan takes as long on: their devices, node by node."""

    hardware: str
    memory_bytes: int | None
    nodes: tuple[int, ...]

    @property
    def devices(self) -> int:
        return sum(self.nodes)


@dataclass(frozen=True, kw_only=True)
class DeviceGroups:
    """One group a stage, in the order of the cluster's devices.

    first_devices: where each begins. nodes: per group, devices that it has on each of its nodes.
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
        """The different groups; a stage's kind is its place here."""
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
        """What one device of a group has to those of another."""
        return link_between(self.parts[stage], self.parts[other])


def link_between(one: Cluster, other: Cluster) -> Link:
    """What one device of a part of a cluster has to those of another part: the slower of both where they differ."""
    found = []
    for part in (one, other):
        topology = Topology.of(part, hardware_profile(part.hardware))
        indices = {node.index for cluster in (one, other) for node in cluster.nodes}
        found.append(topology.intra_node if len(indices) == 1 else topology.inter_node)
    return Link(
        bandwidth_bytes_per_s=min(link.bandwidth_bytes_per_s for link in found),
        latency_s=max(link.latency_s for link in found),
    )


def device_groups(cluster: Cluster, stages: int, *, nodes_each: int | None = None) -> DeviceGroups | None:
    """The cluster's devices as `stages` groups, or None where they cannot be: nodes are neither divided evenly nor put
    together in rows of one kind.

    nodes_each: nodes of every group, the last ones of the cluster being left alone. Without it, nodes in a row that are
    alike get as many stages as their part of the cluster's speed asks for, so that stages are alike.
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
    """Nodes that are alike, as the groups of so many stages."""
    each = row[0].device_count
    if stages > len(row):
        parts = stages // len(row)
        yield from [(each // parts,)] * stages
        return
    size, more = divmod(len(row), stages)
    yield from ((each,) * (size + (stage < more)) for stage in range(stages))


def _stages_of(cluster: Cluster, rows: Sequence[Sequence[ClusterNode]], stages: int) -> list[int] | None:
    """How many stages each row of like nodes gets, so that their speeds differ least; None where it cannot be."""
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for row in rows:
        each, node = row[0].device_count, row[0]
        speed = len(row) * each * hardware_profile(node.hardware or cluster.hardware).matmul_flops_per_s(_PRODUCTS)
        inside = [len(row) * parts for parts in range(2, each + 1) if each % parts == 0]
        found: dict[int, tuple[float, list[int]]] = {}
        for taken, (uneven, counts) in best.items():
            for count in (*range(1, len(row) + 1), *inside):
                total = uneven + speed**2 / count  # the sum of squares is least where all are equal
                if taken + count <= stages and total < found.get(taken + count, (float("inf"),))[0]:
                    found[taken + count] = total, [*counts, count]
        best = found
    return best[stages][1] if stages in best else None


def enumerate_groupings(cluster: Cluster, most: int, batch: int) -> tuple[DeviceGroups, ...]:
    """Groups for 2 to `most` stages that are worth a look.

    Where all nodes are alike, all groups are: of so many nodes that no more than a part `MAX_IDLE` of the cluster is
    left over and their number divides the batch, where anything is left of that. Of many numbers of stages a few are
    taken, from few to many.
    """
    counts = [node.device_count for node in cluster.workers]
    is_uniform = len({_node_kind(cluster, node) for node in cluster.workers}) == 1
    found, dividing = [], []
    for stages in range(2, min(most, cluster.device_count) + 1):
        if not is_uniform or stages > len(counts):
            size, groups = 1, device_groups(cluster, stages)
        else:
            fitting = [n for n in range(1, len(counts) // stages + 1) if n * stages >= (1 - MAX_IDLE) * len(counts)]
            size = max(fitting, key=lambda n: (batch % n == 0, n), default=0)
            groups = device_groups(cluster, stages, nodes_each=size) if size else None
        if groups is not None:
            found.append(groups)
            dividing += [groups] if batch % size == 0 else []
    return _select_few(dividing or found)


def _select_few(found: list[DeviceGroups]) -> tuple[DeviceGroups, ...]:
    """At most `MAX_GROUPINGS`: in each range of numbers of stages the one that uses most devices, then most stages."""
    if len(found) <= MAX_GROUPINGS:
        return tuple(found)
    low, high = log(found[0].stages), log(found[-1].stages + 1)
    best: dict[int, DeviceGroups] = {}
    for groups in found:
        place = int(MAX_GROUPINGS * (log(groups.stages) - low) / (high - low))
        if place not in best or groups.devices >= best[place].devices:
            best[place] = groups
    return tuple(best.values())
