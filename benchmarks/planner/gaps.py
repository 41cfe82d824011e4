"""How far from optimal the benchmark's plans can be, by their own certificates: the widest gaps first.

    python -m benchmarks.planner.gaps                            # every case, no memory limit but the devices' own
    python -m benchmarks.planner.gaps --budgets 0.5 --devices 8  # half of what data parallelism takes

Nothing is partitioned: what is printed is what each plan says of itself, `CostSummary.gap`. A plan without a bound on
its own mesh has none, and comes before all others. With `--json` a run that is stopped goes on, as `run` does. The exit
status is 1 where a gap is wider than the bar.
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
from benchmarks.planner.results import Results, commit
from benchmarks.planner.suite import Entry, entries, is_meant

#: The widest gap of a plan at default effort.
BAR = 0.01

#: Stands for no budget but the devices' memory.
UNLIMITED = math.inf

#: Seconds after which a plan counts as failed.
LIMIT_S = 600.0


def main() -> None:
    arguments = _arguments()
    how = {"what": "gaps"}
    results = Results(path=arguments.json, commit=commit(), how=how)
    chosen = [entry for entry in entries() if _is_chosen(entry, arguments)]
    for entry in chosen:
        missing = [budget for budget in arguments.budgets if not results.has(entry, budget)]
        for outcome in _outcomes(entry, missing):
            print(_row(outcome), flush=True)
            results.add(outcome)
    print(markdown(results.of(chosen, arguments.budgets)))
    sys.exit(any(_width(outcome) > BAR for outcome in results.of(chosen, arguments.budgets)))


def markdown(outcomes: Sequence[dict[str, Any]]) -> str:
    """A table of the outcomes, those that are certified worst first, and how many meet the bar."""
    ordered = sorted(outcomes, key=_width, reverse=True)
    planned = [outcome for outcome in outcomes if "step_s" in outcome]
    within = sum(_width(outcome) <= BAR for outcome in planned)
    head = ("| case | budget | mesh | step | gap | planning |", "|---|---|---|---|---|---|")
    return "\n".join((*head, *map(_row, ordered), "", f"{within} of {len(planned)} plans within {BAR:.0%}."))


def _outcomes(entry: Entry, budgets: Sequence[float]) -> Iterator[dict[str, Any]]:
    if not budgets:
        return
    text = lower(entry).hlo_text
    for budget in budgets:
        options = {}
        if budget < UNLIMITED:
            options["memory_budget"] = round(frozen.read(entry)["data"]["memory_bytes"] * budget)
        outcome: dict[str, Any] = {"case": entry.name, "budget": budget}
        try:
            said = plan(text, entry, options, limit_s=LIMIT_S)
        except PlanRefused:
            yield {**outcome, "refused": True}
        except PlanningFailed as error:
            yield {**outcome, "error": str(error)}
        else:
            result = {"mesh": said["mesh"], "step_s": said["predicted_step_s"], "planning_s": said["planning_s"]}
            yield {**outcome, **result, "gap": said["gap"]}


def _width(outcome: dict[str, Any]) -> float:
    """The gap; what is not certified is wider than any, what fits no device has none."""
    if "refused" in outcome:
        return 0.0
    gap = outcome.get("gap")
    return math.inf if gap is None else float(gap)


def _row(outcome: dict[str, Any]) -> str:
    budget = "none" if outcome["budget"] == UNLIMITED else f"{outcome['budget']:.0%}"
    head = f"| {outcome['case']} | {budget} |"
    if "step_s" not in outcome:
        return f"{head} {'refused' if 'refused' in outcome else '**failed**'} | | | |"
    gap = "none" if outcome["gap"] is None else f"{outcome['gap']:.2%}"
    gap = f"**{gap}**" if _width(outcome) > BAR else gap
    return f"{head} {outcome['mesh']} | {outcome['step_s'] * 1e3:.2f} ms | {gap} | {outcome['planning_s']:.1f} s |"


def _is_chosen(entry: Entry, arguments: argparse.Namespace) -> bool:
    named = not arguments.case or any(is_meant(entry, name) for name in arguments.case)
    return named and (not arguments.devices or entry.devices in arguments.devices)


def _arguments() -> argparse.Namespace:
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
