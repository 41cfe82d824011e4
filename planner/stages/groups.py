"""Groups of devices for the stages of a pipeline: whole nodes in a row, or equal parts of nodes; the nodes of one group
are alike."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import log

from shardwright.cluster import Cluster, ClusterNode

#: Part of the devices that may be left over where their number does not suit the stages.
MOST_IDLE = 0.1

#: Numbers of stages that are looked at.
MOST_GROUPINGS = 8


@dataclass(frozen=True, kw_only=True)
class DeviceGroups:
    """One group a stage, in the order of the cluster's devices.

    first_devices: where each begins. nodes: per group, devices that it has on each of its nodes.
    """

    cluster: Cluster
    first_devices: tuple[int, ...]
    nodes: tuple[tuple[int, ...], ...]

    @cached_property
    def kinds(self) -> tuple[tuple[int, ...], ...]:
        """The different groups; a stage's kind is its place here."""
        return tuple(dict.fromkeys(self.nodes))

    def kind(self, stage: int) -> int:
        return self.kinds.index(self.nodes[stage])

    @property
    def stages(self) -> int:
        return len(self.nodes)

    @property
    def devices(self) -> int:
        return sum(map(sum, self.nodes))

    def part(self, kind: int) -> Cluster:
        """A cluster of the devices of one group of a kind."""
        stage = self.nodes.index(self.kinds[kind])
        made: list[ClusterNode] = []
        first = self.first_devices[stage]
        for node in self.cluster.workers:
            if first < node.device_count and len(made) < len(self.nodes[stage]):
                made.append(replace(node, device_count=self.nodes[stage][len(made)], gpu_ids=()))
                first = 0
            else:
                first -= node.device_count
        return replace(self.cluster, nodes=tuple(made))

    def shares_node(self, stage: int, other: int) -> bool:
        """Whether what goes between two groups stays inside a node."""
        owners = [number for number, node in enumerate(self.cluster.workers) for _ in range(node.device_count)]

        def node_of(group: int) -> set[int]:
            first = self.first_devices[group]
            return set(owners[first : first + sum(self.nodes[group])])

        return node_of(stage) == node_of(other) and len(node_of(stage)) == 1


def device_groups(cluster: Cluster, stages: int, *, nodes_each: int | None = None) -> DeviceGroups | None:
    """The cluster's devices as `stages` groups, or None where they cannot be: nodes are neither divided evenly nor put
    together in rows of one kind. nodes_each: nodes of every group, the last ones of the cluster being left alone."""
    counts = [node.device_count for node in cluster.workers]
    if stages <= len(counts):
        size, more = (nodes_each, 0) if nodes_each else divmod(len(counts), stages)
        groups, first = [], 0
        for stage in range(stages):
            count = size + (stage < more)
            groups.append(tuple(counts[first : first + count]))
            first += count
        if any(len(set(group)) != 1 for group in groups) or first > len(counts):
            return None
    else:
        each, rest = divmod(stages, len(counts))
        if rest or any(count % each for count in counts):
            return None
        groups = [(count // each,) for count in counts for _ in range(each)]
    starts, device = [], 0
    for group in groups:
        starts.append(device)
        device += sum(group)
    return DeviceGroups(cluster=cluster, first_devices=tuple(starts), nodes=tuple(groups))


def groupings(cluster: Cluster, most: int, batch: int) -> tuple[DeviceGroups, ...]:
    """Groups for 2 to `most` stages that are worth a look.

    Where all nodes are alike, all groups are: of so many nodes that no more than a part `MOST_IDLE` of the cluster is
    left over and their number divides the batch, where anything is left of that. Of many numbers of stages a few are
    taken, from few to many.
    """
    counts = [node.device_count for node in cluster.workers]
    found, dividing = [], []
    for stages in range(2, min(most, cluster.device_count) + 1):
        if len(set(counts)) > 1 or stages > len(counts):
            size, groups = 1, device_groups(cluster, stages)
        else:
            fitting = [n for n in range(1, len(counts) // stages + 1) if n * stages >= (1 - MOST_IDLE) * len(counts)]
            size = max(fitting, key=lambda n: (batch % n == 0, n), default=0)
            groups = device_groups(cluster, stages, nodes_each=size) if size else None
        if groups is not None:
            found.append(groups)
            dividing += [groups] if batch % size == 0 else []
    return _few(dividing or found)


def _few(found: list[DeviceGroups]) -> tuple[DeviceGroups, ...]:
    """At most `MOST_GROUPINGS`: in each range of numbers of stages the one that uses most devices, then most stages."""
    if len(found) <= MOST_GROUPINGS:
        return tuple(found)
    low, high = log(found[0].stages), log(found[-1].stages + 1)
    best: dict[int, DeviceGroups] = {}
    for groups in found:
        place = int(MOST_GROUPINGS * (log(groups.stages) - low) / (high - low))
        if place not in best or groups.devices >= best[place].devices:
            best[place] = groups
    return tuple(best.values())
