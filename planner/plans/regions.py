"""A plan's manual regions: the axes of its mesh that they are manual over, and what their collectives cost."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from shardwright.hlo import Instruction, Module
from shardwright.planner.graph.manual_regions import Inside
from shardwright.planner.rules import match_axis
from shardwright.plans.plan import PlannedCollective
from shardwright.plans.region_note import RegionNote
from shardwright.plans.shardings import Mesh


def manual_axes_on(mesh: Mesh, inside: Inside) -> dict[str, tuple[str, ...]]:
    """The program's manual axes → axes of the plan's mesh, together of their size."""
    return {axis[0]: match_axis(mesh, axis) or () for axis in inside.manual_axes}


def region_notes(module: Module, inside: Inside, collectives: Iterable[PlannedCollective]) -> tuple[RegionNote, ...]:
    """A note for each source line of regions with equal manual axes."""
    if not inside.places:
        return ()
    lines = dict(_lines(module, inside))
    by_name = {i.name: numbers for i, numbers in inside.regions.items() if i not in inside.borders}
    sent: defaultdict[tuple[str, str], list[PlannedCollective]] = defaultdict(list)
    for collective in collectives:
        numbers = by_name.get(collective.instruction)
        if numbers:
            sent[lines[min(numbers)]].append(collective)
    return tuple(
        RegionNote(
            place=place,
            count=count,
            axes=axes,
            collectives=sum(each.count for each in sent[place, axes]),
            wire_bytes=sum(each.count * each.wire_bytes for each in sent[place, axes]),
            time_s=sum(each.time_s for each in sent[place, axes]),
        )
        for (place, axes), count in Counter(lines.values()).items()
    )


def _lines(module: Module, inside: Inside) -> Iterable[tuple[int, tuple[str, str]]]:
    """Per region, the source line and the manual axes of its first border."""
    seen: dict[int, Instruction] = {}
    for instruction, border in inside.borders.items():
        if border.region not in seen:
            seen[border.region] = instruction
            axes = " × ".join(f"{name}={size}" for name, size in border.axes)
            yield border.region, (module.place(instruction), axes)
