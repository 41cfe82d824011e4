"""The collectives a plan predicts beside those that XLA inserted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from shardwright.plans import Plan, PlannedCollective
from shardwright.xla.compiled import ObservedCollective

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveComparison:
    """One kind of collective over groups of one size: predicted and observed, per step.

    Counts are executions, bytes what one device puts on the wire; XLA may do in one
    collective what the plan counts as several, so bytes are what must agree.
    `predicted_only` and `observed_only` name instructions that the other side lacks
    for this kind.
    """

    kind: str
    group_size: int
    predicted_count: int
    observed_count: int
    predicted_wire_bytes: int
    observed_wire_bytes: int
    predicted_only: tuple[str, ...]
    observed_only: tuple[str, ...]

    @property
    def agrees(self) -> bool:
        """Whether the bytes are the same to 1 % or 4 KiB (scalars and loop counters)."""
        difference = abs(self.predicted_wire_bytes - self.observed_wire_bytes)
        return difference <= max(4096, 0.01 * max(self.predicted_wire_bytes, self.observed_wire_bytes))


def compare_collectives(plan: Plan, observed: Sequence[ObservedCollective]) -> tuple[CollectiveComparison, ...]:
    """Predicted against observed, per kind and group size, the most bytes first."""
    planned_groups = _grouped((c.kind, plan.mesh.size(c.axes), c) for c in plan.collectives)
    # What XLA runs over groups of one device moves nothing.
    seen_groups = _grouped((c.kind, c.group_size, c) for c in observed if c.group_size > 1)
    rows = [
        _compare(kind, size, planned_groups.get((kind, size), []), seen_groups.get((kind, size), []))
        for kind, size in sorted(planned_groups.keys() | seen_groups.keys())
    ]
    return tuple(sorted(rows, key=lambda row: -max(row.predicted_wire_bytes, row.observed_wire_bytes)))


def _grouped(items: Iterable[tuple[str, int, Item]]) -> dict[tuple[str, int], list[Item]]:
    groups: dict[tuple[str, int], list[Item]] = {}
    for kind, size, item in items:
        # A permute's group is the devices that send: its size says nothing about axes.
        groups.setdefault((kind, 0 if kind == "collective-permute" else size), []).append(item)
    return groups


def _compare(
    kind: str, size: int, planned: list[PlannedCollective], seen: list[ObservedCollective]
) -> CollectiveComparison:
    planned_names = {collective.instruction for collective in planned}
    seen_names = {collective.op_name or collective.instruction for collective in seen}
    return CollectiveComparison(
        kind=kind,
        group_size=size,
        predicted_count=sum(c.count for c in planned),
        observed_count=sum(c.count for c in seen),
        predicted_wire_bytes=sum(c.wire_bytes * c.count for c in planned),
        observed_wire_bytes=sum(c.wire_bytes * c.count for c in seen),
        predicted_only=tuple(sorted(planned_names - seen_names)),
        observed_only=tuple(sorted(seen_names - planned_names)),
    )
