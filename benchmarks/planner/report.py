"""Tables of a run's outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.planner.frozen import count_collectives, step_s
from benchmarks.planner.results import budget_text

#: A plan within this part of the best expert's time counts as no worse.
TOLERANCE = 0.01


def step_ratio(outcome: dict[str, Any]) -> float | None:
    """Our step time over the best expert's; None without either."""
    if not outcome.get("expert") or "ours" not in outcome:
        return None
    return step_s(outcome["ours"]) / step_s(outcome["expert"])


def misses_the_bar(outcome: dict[str, Any]) -> bool:
    """Whether a plan failed, is over its budget, or is slower than the best expert by over the tolerance."""
    ratio = step_ratio(outcome)
    return "error" in outcome or not outcome.get("fits", True) or (ratio is not None and ratio > 1 + TOLERANCE)


def print_outcomes(outcomes: Sequence[dict[str, Any]]) -> None:
    """Print a row for each case and budget, and the numbers of plans faster and slower than the best expert."""
    table = Table(title="As compiled: ms a step = communication + memory + products; collectives issued")
    for title in ("case", "budget", "ours", "", "predicted", "best expert", "its", "", "ratio", "gap", "plan/lower"):
        table.add_column(title, justify="left" if title in ("case", "best expert") else "right")
    for outcome in outcomes:
        table.add_row(*_format_cells(outcome))
    console = Console(width=160)
    console.print(table)
    console.print(summarize(outcomes))
    console.print(format_deviations(outcomes))


def _format_cells(outcome: dict[str, Any]) -> list[str]:
    head = [outcome["case"], budget_text(outcome["budget"])]
    if "ours" not in outcome:
        message = outcome.get("error") or outcome["refused"]
        return [*head, "[red]failed[/red]" if "error" in outcome else "refused", "", message[:60]]
    ours, expert, prediction = outcome["ours"], outcome["expert"], outcome["planner"]
    lowering_s = outcome["lower_s"] + outcome["as_text_s"]
    own = [
        f"{format_seconds(ours)}{'' if outcome['fits'] else ' (over)'}",
        str(count_collectives(ours)),
        format_prediction(prediction),
    ]
    against = ["none fits", "", "", ""]
    if expert:
        issued = str(count_collectives(expert))
        against = [outcome["best_expert"], format_seconds(expert), issued, _colour_ratio(step_ratio(outcome))]
    return [*head, *own, *against, _format_percent(prediction["gap"]), f"{prediction['planning_s'] / lowering_s:.1f}"]


def _format_percent(gap: float | None) -> str:
    return "-" if gap is None else f"{gap:.2%}"


def format_seconds(figures: dict[str, Any]) -> str:
    """Milliseconds of a compiled step: sum = communication + memory + products."""
    parts = (figures[part] * 1e3 for part in ("communication_s", "memory_s", "product_s"))
    return f"{step_s(figures) * 1e3:.2f} = {' + '.join(f'{part:.2f}' for part in parts)}"


def format_prediction(prediction: dict[str, Any]) -> str:
    """The plan's milliseconds of communication + compute; its number of collectives."""
    times = f"{prediction['predicted_communication_s'] * 1e3:.2f} + {prediction['predicted_compute_s'] * 1e3:.2f}"
    return f"{times}; {prediction['predicted_collectives']}"


def format_deviations(outcomes: Sequence[dict[str, Any]]) -> str:
    """Relative errors of the plans' predictions: |predicted - compiled| / compiled, median and maximum."""
    pairs = [(outcome["planner"], outcome["ours"]) for outcome in outcomes if "ours" in outcome]
    if not pairs:
        return "nothing was compiled"
    compiled = {
        "communication": [
            (prediction["predicted_communication_s"], ours["communication_s"]) for prediction, ours in pairs
        ],
        "compute": [
            (prediction["predicted_compute_s"], ours["memory_s"] + ours["product_s"]) for prediction, ours in pairs
        ],
        "collectives": [(prediction["predicted_collectives"], count_collectives(ours)) for prediction, ours in pairs],
    }
    return "Predicted against compiled: " + "; ".join(
        f"{name} off by {median(parts):.1%} in the median, {max(parts):.1%} at worst"
        for name, both in compiled.items()
        for parts in [[abs(one - other) / other if other else 0.0 for one, other in both]]
    )


def _colour_ratio(ratio: float | None) -> str:
    if ratio is None:
        return ""
    colour = "green" if ratio < 1 - TOLERANCE else "red" if ratio > 1 + TOLERANCE else "white"
    return f"[{colour}]{ratio:.3f}[/{colour}]"


def summarize(outcomes: Sequence[dict[str, Any]]) -> str:
    """Numbers of plans no slower than the best expert, faster, slower, without expert, refused and failed.

    A plan over its budget by XLA's count is never as good as an expert.
    """
    against = [outcome for outcome in outcomes if outcome.get("expert")]
    ratios = [ratio for outcome in against if (ratio := step_ratio(outcome)) is not None and outcome["fits"]]
    alone = sum("ours" in outcome and not outcome["expert"] for outcome in outcomes)
    refused = sum("refused" in outcome for outcome in outcomes)
    failed = sum("error" in outcome for outcome in outcomes)
    over = sum(not outcome.get("fits", True) for outcome in outcomes)
    return (
        f"{len(outcomes)} cases. In {len(against)} an expert fits: the plan fits too and is never slower by more than "
        f"{TOLERANCE:.0%} in {sum(r <= 1 + TOLERANCE for r in ratios)} of {len(against)}, faster by more than that in "
        f"{sum(r < 1 - TOLERANCE for r in ratios)}, slower in {sum(r > 1 + TOLERANCE for r in ratios)}. Only the plan "
        f"fits in {alone}, neither in {refused}; over the budget by XLA's count in {over}; failed or refused {failed}."
    )


def print_timings(timings: Sequence[dict[str, Any]]) -> None:
    """Planning against lowering, in one run."""
    for timing in timings:
        if "error" in timing:
            print(f"GPT-2 {timing['layers']} layers: {timing['error']}")
            continue
        print(
            f"GPT-2 {timing['layers']} layers, {timing['instructions']} instructions: planning "
            f"{timing['planning_s']:.2f} s, {timing['ratio']:.2f} times lowering and printing, "
            f"{timing['planner_peak_bytes'] / 2**30:.2f} GiB at its peak"
        )
