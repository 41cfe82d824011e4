"""Planning time relative to JAX's lowering and printing of the same program, by number of layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.planner.planned import PlanningFailed, lower, plan
from benchmarks.planner.suite import Entry

#: Layers → maximum planning time, as a multiple of lowering.
BARS = {12: 2.0, 96: 1.0}


def measure_timings(limit_s: float, layers: Sequence[int] = tuple(BARS)) -> list[dict[str, Any]]:
    """Plan GPT-2 124M of several depths on 8 devices: seconds, their ratio, instructions, the planner's peak memory."""
    return [_measure(count, limit_s) for count in layers]


def _measure(layers: int, limit_s: float) -> dict[str, Any]:
    entry = Entry(model="gpt2", size="124M", devices=8, changes={"layers": layers})
    lowered = lower(entry)
    figures: dict[str, Any] = {
        "layers": layers, "lower_s": lowered.lower_s, "as_text_s": lowered.as_text_s,
        "instructions": lowered.hlo_text.count(" = "),
    }  # fmt: skip
    try:
        answer = plan(lowered.hlo_text, entry, {}, limit_s=limit_s)
    except PlanningFailed as error:
        return {**figures, "error": str(error)}
    return {**figures, **answer, "ratio": answer["planning_s"] / lowered.seconds, "bar": BARS.get(layers)}
