"""AutoDist's resource_spec.yml, read into a cluster.

    nodes:
      - address: 10.0.0.1
        gpus: [0, 1]
        chief: true
        network_bandwidth: 100
      - address: 10.0.0.2
        gpus: [0, 1]
        ssh_config: workers
    ssh:
      workers: {username: me, key_file: ~/.ssh/id_rsa, port: 22}

The chief is the master, task 0; `network_bandwidth` is in Gbit/s of a node, shared by its devices. How nodes are
reached by SSH is checked and left to whoever starts processes there: a cluster holds no accounts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from shardwright.clusters.cluster import DEFAULT_HARDWARE, Cluster, ClusterNode, is_loopback
from shardwright.clusters.cluster_file import check_host, read_text
from shardwright.clusters.links import Link
from shardwright.clusters.yaml_text import Path as Place
from shardwright.clusters.yaml_text import YamlText, load_yaml
from shardwright.errors import ClusterConfigError
from shardwright.json_reader import JsonProblem
from shardwright.spelling import did_you_mean

#: The control port of nodes, which AutoDist's file does not have.
DEFAULT_PORT = 2222

_NODE_KEYS = ("address", "cpus", "gpus", "chief", "ssh_config", "network_bandwidth")
_SSH_KEYS = ("username", "key_file", "port", "python_venv", "shared_envs")


def resource_spec(path: str | os.PathLike[str], *, port: int = DEFAULT_PORT, hardware: str | None = None) -> Cluster:
    """The cluster that an AutoDist resource_spec.yml describes.

    A chief without GPUs, where other nodes have some, only coordinates. A node without GPUs and `cpus` has one CPU
    device. Bandwidth is the slowest node's.

    port: control port of every node. hardware: profile of the devices; default: "a100" for GPUs, "cpu" else.
    Raises ClusterConfigError with file, line, problem and remedy.
    """
    source = Path(path)
    spec = _Spec(str(source), read_text(source))
    nodes = spec.nodes()
    platform = "cuda" if any(node.gpus for node in nodes) else "cpu"
    if platform == "cuda":
        spec.check_gpus(nodes)
    ordered = sorted(nodes, key=lambda node: not node.is_chief)
    return Cluster(
        name=source.stem,
        platform=platform,
        hardware=hardware or DEFAULT_HARDWARE[platform],
        nodes=tuple(
            ClusterNode(
                index=index,
                ip=node.address,
                port=port if len(ordered) > 1 or not is_loopback(node.address) else 0,
                device_count=node.device_count(platform),
                gpu_ids=node.gpus,
            )
            for index, node in enumerate(ordered)
        ),
        inter_node=_inter_node(nodes, platform),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    """An entry of `nodes`; bandwidth in Gbit/s, None: not given."""

    place: Place
    address: str
    gpus: tuple[int, ...]
    cpus: tuple[int, ...]
    is_chief: bool
    bandwidth: float | None

    def device_count(self, platform: str) -> int:
        return len(self.gpus) if platform == "cuda" else len(self.cpus) or 1


def _inter_node(nodes: list[_Node], platform: str) -> Link | None:
    """One device's link to other nodes; None, where no node says its bandwidth, is the hardware profile's."""
    links = [
        node.bandwidth * 1e9 / 8 / node.device_count(platform)
        for node in nodes
        if node.bandwidth is not None and node.device_count(platform)
    ]
    return Link(bandwidth_bytes_per_s=min(links), latency_s=None) if links else None


class _Spec:
    """The file's data, each part checked; problems name the line."""

    def __init__(self, source: str, text: str) -> None:
        self._source = source
        try:
            self._text: YamlText = load_yaml(text)
        except JsonProblem as problem:
            where = f"{source}:{problem.line}:{problem.column}" if problem.line else source
            raise ClusterConfigError(
                f"not valid YAML: {problem.message}", where=where, remedy="mend the YAML there"
            ) from None

    def nodes(self) -> list[_Node]:
        """The nodes in the file's order, exactly one of them the chief."""
        data = self._mapping((), self._text.data, ("nodes", "ssh"))
        groups = self._ssh_groups(data.get("ssh"))
        rows = data.get("nodes")
        if not isinstance(rows, list) or not rows:
            self._fail(("nodes",), "nodes is no list of nodes", "write nodes: and a line `- address: …` for each")
        nodes = [self._node(("nodes", number), row, groups, len(rows)) for number, row in enumerate(rows)]
        chiefs = [node for node in nodes if node.is_chief]
        if not chiefs:
            self._fail(("nodes",), "no node is the chief", "write `chief: true` at the one that coordinates")
        if len(chiefs) > 1:
            self._fail((*chiefs[1].place, "chief"), "two nodes are the chief", "leave chief: true at one of them")
        seen: dict[str, Place] = {}
        for node in nodes:
            if node.address in seen:
                line = self._text.line(seen[node.address])
                self._fail(
                    (*node.place, "address"), f"{node.address} stands in line {line} already", "list a node once"
                )
            seen[node.address] = node.place
        return nodes

    def check_gpus(self, nodes: list[_Node]) -> None:
        """Refuses nodes beside GPUs that have none: there are no parameter servers on CPUs."""
        for node in nodes:
            if not node.gpus and not node.is_chief:
                self._fail(
                    node.place,
                    f"{node.address} has no gpus, and other nodes have",
                    "leave it out: the GPUs share the variables' state (shardwright.strategies.PS), no host serves it",
                )

    def _node(self, place: Place, row: Any, groups: Mapping[str, Any], count: int) -> _Node:
        node = self._mapping(place, row, _NODE_KEYS)
        address = node.get("address")
        if not isinstance(address, str):
            self._fail((*place, "address"), "a node without an address", "add `address: 10.0.0.1`")
        try:
            check_host(address, self._source, "address")
        except ClusterConfigError as error:
            self._fail((*place, "address"), error.message, error.remedy)
        if count > 1 and is_loopback(address):
            self._fail(
                (*place, "address"), f"{address} cannot be reached from the other nodes", "give its network address"
            )
        chief = node.get("chief", False)
        if not isinstance(chief, bool):
            self._fail((*place, "chief"), f"chief is {chief!r}", "write true or false")
        group = node.get("ssh_config")
        if group is not None and group not in groups:
            remedy = did_you_mean(str(group), groups) or "add it under ssh:, or correct the name"
            self._fail((*place, "ssh_config"), f"there is no SSH group {group!r}", remedy)
        return _Node(
            place=place,
            address=address,
            gpus=self._devices((*place, "gpus"), node.get("gpus")),
            cpus=self._devices((*place, "cpus"), node.get("cpus")),
            is_chief=chief or count == 1,
            bandwidth=self._bandwidth((*place, "network_bandwidth"), node.get("network_bandwidth")),
        )

    def _devices(self, place: Place, numbers: Any) -> tuple[int, ...]:
        if numbers is None:
            return ()
        if not isinstance(numbers, list) or any(type(number) is not int or number < 0 for number in numbers):
            self._fail(place, f"{place[-1]} is {numbers!r}", f"write numbers, such as `{place[-1]}: [0, 1]`")
        if len(set(numbers)) < len(numbers):
            self._fail(place, f"a number stands twice in {place[-1]}", "list each device once")
        return tuple(numbers)

    def _bandwidth(self, place: Place, gbit: Any) -> float | None:
        if gbit is None:
            return None
        if isinstance(gbit, bool) or not isinstance(gbit, int | float) or gbit <= 0:
            self._fail(place, f"network_bandwidth is {gbit!r}", "write Gbit/s, more than 0")
        return float(gbit)

    def _ssh_groups(self, groups: Any) -> Mapping[str, Any]:
        if groups is None:
            return {}
        if not isinstance(groups, dict):
            self._fail(("ssh",), "ssh is no mapping of groups", "write `ssh:` and a group's name with its settings")
        for name, group in groups.items():
            self._mapping(("ssh", name), group, _SSH_KEYS)
        return groups

    def _mapping(self, place: Place, data: Any, keys: tuple[str, ...]) -> dict[str, Any]:
        if not isinstance(data, dict):
            self._fail(place, f"expected a mapping, found {data!r}", f"write keys such as `{keys[0]}:`")
        for key in data:
            if key not in keys:
                remedy = did_you_mean(key, keys) or f"known here: {', '.join(keys)}"
                self._fail((*place, key), f"unknown key {key!r}", remedy)
        return data

    def _fail(self, place: Place, message: str, remedy: str) -> NoReturn:
        raise ClusterConfigError(message, where=f"{self._source}:{self._text.line(place)}", remedy=remedy)
