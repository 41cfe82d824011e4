"""Planning time against the time JAX takes to lower and print the same program, and how it grows with the layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.planner.planned import PlanningFailed, lower, plan
from benchmarks.planner.suite import Entry

#: Layers → the most that planning may take, as a multiple of lowering.
BARS = {12: 2.0, 96: 1.0}


def measure_timings(limit_s: float, layers: Sequence[int] = tuple(BARS)) -> list[dict[str, Any]]:
    """GPT-2 124M with so many layers on 8 devices: seconds, their ratio, instructions, the planner's peak memory."""
    return [_measure(count, limit_s) for count in layers]


def _measure(layers: int, limit_s: float) -> dict[str, Any]:
    entry = Entry(model="gpt2", size="124M", devices=8, changes={"layers": layers})
    lowered = lower(entry)
    entries: dict[str, Any] = {
        "layers": layers, "lower_s": lowered.lower_s, "as_text_s": lowered.as_text_s,
        "instructions": lowered.hlo_text.count(" = "),
    }  # fmt: skip
    try:
        said = plan(lowered.hlo_text, entry, {}, limit_s=limit_s)
    except PlanningFailed as error:
        return {**entries, "error": str(error)}
    return {**entries, **said, "ratio": said["planning_s"] / lowered.seconds, "bar": BARS.get(layers)}
