"""The outcomes of some runs as one Markdown table, for docs/benchmarks/plans.md.

    python -m benchmarks.planner.table build/bench-planner.json

For the same case and budget the last file counts.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.planner.frozen import count_collectives
from benchmarks.planner.gaps import BAR
from benchmarks.planner.report import format_deviations, format_prediction, format_seconds, step_ratio, summarize
from benchmarks.planner.results import budget_text, read_outcomes
from benchmarks.planner.suite import BUDGETS, entries

_TITLES = (
    "case", "budget", "ms = communication + memory + products", "collectives", "predicted", "best expert", "its ms",
    "its collectives", "ratio", "gap", "GB predicted / taken / allowed",
)  # fmt: skip


def markdown(outcomes: Sequence[dict[str, Any]]) -> str:
    """A row for each case and budget of the suite with an outcome, then the numbers of each kind."""
    by_key = {(outcome["case"], outcome["budget"]): outcome for outcome in outcomes}
    keys = [(entry.name, budget) for entry in entries() for budget in (math.inf, *BUDGETS)]
    ordered = [by_key[key] for key in keys if key in by_key]
    head = (f"| {' | '.join(_TITLES)} |", f"|{'---|' * len(_TITLES)}")
    return "\n".join((*head, *map(_format_row, ordered), "", summarize(ordered), "", format_deviations(ordered)))


def _format_row(outcome: dict[str, Any]) -> str:
    return f"| {outcome['case']} | {budget_text(outcome['budget'])} | {' | '.join(_format_cells(outcome))} |"


def _format_cells(outcome: dict[str, Any]) -> Iterator[str]:
    ours, expert = outcome.get("ours"), outcome.get("expert")
    yield format_seconds(ours) if ours else _format_failure(outcome)
    yield str(count_collectives(ours)) if ours else ""
    yield format_prediction(outcome["planner"]) if ours else ""
    yield outcome["best_expert"] if expert else "none fits"
    yield format_seconds(expert) if expert else ""
    yield str(count_collectives(expert)) if expert else ""
    ratio = step_ratio(outcome)
    yield "" if ratio is None else f"**{ratio:.3f}**" if ratio > 1.01 else f"{ratio:.3f}"
    yield _format_gap(outcome["planner"]["gap"]) if ours else ""
    yield _format_memory(outcome) if ours else ""


def _format_gap(gap: float | None) -> str:
    """The plan's optimality gap, by its own bound."""
    if gap is None:
        return "none"
    return f"**{gap:.2%}**" if gap > BAR else f"{gap:.2%}"


def _format_failure(outcome: dict[str, Any]) -> str:
    if "refused" in outcome:
        return "refused"
    return "**refused**" if outcome["error"].startswith("PlanRefused") else "**failed**"


def _format_memory(outcome: dict[str, Any]) -> str:
    assigned, budget = outcome["ours"]["memory_bytes"], outcome["budget_bytes"]
    predicted = outcome["planner"]["predicted_memory_bytes"]
    text = " / ".join("?" if size is None else f"{size / 1e9:.2f}" for size in (predicted, assigned, budget))
    return text if outcome["fits"] else f"**{text}**"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    print(markdown(read_outcomes(parser.parse_args().files)))


if __name__ == "__main__":
    main()
