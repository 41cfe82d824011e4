"""Figures that nodes report with their signs of life, as the master knows them.

One decision depends on them: how much memory there is to be shared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from shardwright.proto.v1 import operators_pb2


@dataclass(slots=True)
class NodeFigures:
    """host, executor: the last word of each, None before. counted: what earlier executors of the node have moved."""

    host: operators_pb2.HostFigures | None = None
    executor: operators_pb2.ExecutorFigures | None = None
    counted: Counter[str] = field(default_factory=Counter)

    @property
    def device_memory_bytes(self) -> int:
        """0: not known yet."""
        devices = 0 if self.executor is None else sum(device.limit_bytes for device in self.executor.devices)
        host = 0 if self.host is None else self.host.memory_bytes
        return devices or (host if self.executor is not None else 0)

    def moved_bytes(self, what: str) -> int:
        """`received_bytes`, `sent_bytes` or `fetched_bytes` of all executors of the node so far."""
        now = 0 if self.executor is None else int(getattr(self.executor, what))
        return int(self.counted[what]) + now


class Figures:
    """By node."""

    def __init__(self) -> None:
        self.nodes: dict[int, NodeFigures] = {}

    def of(self, node: int) -> NodeFigures:
        return self.nodes.setdefault(node, NodeFigures())

    def device_memory_bytes(self, nodes: Iterable[int]) -> int:
        """Of all devices of these nodes; of CPUs, that is the host's. 0 until all have told."""
        sizes = [self.of(node).device_memory_bytes for node in nodes]
        return sum(sizes) if all(sizes) else 0

    def executor_is_new(self, node: int) -> None:
        """Its counts begin at zero again."""
        figures = self.of(node)
        for what in ("received_bytes", "sent_bytes", "fetched_bytes"):
            figures.counted[what] = figures.moved_bytes(what)
        figures.executor = None
