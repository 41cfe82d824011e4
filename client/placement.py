"""Placements of a step's arrays on the servers: an executable's entries, mapped to the user's arguments and outputs.

An executable of one program has one entry per argument and output of the user. A pipeline may take one argument on
several stages (a batch read by two of them), keep rows of it on each (stacked layers), or drop it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from shardwright.errors import InternalError
from shardwright.plans.layouts import Layout, Slices
from shardwright.plans.pipeline_plan import ArgumentEntry, OutputEntry, PipelinePlan
from shardwright.plans.plan import Plan
from shardwright.plans.shard_pieces import shard_pieces, shift_rows


@dataclass(frozen=True, slots=True)
class RowParts:
    """An array kept in parts, one array each: rows `bounds[k]` of its first dimension have layout `layouts[k]`."""

    layouts: tuple[Layout, ...]
    bounds: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        return ", ".join(
            f"rows {start}:{stop} as {layout.sharding} on {layout.mesh} from device {layout.first_device} on"
            for layout, (start, stop) in zip(self.layouts, self.bounds, strict=True)
        )


#: How an array lies. Equal places are the same object within a session.
Placement = Layout | RowParts


def held_boxes(place: Placement, shape: tuple[int, ...]) -> dict[int, tuple[slice, ...]]:
    """Position of a device → the smallest box of the user's array, of this shape, around what it holds."""
    pieces: dict[int, list[Slices]] = {}
    for layout, first_row in parts_of(place):
        for position in layout.devices:
            boxes = pieces.setdefault(position, [])
            boxes += [shift_rows(piece.box, first_row) for piece in shard_pieces(layout, position)]
    nothing = tuple(slice(0, 0) for _ in shape)  # padding alone, or an array without elements
    return {position: _bounding_box(boxes) if boxes else nothing for position, boxes in pieces.items()}


def _bounding_box(boxes: Sequence[Slices]) -> Slices:
    return tuple(
        slice(min(part.start for part in dim), max(part.stop for part in dim)) for dim in zip(*boxes, strict=True)
    )


@dataclass(frozen=True, slots=True)
class ExecutableEntry:
    """An argument or output of an executable. number: the user's flat one; rows: its range of rows, None: all."""

    number: int
    layout: Layout
    rows: tuple[int, int] | None = None


def argument_entries(plan: Plan | PipelinePlan, first_device: int = 0) -> tuple[ExecutableEntry, ...]:
    """The arguments of an executable, in order. first_device: of a single-program plan."""
    if isinstance(plan, PipelinePlan):
        return tuple(_entry(plan, entry, entry.argument) for entry in plan.arguments)
    return tuple(ExecutableEntry(v.number, Layout.of(v, plan.mesh, first_device)) for v in plan.parameters)


def output_entries(plan: Plan | PipelinePlan, first_device: int = 0) -> tuple[ExecutableEntry, ...]:
    """The outputs of an executable, in order."""
    if isinstance(plan, PipelinePlan):
        return tuple(_entry(plan, entry, entry.output) for entry in plan.outputs)
    return tuple(ExecutableEntry(v.number, Layout.of(v, plan.mesh, first_device)) for v in plan.outputs)


def list_consumed_arguments(plan: Plan | PipelinePlan) -> tuple[int, ...]:
    """Numbers of an executable's arguments that it updates in place."""
    if isinstance(plan, PipelinePlan):
        return tuple(sorted({entry.alias for entry in plan.outputs if entry.alias is not None}))
    return tuple(variable.number for variable in plan.parameters if variable.alias is not None)


def _entry(plan: PipelinePlan, entry: ArgumentEntry | OutputEntry, number: int) -> ExecutableEntry:
    stage = plan.stages[entry.stage]
    return ExecutableEntry(number, Layout.of(entry.variable, stage.mesh, stage.first_device), entry.rows)


def placements_of(entries: Iterable[ExecutableEntry], count: int) -> tuple[Placement | None, ...]:
    """Placement of each of the user's `count` arguments or outputs; None: no entry.

    The first of several copies is the array's home. Raises InternalError on missing rows.
    """
    entries_by_number: list[list[ExecutableEntry]] = [[] for _ in range(count)]
    for entry in entries:
        entries_by_number[entry.number].append(entry)
    return tuple(_placement(copies) if copies else None for copies in entries_by_number)


def _placement(entries: list[ExecutableEntry]) -> Placement:
    if entries[0].rows is None:
        return entries[0].layout
    parts = {entry.rows: entry.layout for entry in reversed(entries) if entry.rows is not None}
    bounds = tuple(sorted(parts))
    if bounds[0][0] != 0 or any(before[1] != after[0] for before, after in pairwise(bounds)):
        raise InternalError(f"argument or output {entries[0].number} is kept as rows {bounds}")
    return RowParts(tuple(parts[rows] for rows in bounds), bounds)


def parts_of(place: Placement) -> tuple[tuple[Layout, int], ...]:
    """Layout of each part, and the first of its rows."""
    if isinstance(place, RowParts):
        return tuple((layout, start) for layout, (start, _) in zip(place.layouts, place.bounds, strict=True))
    return ((place, 0),)


def can_be_moved(here: Placement, there: Placement) -> bool:
    """Whether workers can hand over the contents of `there`: a whole array or some of its rows, in the same view."""
    before, after = _rows_as_stored(here), _rows_as_stored(there)
    if before is None or after is None or before[0] != after[0]:
        return False
    (first, last), (start, end) = before[1], after[1]
    return before[1] == after[1] or (isinstance(there, RowParts) and first <= start and end <= last)


def _rows_as_stored(place: Placement) -> tuple[tuple[str, int, tuple[int, ...]], tuple[int, int]] | None:
    """(element type, rank and dimensions of a stored row, range of rows); None when the parts' views differ."""
    kinds = {(layout.element_type, len(layout.shape), layout.shape[1:]) for layout, _ in parts_of(place)}
    if len(kinds) > 1:
        return None
    if isinstance(place, Layout):
        return kinds.pop(), (0, place.shape[0] if place.shape else 1)
    if any(layout.shape[0] != stop - start for layout, (start, stop) in zip(place.layouts, place.bounds, strict=True)):
        return None
    return kinds.pop(), (place.bounds[0][0], place.bounds[-1][1])


def placement_of(entry: ExecutableEntry) -> Placement:
    """Placement of a single entry."""
    return entry.layout if entry.rows is None else RowParts((entry.layout,), (entry.rows,))


def part_of(value: np.ndarray, entry: ExecutableEntry) -> np.ndarray:
    """The entry's part of an argument's contents."""
    return value if entry.rows is None else value[slice(*entry.rows)]
