"""Optimality gaps of the benchmark's plans, by their own lower bounds: the widest first.

    python -m benchmarks.planner.gaps                            # every case, no memory limit but the devices' own
    python -m benchmarks.planner.gaps --budgets 0.5 --devices 8  # half of what data parallelism takes

Nothing is partitioned: the gap is the plan's own `CostSummary.gap`. A plan without a bound on its own mesh comes
first. With `--json` the next run continues a stopped one, like `run`. Exit code 1 if a gap is wider than the bar.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.planner import frozen
from benchmarks.planner.planned import PlanningFailed, PlanRefused, lower, plan
from benchmarks.planner.results import Results, find_commit
from benchmarks.planner.suite import Entry, entries, matches_name

#: The widest gap of a plan at default effort.
BAR = 0.01

#: The budget of all of the devices' memory.
UNLIMITED = math.inf

#: Seconds after which a plan counts as failed.
LIMIT_S = 600.0


def main() -> None:
    arguments = _parse_arguments()
    how = {"what": "gaps"}
    results = Results(path=arguments.json, commit=find_commit(), how=how)
    chosen = [entry for entry in entries() if _is_selected(entry, arguments)]
    for entry in chosen:
        missing = [budget for budget in arguments.budgets if not results.has(entry, budget)]
        for outcome in _plan_budgets(entry, missing):
            print(_format_row(outcome), flush=True)
            results.add(outcome)
    print(markdown(results.of(chosen, arguments.budgets)))
    sys.exit(any(_gap_width(outcome) > BAR for outcome in results.of(chosen, arguments.budgets)))


def markdown(outcomes: Sequence[dict[str, Any]]) -> str:
    """A table of the outcomes, widest gap first, and the number of plans within the bar."""
    ordered = sorted(outcomes, key=_gap_width, reverse=True)
    planned = [outcome for outcome in outcomes if "step_s" in outcome]
    within = sum(_gap_width(outcome) <= BAR for outcome in planned)
    head = ("| case | budget | mesh | step | gap | planning |", "|---|---|---|---|---|---|")
    return "\n".join((*head, *map(_format_row, ordered), "", f"{within} of {len(planned)} plans within {BAR:.0%}."))


def _plan_budgets(entry: Entry, budgets: Sequence[float]) -> Iterator[dict[str, Any]]:
    if not budgets:
        return
    text = lower(entry).hlo_text
    for budget in budgets:
        options = {}
        if budget < UNLIMITED:
            options["memory_budget"] = round(frozen.read(entry)["data"]["memory_bytes"] * budget)
        outcome: dict[str, Any] = {"case": entry.name, "budget": budget}
        try:
            answer = plan(text, entry, options, limit_s=LIMIT_S)
        except PlanRefused:
            yield {**outcome, "refused": True}
        except PlanningFailed as error:
            yield {**outcome, "error": str(error)}
        else:
            result = {"mesh": answer["mesh"], "step_s": answer["predicted_step_s"], "planning_s": answer["planning_s"]}
            yield {**outcome, **result, "gap": answer["gap"]}


def _gap_width(outcome: dict[str, Any]) -> float:
    """The gap; infinite without a bound, zero for a refused plan."""
    if "refused" in outcome:
        return 0.0
    gap = outcome.get("gap")
    return math.inf if gap is None else float(gap)


def _format_row(outcome: dict[str, Any]) -> str:
    budget = "none" if outcome["budget"] == UNLIMITED else f"{outcome['budget']:.0%}"
    head = f"| {outcome['case']} | {budget} |"
    if "step_s" not in outcome:
        return f"{head} {'refused' if 'refused' in outcome else '**failed**'} | | | |"
    gap = "none" if outcome["gap"] is None else f"{outcome['gap']:.2%}"
    gap = f"**{gap}**" if _gap_width(outcome) > BAR else gap
    return f"{head} {outcome['mesh']} | {outcome['step_s'] * 1e3:.2f} ms | {gap} | {outcome['planning_s']:.1f} s |"


def _is_selected(entry: Entry, arguments: argparse.Namespace) -> bool:
    named = not arguments.case or any(matches_name(entry, name) for name in arguments.case)
    return named and (not arguments.devices or entry.devices in arguments.devices)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", metavar="NAME", help="cases whose name begins so; may be repeated")
    parser.add_argument("--devices", type=int, action="append", help="only on so many devices; may be repeated")
    parser.add_argument(
        "--budgets", type=float, nargs="+", metavar="PART", default=[UNLIMITED],
        help="parts of data parallelism's memory (default: the devices' own)",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, help="keep everything there")
    return parser.parse_args()


if __name__ == "__main__":
    main()
