"""Plans against the best hand-written sharding, case by case: `make bench-planner`, `make bench-planner-quick`.

For each case and memory budget (parts of data parallelism's memory): JAX lowers the step for one device, the planner
plans the text, the machine's XLA compiles the emitted program, and the counter judges it. The experts' programs were
counted in the same way beforehand (`frozen`); the plan is compared with the fastest expert within the budget.

With `--json` every outcome is written at once, and the next run of the same commit continues from the file.
`python -m benchmarks.planner.table` merges such files.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_targets import TARGETS, add_packages_option, require_packages
from benchmarks.planner import frozen
from benchmarks.planner.judge import MACHINES
from benchmarks.planner.partition import PartitionError
from benchmarks.planner.partitioned_text import CountingError
from benchmarks.planner.planned import Lowered, PlanningFailed, PlanRefused, ProgramJudge, lower, plan
from benchmarks.planner.report import misses_the_bar, print_outcomes, print_timings, step_ratio
from benchmarks.planner.results import Results, budget_text, find_commit
from benchmarks.planner.suite import BUDGETS, QUICK, UNSEEN, Entry, entries, matches_name
from benchmarks.planner.timing import BARS, measure_timings

#: Limit in seconds of one plan, or of the compilation of one program.
LIMIT_S = 600.0

#: Errors of one case; the next one still runs.
CaseFailed = (PlanningFailed, PartitionError, CountingError)


def main() -> None:
    arguments = _parse_arguments()
    how = {"deadline": arguments.deadline, "limit_s": arguments.limit}
    results = Results(path=arguments.json, commit=find_commit(), how=how)
    chosen = [entry for entry in (UNSEEN if arguments.unseen else entries()) if _is_selected(entry, arguments)]
    if any(entry.machine in TARGETS for entry in chosen):
        require_packages(arguments)
    for entry in chosen:
        budgets = select_budgets(entry, arguments.budgets, arguments.with_expert)
        missing = [budget for budget in budgets if not results.has(entry, budget)]
        for outcome in run_entry(entry, missing, how):
            results.add(outcome)
    outcomes = results.of(chosen, arguments.budgets)
    print_outcomes(outcomes)
    if arguments.timing is not None:
        results.timings = measure_timings(arguments.limit, arguments.timing or tuple(BARS))
        results.write()
        print_timings(results.timings)
    if arguments.json:
        print(f"written to {arguments.json}")
    sys.exit(any(misses_the_bar(outcome) for outcome in outcomes))


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one case a model, the whole budget only")
    parser.add_argument(
        "--unseen", action="store_true", help="models that the planner was not built on, in place of the suite"
    )
    parser.add_argument("--case", action="append", metavar="NAME", help="cases whose name begins so; may be repeated")
    parser.add_argument("--devices", type=int, action="append", help="only on so many devices; may be repeated")
    parser.add_argument(
        "--budgets", type=_parse_budget, nargs="+", metavar="PART",
        help="parts of data parallelism's memory, or `device`: all of the device's own",
    )  # fmt: skip
    parser.add_argument("--deadline", type=float, help="seconds for each search")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds until a plan or program counts as failed")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--with-expert", dest="with_expert", action="store_const", const=True, help="only budgets that an expert fits"
    )
    which.add_argument(
        "--without-expert", dest="with_expert", action="store_const", const=False, help="only budgets that none fits"
    )
    parser.add_argument("--machine", action="append", choices=sorted(MACHINES), help="only on it; may be repeated")
    parser.add_argument(
        "--timing", type=int, nargs="*", metavar="LAYERS", help="also time GPT-2 against lowering (12 and 96 layers)"
    )
    parser.add_argument("--json", type=Path, help="write everything there")
    add_packages_option(parser)
    arguments = parser.parse_args()
    arguments.budgets = arguments.budgets or ([1.0] if arguments.quick else list(BUDGETS))
    return arguments


def _parse_budget(text: str) -> float:
    return math.inf if text == "device" else float(text)


def compute_limit_bytes(experts: Mapping[str, Any], budget: float) -> int | None:
    """Bytes of a budget, a part of data parallelism's memory; None for the device's memory."""
    return None if math.isinf(budget) else round(experts["data"]["memory_bytes"] * budget)


def _is_selected(entry: Entry, arguments: argparse.Namespace) -> bool:
    if arguments.case and not any(matches_name(entry, name) for name in arguments.case):
        return False
    if arguments.devices and entry.devices not in arguments.devices:
        return False
    if arguments.machine and entry.machine not in arguments.machine:
        return False
    return entry.name in QUICK if arguments.quick else True


def select_budgets(entry: Entry, budgets: Sequence[float], with_expert: bool | None) -> list[float]:
    """Select budgets (parts of data parallelism's memory) by experts within them.

    with_expert: True: budgets with a fitting expert, False: those without, None: all. A case without frozen experts
        keeps all.
    """
    if with_expert is None or not frozen.is_frozen(entry):
        return list(budgets)
    experts = frozen.read(entry)
    whole = experts["data"]["memory_bytes"]
    fitting = (frozen.find_fastest_fitting(experts, budget * whole) for budget in budgets)
    return [b for b, best in zip(budgets, fitting, strict=True) if (best is not None) == with_expert]


def run_entry(entry: Entry, budgets: Sequence[float], how: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Run a case: one outcome for each budget, with the error of a failed one.

    how: `deadline` of each search (None: none), and `limit_s` for one plan or program.
    """
    if not budgets:
        return
    try:
        experts = frozen.count_experts(entry)[0] if entry in UNSEEN else frozen.read(entry)
    except frozen.NotFrozen as error:
        print(f"{entry.name}: {error}", flush=True)
        for budget in budgets:
            yield {"case": entry.name, "budget": budget, "error": str(error)}
        return
    lowered = lower(entry)
    program_judge = ProgramJudge(entry, how["limit_s"])
    for budget in budgets:
        limit_bytes = compute_limit_bytes(experts, budget)
        best = frozen.find_fastest_fitting(experts, limit_bytes or math.inf)
        outcome: dict[str, Any] = {
            "case": entry.name, "machine": entry.machine, "changes": dict(entry.changes),
            "budget": budget, "budget_bytes": limit_bytes,
            "lower_s": lowered.lower_s, "as_text_s": lowered.as_text_s,
            "best_expert": best, "expert": experts[best] if best else None,
        }  # fmt: skip
        try:
            _add_ours(outcome, lowered, program_judge, how)
        except CaseFailed as error:
            kind = "refused" if isinstance(error, PlanRefused) and best is None else "error"
            outcome[kind] = f"{type(error).__name__}: {error}"
        print(_format_line(outcome), flush=True)
        yield outcome


def _add_ours(outcome: dict[str, Any], lowered: Lowered, program_judge: ProgramJudge, how: Mapping[str, Any]) -> None:
    """Add the planner's side to an outcome, step by step. Raises CaseFailed."""
    options = {"memory_budget": outcome["budget_bytes"], "deadline": how["deadline"]}
    with tempfile.TemporaryDirectory(prefix="bench-planner-") as folder:
        emitted = Path(folder) / "step.mlir"
        outcome["planner"] = plan(
            lowered.hlo_text, program_judge.entry, options, limit_s=how["limit_s"], emitted=emitted
        )
        partitioned, counts = program_judge(emitted)
    outcome["ours"] = frozen.summarize_program(partitioned, counts, program_judge.entry.machine)
    memory_bytes, limit_bytes = partitioned.memory_bytes, outcome["budget_bytes"]
    outcome["fits"] = memory_bytes is None or limit_bytes is None or memory_bytes <= limit_bytes


def _format_line(outcome: dict[str, Any]) -> str:
    head = f"{outcome['case']} at {budget_text(outcome['budget'])}:"
    if "ours" not in outcome:
        return f"{head} {outcome.get('error') or outcome['refused']}"
    ratio = step_ratio(outcome)
    against = f"{ratio:.3f} of {outcome['best_expert']}" if ratio else "no expert fits"
    over = "" if outcome["fits"] else ", over the budget"
    return f"{head} {against}, {outcome['ours']['wire_bytes'] / 1e6:.0f} MB on the wire{over}"


if __name__ == "__main__":
    main()
