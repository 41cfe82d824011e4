"""Mixtures of experts of a plan in words: what sending rows, the experts and bringing rows back take."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.plans.mixture_note import MixtureNote
from shardwright.units import format_bytes, format_seconds

#: Operations in a line: a unit for each thousand.
_UNITS = ("", " k", " M", " G", " T", " P")


def describe_mixtures(notes: Sequence[MixtureNote]) -> list[str]:
    """A line for each part: `dispatch 1.2 ms, 3.0 GiB on the wire, 20.1 G operations a device`."""
    lines = [_describe(note) for note in notes]
    if lines:
        first = notes[0]
        lines[0] += f"; {first.rows:,} rows of {first.mixtures:,} mixtures"
    return lines


def _describe(note: MixtureNote) -> str:
    sent = f"{format_bytes(note.wire_bytes)} on the wire" if note.wire_bytes else "nothing on the wire"
    operations = note.flops
    unit = 0
    while operations >= 1000 and unit < len(_UNITS) - 1:
        operations, unit = operations / 1000, unit + 1
    return f"{note.part} {format_seconds(note.time_s)}, {sent}, {operations:.3g}{_UNITS[unit]} operations a device"
