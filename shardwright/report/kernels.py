"""Kernels of the program's own, in words: where they stand, and how much of step and memory they hold."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.plans.kernel_note import KernelNote
from shardwright.units import format_percent

#: Lines of a summary before the rest is only counted.
_SHOWN_LINES = 4

_PRICES = {
    "sw.cost": "its price by sw.cost",
    "cost_estimate": "its price by its own cost_estimate",
    "": "its bytes alone, what it computes is unknown",
}


def describe_kernels(notes: Sequence[KernelNote]) -> list[str]:
    """`kernel 'my_ffi' (model.py:31) is computed whole on every device: 37 % of the step is its price by sw.cost`."""
    more = len(notes) - _SHOWN_LINES
    return [*map(_describe, notes[:_SHOWN_LINES]), *([f"and {more} other kernels"] if more > 0 else [])]


def _describe(note: KernelNote) -> str:
    name = f"{f'{note.count} × ' if note.count > 1 else ''}kernel {note.name!r}"
    where = f" ({note.place})" if note.place else ""
    split = "computed whole on every device" if note.whole else "split"
    verb = "are" if note.count > 1 else "is"
    of_step, of_memory = (format_percent(share, ".0%") for share in (note.step_share, note.memory_share))
    held = f"{of_step} of the step is {_PRICES[note.price]}, {of_memory} of the memory its arrays"
    return f"{name}{where} {verb} {split}: {held}"
