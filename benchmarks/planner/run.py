"""Plans against the best hand-written sharding, case by case: `make bench-planner`, `make bench-planner-quick`.

For each case and memory budget (parts of what data parallelism takes): JAX lowers the step for one device, the planner
plans that text, XLA partitions what the plan emits, and the counter judges it. The experts' programs were counted in
the same way beforehand (`frozen`); the best of those that fit the budget is what the plan is held against.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.planner import frozen
from benchmarks.planner.partition import PartitionError
from benchmarks.planner.partitioned_text import CountingError
from benchmarks.planner.planned import Judging, Lowered, PlanningFailed, PlanRefused, lower, plan
from benchmarks.planner.report import misses_the_bar, print_outcomes, print_timings, ratio_of
from benchmarks.planner.suite import BUDGETS, QUICK, Entry, entries
from benchmarks.planner.timing import measure_timings

#: Seconds that one plan, or the partitioning of one program, may take before the case counts as failed.
LIMIT_S = 600.0


def main() -> None:
    arguments = _arguments()
    chosen = [entry for entry in entries() if _is_chosen(entry, arguments)]
    outcomes = [outcome for entry in chosen for outcome in run_entry(entry, arguments.budgets, arguments.deadline)]
    timings = measure_timings(LIMIT_S) if arguments.timing else []
    print_outcomes(outcomes)
    print_timings(timings)
    if arguments.json:
        report = {"outcomes": outcomes, "timings": timings}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
        print(f"written to {arguments.json}")
    sys.exit(any(misses_the_bar(outcome) for outcome in outcomes))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one case a model, the whole budget only")
    parser.add_argument("--case", action="append", metavar="NAME", help="cases whose name begins so; may be repeated")
    parser.add_argument("--devices", type=int, action="append", help="only on so many devices; may be repeated")
    parser.add_argument("--budgets", type=float, nargs="+", metavar="PART", help="parts of data parallelism's memory")
    parser.add_argument("--deadline", type=float, help="seconds for each search")
    parser.add_argument("--timing", action="store_true", help="also time GPT-2 of 12 and 96 layers against lowering")
    parser.add_argument("--json", type=Path, help="write everything there")
    arguments = parser.parse_args()
    arguments.budgets = arguments.budgets or ([1.0] if arguments.quick else list(BUDGETS))
    return arguments


def _is_chosen(entry: Entry, arguments: argparse.Namespace) -> bool:
    if arguments.case and not any(entry.name.startswith(name) for name in arguments.case):
        return False
    if arguments.devices and entry.devices not in arguments.devices:
        return False
    return entry.name in QUICK if arguments.quick else True


def run_entry(entry: Entry, budgets: Sequence[float], deadline: float | None) -> list[dict[str, Any]]:
    """One outcome for each budget; a case that fails says why and the next goes on."""
    try:
        experts = frozen.read(entry)
        lowered = lower(entry)
    except frozen.NotFrozen as error:
        print(f"{entry.name}: {error}", flush=True)
        return [{"case": entry.name, "budget": budget, "error": str(error)} for budget in budgets]
    judging = Judging(entry, LIMIT_S)
    outcomes = []
    for budget in budgets:
        limit_bytes = round(experts["data"]["memory_bytes"] * budget)
        best = frozen.best_that_fits(experts, limit_bytes, entry.machine)
        outcome: dict[str, Any] = {
            "case": entry.name, "machine": entry.machine, "changes": dict(entry.changes),
            "budget": budget, "budget_bytes": limit_bytes,
            "lower_s": lowered.lower_s, "as_text_s": lowered.as_text_s,
            "best_expert": best, "expert": experts[best] if best else None,
        }  # fmt: skip
        options = {"memory_budget": limit_bytes, **({} if deadline is None else {"deadline": deadline})}
        try:
            outcome.update(_ours(entry, lowered, judging, options))
        except (PlanningFailed, PartitionError, CountingError) as error:
            kind = "refused" if isinstance(error, PlanRefused) and best is None else "error"
            outcome[kind] = f"{type(error).__name__}: {error}"
        outcomes.append(outcome)
        print(_line(outcome), flush=True)
    return outcomes


def _ours(entry: Entry, lowered: Lowered, judging: Judging, options: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="bench-planner-") as folder:
        emitted = Path(folder) / "step.mlir"
        said = plan(lowered.hlo_text, entry, options, limit_s=LIMIT_S, emitted=emitted)
        partitioned, counted = judging(emitted)
    ours = frozen.figures(partitioned, counted)
    fits = partitioned.memory_bytes is None or partitioned.memory_bytes <= options["memory_budget"]
    return {"planner": said, "ours": ours, "fits": fits}


def _line(outcome: dict[str, Any]) -> str:
    head = f"{outcome['case']} at {outcome['budget']:.0%}:"
    if "ours" not in outcome:
        return f"{head} {outcome.get('error') or outcome['refused']}"
    ratio = ratio_of(outcome)
    against = f"{ratio:.3f} of {outcome['best_expert']}" if ratio else "no expert fits"
    return f"{head} {against}, {outcome['ours']['wire_bytes'] / 1e6:.0f} MB on the wire"


if __name__ == "__main__":
    main()
