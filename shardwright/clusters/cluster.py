"""A cluster: which machines take part, their devices, and the links between them.

How it is written and read: `cluster_file.py`. Task 0 is the master and a worker too, unless it only coordinates.

Units: bytes, seconds. No JAX here: a cluster is described without being touched.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from shardwright.clusters.links import Link
from shardwright.errors import ClusterConfigError

PLATFORMS = ("cpu", "cuda", "tpu")

#: Devices of one node at most, as `cluster.schema.json` has it.
MAX_CLUSTER_DEVICES = 4096

#: Hardware profile of a platform where the file names none.
DEFAULT_HARDWARE = {"cpu": "cpu", "cuda": "a100", "tpu": "tpu-v5e"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """What protects a cluster's ports: PEM files of this node, and the authority that signed them.

    tokens_file: the tokens that people have, see `access_tokens.py`. local_token: where this user's own is, of a
    cluster on loopback, see `local_token.py`.
    """

    certificate: Path | None = None
    key: Path | None = None
    ca: Path | None = None
    tokens_file: Path | None = None
    local_token: Path | None = None

    @property
    def has_tls(self) -> bool:
        return self.certificate is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNode:
    """One machine: task `index` (0 is the master) and the devices it contributes.

    port: the control port; 0 in an embedded cluster means "any free one".
    data_port: the port that arrays travel through; None means "any free one".
    device_count: 0 for a master that only coordinates.
    hardware, memory_bytes (of one device): "" and None mean the cluster's.
    """

    index: int
    ip: str
    port: int
    data_port: int | None = None
    device_count: int
    gpu_ids: tuple[int, ...] = ()
    hardware: str = ""
    memory_bytes: int | None = None

    @property
    def address(self) -> str:
        """`ip:port`, an IPv6 address in brackets."""
        return join_address(self.ip, self.port)

    @property
    def is_loopback(self) -> bool:
        return is_loopback(self.ip)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A validated cluster; devices are numbered node by node, in task order.

    hardware: the profile of its devices; of nodes that differ all of theirs, `a100+h100`: what a program on all of them
    finds is the slower of each.
    memory_bytes_per_device, host_memory_bytes_per_device (a device's share of its host's), intra_node, inter_node: None
    means the hardware profile's. overlap: part of the time of
    gradient synchronisation that runs beside compute; None likewise. dataset_modules: Python modules and packages whose
    functions sessions may read batches from.
    min_nodes, max_nodes: of an elastic cluster, which goes on with some of its workers; None: it needs all of them, and
    takes all of them.
    """

    name: str
    nodes: tuple[ClusterNode, ...]
    platform: str = "cpu"
    hardware: str = "cpu"
    memory_bytes_per_device: int | None = None
    host_memory_bytes_per_device: int | None = None
    intra_node: Link | None = None
    inter_node: Link | None = None
    overlap: float | None = None
    security: Security | None = None
    insecure: bool = False
    token: str | None = field(default=None, repr=False)
    min_nodes: int | None = None
    max_nodes: int | None = None
    dataset_modules: tuple[str, ...] = ()

    @classmethod
    def load(cls, path: str | Path, *, for_planning: bool = False) -> Cluster:
        """Read a cluster file, JSON or (`.yml`, `.yaml`) YAML.

        Raises ClusterConfigError with file, field, problem and remedy in one line.

        for_planning: read no secrets; plans are made on machines that have none.
        """
        from shardwright.clusters.cluster_file import check_own_secrecy, read_text

        path = Path(path)
        text = read_text(path)
        cluster = cls.from_json(text, source=str(path), directory=path.parent, for_planning=for_planning)
        if cluster.token is not None:
            check_own_secrecy(path, text)
        return cluster

    @classmethod
    def from_json(
        cls, text: str, *, source: str = "cluster file", directory: Path | None = None, for_planning: bool = False
    ) -> Cluster:
        """Read a cluster from JSON text; paths inside it are relative to `directory`. for_planning: as in `load`."""
        from shardwright.clusters.cluster_file import read_cluster

        return read_cluster(text, source, directory or Path(), for_planning=for_planning)

    @classmethod
    def local(cls, devices: int = 8) -> Cluster:
        """One CPU node on loopback, on ports that are free when it starts: the embedded server's cluster."""
        if isinstance(devices, bool) or devices < 1:
            raise ClusterConfigError(f"a cluster needs at least one device, not {devices}", remedy="pass devices=8")
        if devices > MAX_CLUSTER_DEVICES:
            raise ClusterConfigError(
                f"a node has at most {MAX_CLUSTER_DEVICES} devices, not {devices}",
                remedy="describe a larger cluster by nodes, in a cluster file",
            )
        return cls(name="local", nodes=(ClusterNode(index=0, ip="127.0.0.1", port=0, device_count=devices),))

    @property
    def master(self) -> ClusterNode:
        return self.nodes[0]

    @property
    def workers(self) -> tuple[ClusterNode, ...]:
        """The nodes that contribute devices, in task order."""
        return tuple(node for node in self.nodes if node.device_count)

    @property
    def device_count(self) -> int:
        return sum(node.device_count for node in self.nodes)

    @property
    def has_people(self) -> bool:
        """Whether people have tokens of their own."""
        return self.security is not None and self.security.tokens_file is not None

    @property
    def is_elastic(self) -> bool:
        """Whether it may run with some of its workers."""
        return self.min_nodes is not None or self.max_nodes is not None

    def team(self, tasks: Iterable[int]) -> Cluster:
        """The cluster of these tasks' nodes only, in their order."""
        by_task = {node.index: node for node in self.nodes}
        nodes = tuple(by_task[task] for task in tasks)
        return replace(
            self,
            nodes=nodes,
            hardware=join_hardware(node.hardware or self.hardware for node in nodes),
            memory_bytes_per_device=min_memory_bytes(nodes, self.memory_bytes_per_device),
            min_nodes=None,
            max_nodes=None,
        )

    def part(self, first_device: int, device_count: int) -> Cluster:
        """The cluster of `device_count` devices from `first_device` on, with the nodes that own them.

        Raises ClusterConfigError where it has no such devices.
        """
        wanted = range(first_device, first_device + device_count)
        if first_device < 0 or device_count < 1 or wanted.stop > self.device_count:
            raise ClusterConfigError(
                f"devices {wanted.start} to {wanted.stop - 1} of a cluster that has {self.device_count}"
            )
        nodes, start = [], 0
        for node in self.nodes:
            own = range(max(start, wanted.start) - start, min(start + node.device_count, wanted.stop) - start)
            if own:
                nodes.append(replace(node, device_count=len(own), gpu_ids=node.gpu_ids[own.start : own.stop]))
            start += node.device_count
        return replace(
            self,
            nodes=tuple(nodes),
            hardware=join_hardware(node.hardware or self.hardware for node in nodes),
            memory_bytes_per_device=min_memory_bytes(nodes, self.memory_bytes_per_device),
        )

    @property
    def is_loopback(self) -> bool:
        return all(node.is_loopback for node in self.nodes)

    def with_local_token(self) -> Cluster:
        """The same; on loopback and without a token, with this user's own, unless the file says "insecure".

        Raises AuthenticationError or ClusterConfigError where that cannot be read or made.
        """
        from shardwright.clusters.local_token import path_of, read_or_make_token

        security = self.security or Security()
        is_open = self.insecure and security.tokens_file is None
        if self.token is not None or is_open or not self.is_loopback:
            return self
        port = self.master.port
        return replace(self, token=read_or_make_token(port), security=replace(security, local_token=path_of(port)))

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 (hex) of what the file means, not of how it is written.

        Nodes compare it when they join. A token counts through its own hash; certificates
        do not count, because each node has its own; nor do the nodes of an elastic cluster.
        """
        meaning = self.describe()
        del meaning["name"]
        if self.is_elastic:  # nodes come and go: each knows of itself
            for varying in ("nodes", "device_count", "hardware", "memory_bytes_per_device", "min_nodes", "max_nodes"):
                meaning.pop(varying, None)
        meaning["token"] = hashlib.sha256(self.token.encode()).hexdigest() if self.token else None
        return hashlib.sha256(json.dumps(meaning, sort_keys=True).encode()).hexdigest()

    def describe(self) -> dict[str, Any]:
        """The cluster as JSON-able data, without secrets."""

        def link(speed: Link | None) -> dict[str, float | None] | None:
            if speed is None:
                return None
            return {"bandwidth_bytes_per_s": speed.bandwidth_bytes_per_s, "latency_s": speed.latency_s}

        host_bytes = self.host_memory_bytes_per_device
        return {
            "name": self.name,
            "platform": self.platform,
            "hardware": self.hardware,
            "device_count": self.device_count,
            "memory_bytes_per_device": self.memory_bytes_per_device,
            "links": {
                "intra_node": link(self.intra_node),
                "inter_node": link(self.inter_node),
                "overlap": self.overlap,
            },
            **({"min_nodes": self.min_nodes, "max_nodes": self.max_nodes} if self.is_elastic else {}),
            **({"host_memory_bytes_per_device": host_bytes} if host_bytes else {}),
            "insecure": self.insecure,
            "tls": self.security is not None and self.security.has_tls,
            "nodes": [
                {
                    "task": node.index,
                    "ip": node.ip,
                    "port": node.port,
                    "data_port": node.data_port,
                    "device_count": node.device_count,
                    "gpu_ids": list(node.gpu_ids),
                    "hardware": node.hardware or self.hardware,
                    "memory_bytes": node.memory_bytes,
                }
                for node in self.nodes
            ],
        }


def is_loopback(host: str) -> bool:
    """Whether an address only reaches this machine: 127.0.0.0/8, ::1 or localhost."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def join_address(host: str, port: int | str) -> str:
    """`host:port`, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def join_hardware(hardware: Iterable[str]) -> str:
    """The profile of devices of several kinds, `a100+h100`."""
    return "+".join(sorted({name for names in hardware for name in names.split("+")}))


def min_memory_bytes(nodes: Sequence[ClusterNode], default: int | None) -> int | None:
    """The memory of the node's device that has least; `default` where none says its own."""
    return min((node.memory_bytes for node in nodes if node.memory_bytes is not None), default=default)
