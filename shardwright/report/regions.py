"""Manual regions of a plan in words: where they are, over which axes, and what they send."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.plans.region_note import RegionNote
from shardwright.units import format_bytes, format_seconds

#: Lines of a summary before the rest is only counted.
_SHOWN_LINES = 6


def describe_regions(notes: Sequence[RegionNote]) -> list[str]:
    """A line for each place: `2 manual over cp=8 at model.py:31: 14 collectives, 3.0 MiB a device, 1.2 ms a step`."""
    lines = [_describe(note) for note in notes]
    more = len(lines) - _SHOWN_LINES
    return lines[:_SHOWN_LINES] + ([f"and {more} at other places"] if more > 0 else [])


def _describe(note: RegionNote) -> str:
    amount = f"{format_bytes(note.wire_bytes)} a device, {format_seconds(note.time_s)} a step"
    sent = f"{note.collectives} collectives, {amount}" if note.collectives else "no collectives"
    return f"{note.count} manual over {note.axes}{f' at {note.place}' if note.place else ''}: {sent}"
