"""The collectives a plan predicts beside those that XLA inserted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.plans import Plan, PlannedCollective
from shardwright.xla.compiled import ObservedCollective


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveComparison:
    """One kind of collective, predicted and observed, per step.

    Counts are executions, bytes what one device puts on the wire, groups the numbers of
    devices that work together. XLA may reduce over two axes in one collective or in
    another order than the plan counts them, so bytes are what must agree.
    `predicted_only` and `observed_only` name instructions that the other side lacks
    for this kind.
    """

    kind: str
    predicted_count: int
    observed_count: int
    predicted_wire_bytes: int
    observed_wire_bytes: int
    predicted_groups: tuple[int, ...]
    observed_groups: tuple[int, ...]
    predicted_only: tuple[str, ...]
    observed_only: tuple[str, ...]

    @property
    def agrees(self) -> bool:
        """Whether the bytes are the same to 1 % or 4 KiB (scalars and loop counters)."""
        difference = abs(self.predicted_wire_bytes - self.observed_wire_bytes)
        return difference <= max(4096, 0.01 * max(self.predicted_wire_bytes, self.observed_wire_bytes))


def compare_collectives(plan: Plan, observed: Sequence[ObservedCollective]) -> tuple[CollectiveComparison, ...]:
    """Predicted against observed, per kind, the most bytes first."""
    # What XLA runs over groups of one device moves nothing.
    moving = [collective for collective in observed if collective.group_size > 1]
    kinds = {planned.kind for planned in plan.collectives} | {seen.kind for seen in moving}
    rows = [
        _compare(kind, plan, [c for c in plan.collectives if c.kind == kind], [c for c in moving if c.kind == kind])
        for kind in sorted(kinds)
    ]
    return tuple(sorted(rows, key=lambda row: -max(row.predicted_wire_bytes, row.observed_wire_bytes)))


def _compare(
    kind: str, plan: Plan, planned: list[PlannedCollective], seen: list[ObservedCollective]
) -> CollectiveComparison:
    planned_names = {collective.instruction for collective in planned}
    seen_names = {collective.op_name or collective.instruction for collective in seen}
    return CollectiveComparison(
        kind=kind,
        predicted_count=sum(c.count for c in planned),
        observed_count=sum(c.count for c in seen),
        predicted_wire_bytes=sum(c.wire_bytes * c.count for c in planned),
        observed_wire_bytes=sum(c.wire_bytes * c.count for c in seen),
        predicted_groups=tuple(sorted({plan.mesh.size(c.axes) for c in planned})),
        observed_groups=tuple(sorted({c.group_size for c in seen})),
        predicted_only=tuple(sorted(planned_names - seen_names)),
        observed_only=tuple(sorted(seen_names - planned_names)),
    )
