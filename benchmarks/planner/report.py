"""Tables of what a run found."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.planner.frozen import collectives_of, step_s
from benchmarks.planner.results import budget_text

#: A plan is no worse than the best expert within this part of its time.
TOLERANCE = 0.01


def ratio_of(outcome: dict[str, Any]) -> float | None:
    """Our step time over the best expert's; None where there is none of one of them."""
    if not outcome.get("expert") or "ours" not in outcome:
        return None
    return step_s(outcome["ours"]) / step_s(outcome["expert"])


def misses_the_bar(outcome: dict[str, Any]) -> bool:
    """Whether a plan failed, is over its budget, or is slower than the best expert by more than the tolerance."""
    ratio = ratio_of(outcome)
    return "error" in outcome or not outcome.get("fits", True) or (ratio is not None and ratio > 1 + TOLERANCE)


def print_outcomes(outcomes: Sequence[dict[str, Any]]) -> None:
    """One row a case and budget, and how many plans are faster and slower than the best expert."""
    table = Table(title="As compiled: ms a step = communication + memory + products; collectives issued")
    for title in ("case", "budget", "ours", "", "predicted", "best expert", "its", "", "ratio", "gap", "plan/lower"):
        table.add_column(title, justify="left" if title in ("case", "best expert") else "right")
    for outcome in outcomes:
        table.add_row(*_cells(outcome))
    console = Console(width=160)
    console.print(table)
    console.print(summary(outcomes))
    console.print(deviations(outcomes))


def _cells(outcome: dict[str, Any]) -> list[str]:
    head = [outcome["case"], budget_text(outcome["budget"])]
    if "ours" not in outcome:
        said = outcome.get("error") or outcome["refused"]
        return [*head, "[red]failed[/red]" if "error" in outcome else "refused", "", said[:60]]
    ours, expert, said = outcome["ours"], outcome["expert"], outcome["planner"]
    lowering_s = outcome["lower_s"] + outcome["as_text_s"]
    own = [f"{seconds(ours)}{'' if outcome['fits'] else ' (over)'}", str(collectives_of(ours)), predicted(said)]
    against = ["none fits", "", "", ""]
    if expert:
        issued = str(collectives_of(expert))
        against = [outcome["best_expert"], seconds(expert), issued, _colour(ratio_of(outcome))]
    return [*head, *own, *against, _percent(said["gap"]), f"{said['planning_s'] / lowering_s:.1f}"]


def _percent(gap: float | None) -> str:
    return "-" if gap is None else f"{gap:.2%}"


def seconds(figures: dict[str, Any]) -> str:
    """Milliseconds of a step as compiled: their sum, communication, memory, products."""
    parts = (figures[part] * 1e3 for part in ("communication_s", "memory_s", "product_s"))
    return f"{step_s(figures) * 1e3:.2f} = {' + '.join(f'{part:.2f}' for part in parts)}"


def predicted(said: dict[str, Any]) -> str:
    """Milliseconds of communication and compute, and collectives, as the plan predicts them."""
    times = f"{said['predicted_communication_s'] * 1e3:.2f} + {said['predicted_compute_s'] * 1e3:.2f}"
    return f"{times}; {said['predicted_collectives']}"


def deviations(outcomes: Sequence[dict[str, Any]]) -> str:
    """How far the plans' own figures are from those of the compiled programs, as parts of the latter."""
    pairs = [(outcome["planner"], outcome["ours"]) for outcome in outcomes if "ours" in outcome]
    if not pairs:
        return "nothing was compiled"
    compiled = {
        "communication": [(said["predicted_communication_s"], ours["communication_s"]) for said, ours in pairs],
        "compute": [(said["predicted_compute_s"], ours["memory_s"] + ours["product_s"]) for said, ours in pairs],
        "collectives": [(said["predicted_collectives"], collectives_of(ours)) for said, ours in pairs],
    }
    return "Predicted against compiled: " + "; ".join(
        f"{name} off by {median(parts):.1%} in the median, {max(parts):.1%} at worst"
        for name, both in compiled.items()
        for parts in [[abs(one - other) / other if other else 0.0 for one, other in both]]
    )


def _colour(ratio: float | None) -> str:
    if ratio is None:
        return ""
    colour = "green" if ratio < 1 - TOLERANCE else "red" if ratio > 1 + TOLERANCE else "white"
    return f"[{colour}]{ratio:.3f}[/{colour}]"


def summary(outcomes: Sequence[dict[str, Any]]) -> str:
    """How many plans are no slower than the best expert, how many are faster, and what became of the others.

    Only a plan that fits its budget by XLA's count is as good as an expert, however fast it is.
    """
    against = [outcome for outcome in outcomes if outcome.get("expert")]
    ratios = [ratio for outcome in against if (ratio := ratio_of(outcome)) is not None and outcome["fits"]]
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
