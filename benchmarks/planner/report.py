"""Tables of what a run found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

#: A plan is no worse than the best expert within this part of its time.
TOLERANCE = 0.01


def print_outcomes(outcomes: Sequence[dict[str, Any]]) -> None:
    """One row a case and budget, and how many plans are faster and slower than the best expert."""
    table = Table(title="Judged from XLA's partitioned HLO (milliseconds a step, MB one device sends)")
    for title in ("case", "budget", "ours", "wire", "best expert", "its", "wire", "ratio", "gap", "plan/lower"):
        table.add_column(title, justify="left" if title in ("case", "best expert") else "right")
    for outcome in outcomes:
        table.add_row(*_cells(outcome))
    console = Console(width=140)
    console.print(table)
    console.print(_summary(outcomes))


def _cells(outcome: dict[str, Any]) -> list[str]:
    head = [outcome["case"], f"{outcome['budget']:.0%}"]
    if "error" in outcome:
        return [*head, "[red]failed[/red]", "", outcome["error"][:60]]
    ours, expert, said = outcome["ours"], outcome["expert"], outcome["planner"]
    lowering_s = outcome["lower_s"] + outcome["as_text_s"]
    own = [f"{_ms(ours)}{'' if outcome['fits'] else ' (over)'}", _mb(ours)]
    against = (
        [outcome["best_expert"], _ms(expert), _mb(expert), _ratio(outcome)] if expert else ["none fits", "", "", ""]
    )
    return [*head, *own, *against, f"{said['gap']:.2%}", f"{said['planning_s'] / lowering_s:.1f}"]


def _ms(figures: dict[str, Any]) -> str:
    return f"{figures['judged']['a100']['step_s'] * 1e3:.2f}"


def _mb(figures: dict[str, Any]) -> str:
    return f"{figures['wire_bytes'] / 1e6:.0f}"


def _ratio(outcome: dict[str, Any]) -> str:
    colour = "green" if outcome["ratio"] < 1 - TOLERANCE else "red" if outcome["ratio"] > 1 + TOLERANCE else "white"
    return f"[{colour}]{outcome['ratio']:.3f}[/{colour}]"


def _summary(outcomes: Sequence[dict[str, Any]]) -> str:
    ratios = [outcome["ratio"] for outcome in outcomes if outcome.get("ratio")]
    alone = sum(1 for outcome in outcomes if "error" not in outcome and not outcome["expert"])
    failed = sum("error" in outcome for outcome in outcomes)
    over = sum(not outcome.get("fits", True) for outcome in outcomes)
    return (
        f"{len(outcomes)} cases: faster than the best expert in {sum(r < 1 - TOLERANCE for r in ratios)}, "
        f"as fast within {TOLERANCE:.0%} in {sum(abs(r - 1) <= TOLERANCE for r in ratios)}, "
        f"slower in {sum(r > 1 + TOLERANCE for r in ratios)}; no expert fits in {alone}; "
        f"over the budget by XLA's count in {over}; failed {failed}"
    )


def print_timings(timings: Sequence[dict[str, Any]]) -> None:
    """Planning against lowering, in one run."""
    for timing in timings:
        if "error" in timing:
            print(f"GPT-2 {timing['layers']} layers: {timing['error']}")
            continue
        print(
            f"GPT-2 {timing['layers']} layers: planning {timing['ratio']:.2f} times lowering and printing, "
            f"{timing['planner_peak_bytes'] / 2**30:.2f} GiB at its peak"
        )
