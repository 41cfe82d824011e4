"""The outcomes of some runs as one Markdown table, for docs/benchmarks/plans.md.

    python -m benchmarks.planner.table build/bench-planner.json

Of several files that hold the same case and budget, the last one's counts.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.planner.frozen import collectives_of
from benchmarks.planner.gaps import BAR
from benchmarks.planner.report import deviations, predicted, ratio_of, seconds, summary
from benchmarks.planner.results import budget_text, read_outcomes
from benchmarks.planner.suite import BUDGETS, entries

_TITLES = (
    "case", "budget", "ms = communication + memory + products", "collectives", "predicted", "best expert", "its ms",
    "its collectives", "ratio", "gap", "GB predicted / taken / allowed",
)  # fmt: skip


def markdown(outcomes: Sequence[dict[str, Any]]) -> str:
    """A row for each case and budget of the suite that has an outcome, then how many there are of each kind."""
    by_key = {(outcome["case"], outcome["budget"]): outcome for outcome in outcomes}
    keys = [(entry.name, budget) for entry in entries() for budget in (math.inf, *BUDGETS)]
    ordered = [by_key[key] for key in keys if key in by_key]
    head = (f"| {' | '.join(_TITLES)} |", f"|{'---|' * len(_TITLES)}")
    return "\n".join((*head, *map(_row, ordered), "", summary(ordered), "", deviations(ordered)))


def _row(outcome: dict[str, Any]) -> str:
    return f"| {outcome['case']} | {budget_text(outcome['budget'])} | {' | '.join(_cells(outcome))} |"


def _cells(outcome: dict[str, Any]) -> Iterator[str]:
    ours, expert = outcome.get("ours"), outcome.get("expert")
    yield seconds(ours) if ours else _why_not(outcome)
    yield str(collectives_of(ours)) if ours else ""
    yield predicted(outcome["planner"]) if ours else ""
    yield outcome["best_expert"] if expert else "none fits"
    yield seconds(expert) if expert else ""
    yield str(collectives_of(expert)) if expert else ""
    ratio = ratio_of(outcome)
    yield "" if ratio is None else f"**{ratio:.3f}**" if ratio > 1.01 else f"{ratio:.3f}"
    yield _gap(outcome["planner"]["gap"]) if ours else ""
    yield _memory(outcome) if ours else ""


def _gap(gap: float | None) -> str:
    """How far from optimal the plan can be, by its own certificate."""
    if gap is None:
        return "none"
    return f"**{gap:.2%}**" if gap > BAR else f"{gap:.2%}"


def _why_not(outcome: dict[str, Any]) -> str:
    if "refused" in outcome:
        return "refused"
    return "**refused**" if outcome["error"].startswith("PlanRefused") else "**failed**"


def _memory(outcome: dict[str, Any]) -> str:
    taken, budget = outcome["ours"]["memory_bytes"], outcome["budget_bytes"]
    predicted = outcome["planner"]["predicted_memory_bytes"]
    said = " / ".join("?" if each is None else f"{each / 1e9:.2f}" for each in (predicted, taken, budget))
    return said if outcome["fits"] else f"**{said}**"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    print(markdown(read_outcomes(parser.parse_args().files)))


if __name__ == "__main__":
    main()
