"""Figures that nodes report with their signs of life, as the master knows them. No decision depends on them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from shardwright.proto.v1 import operators_pb2


@dataclass(slots=True)
class NodeFigures:
    """host, executor: the last word of each, None before. counted: what earlier executors of the node have moved."""

    host: operators_pb2.HostFigures | None = None
    executor: operators_pb2.ExecutorFigures | None = None
    counted: Counter[str] = field(default_factory=Counter)

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

    def executor_is_new(self, node: int) -> None:
        """Its counts begin at zero again."""
        figures = self.of(node)
        for what in ("received_bytes", "sent_bytes", "fetched_bytes"):
            figures.counted[what] = figures.moved_bytes(what)
        figures.executor = None
