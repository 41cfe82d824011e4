"""Collectives that the plan predicted beside those that XLA put into the partitioned program."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from rich.table import Table
from rich.text import Text

from shardwright.plans import Plan
from shardwright.report.text import plain_table, plain_text
from shardwright.report.units import format_bytes


class Observed(Protocol):
    """What is known of a collective in a partitioned program; bytes of one execution."""

    @property
    def kind(self) -> str: ...
    @property
    def payload_bytes(self) -> int: ...
    @property
    def wire_bytes(self) -> int: ...
    @property
    def group_size(self) -> int: ...
    @property
    def count(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Collectives of one kind and group size: executions and bytes one device sends, a step."""

    kind: str
    group_size: int
    predicted_count: int
    observed_count: int
    predicted_wire_bytes: int
    observed_wire_bytes: int
    predicted_payload_bytes: int
    observed_payload_bytes: int


def compare_collectives(plan: Plan, observed: Iterable[Observed]) -> list[Comparison]:
    """One row per kind and group size, the most observed bytes first.

    Counts differ without harm where XLA merges collectives; bytes should not.
    """
    totals: dict[tuple[str, int], list[int]] = {}

    def add(kind: str, group_size: int, at: int, count: int, wire_bytes: int, payload_bytes: int) -> None:
        row = totals.setdefault((kind, group_size), [0] * 6)
        row[at] += count
        row[at + 2] += wire_bytes * count
        row[at + 4] += payload_bytes * count

    for planned in plan.collectives:
        size = plan.mesh.size(planned.axes)
        add(planned.kind, size, 0, planned.count, planned.wire_bytes, planned.payload_bytes)
    for seen in observed:
        add(seen.kind, seen.group_size, 1, seen.count, seen.wire_bytes, seen.payload_bytes)
    rows = [
        Comparison(
            kind=kind,
            group_size=group_size,
            predicted_count=row[0],
            observed_count=row[1],
            predicted_wire_bytes=row[2],
            observed_wire_bytes=row[3],
            predicted_payload_bytes=row[4],
            observed_payload_bytes=row[5],
        )
        for (kind, group_size), row in totals.items()
    ]
    return sorted(rows, key=lambda row: (-row.observed_wire_bytes, -row.predicted_wire_bytes, row.kind))


def comparison_table(rows: Iterable[Comparison]) -> Table:
    """The comparison as a rich table."""
    table = plain_table(
        [
            ("collective", "left"),
            ("group", "right"),
            ("predicted", "right"),
            ("observed", "right"),
            ("predicted wire", "right"),
            ("observed wire", "right"),
        ]
    )
    total = [0, 0]
    for row in rows:
        cells = (
            row.kind,
            str(row.group_size),
            str(row.predicted_count),
            str(row.observed_count),
            format_bytes(row.predicted_wire_bytes),
            format_bytes(row.observed_wire_bytes),
        )
        table.add_row(*(Text(cell) for cell in cells))
        total = [total[0] + row.predicted_wire_bytes, total[1] + row.observed_wire_bytes]
    table.add_section()
    table.add_row("all", "", "", "", *(format_bytes(each) for each in total))
    return table


def explain_collectives(plan: Plan, observed: Iterable[Observed], *, width: int = 120) -> str:
    """The comparison as plain text."""
    return plain_text(comparison_table(compare_collectives(plan, observed)), width)


def as_dict(rows: Iterable[Comparison]) -> list[dict[str, Any]]:
    """The comparison as plain data for `--json`."""
    return [{name: getattr(row, name) for name in Comparison.__slots__} for row in rows]
