"""Rank correlation of predicted and compiled steps over the candidate plans of a case.

    python -m benchmarks.planner.rank --gpu-packages F --case gpt2-124M-8-b8 --case unet-128-8

Candidates: the plan of every forced strategy, and the search's. Prints for each case every candidate's predicted and
compiled milliseconds (communication + compute), and the rank correlation of the two steps (Spearman, 1904; ties share
their mean rank). The last line is the median over the cases.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.gpu_targets import TARGETS, add_packages_option, require_packages
from benchmarks.planner import frozen
from benchmarks.planner.partition import PartitionError
from benchmarks.planner.partitioned_text import CountingError
from benchmarks.planner.planned import Lowered, PlanningFailed, ProgramJudge, lower, plan
from benchmarks.planner.suite import Entry, entries, matches_name

#: Forced strategies; those not applicable to a case are left out.
STRATEGIES = ("data", "zero1", "fsdp", "tensor", "mixed", "megatron", "expert")

#: Name of the search's plan.
SEARCHED = "searched"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", required=True, metavar="NAME", help="cases whose name begins so")
    parser.add_argument("--limit", type=float, default=600.0, metavar="SECONDS", help="for one plan or program")
    parser.add_argument("--json", type=Path, help="write everything there")
    add_packages_option(parser)
    arguments = parser.parse_args()
    chosen = [entry for entry in entries() if any(matches_name(entry, name) for name in arguments.case)]
    if any(entry.machine in TARGETS for entry in chosen):
        require_packages(arguments)
    cases = {}
    for entry in chosen:
        cases[entry.name] = candidates = plan_candidates(entry, arguments.limit)
        print(f"{entry.name}: rank correlation {correlate_steps(candidates):.3f} of {len(candidates)}", flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(cases, indent=1) + "\n")
    correlations = [value for plans in cases.values() if not math.isnan(value := correlate_steps(plans))]
    if correlations:
        print(f"median {median(correlations):.3f} over {len(correlations)} cases")


def plan_candidates(entry: Entry, limit_s: float) -> dict[str, dict[str, Any]]:
    """Strategy → its plan's predictions and compiled figures; prints them, and the errors of the others."""
    lowered, program_judge = lower(entry), ProgramJudge(entry, limit_s)
    candidates: dict[str, dict[str, Any]] = {}
    for strategy in (*STRATEGIES, SEARCHED):
        try:
            candidates[strategy] = _plan_candidate(lowered, program_judge, strategy, limit_s)
        except (PlanningFailed, PartitionError, CountingError) as error:
            print(f"  {strategy:9} {str(error).splitlines()[0][:100]}", flush=True)
            continue
        prediction, compiled = candidates[strategy]["planner"], candidates[strategy]["compiled"]
        print(
            f"  {strategy:9} predicted {prediction['predicted_step_s'] * 1e3:8.2f} = "
            f"{prediction['predicted_communication_s'] * 1e3:.2f} + {prediction['predicted_compute_s'] * 1e3:.2f}, "
            f"compiled {frozen.step_s(compiled) * 1e3:8.2f} = {compiled['communication_s'] * 1e3:.2f} + "
            f"{(compiled['memory_s'] + compiled['product_s']) * 1e3:.2f} ms",
            flush=True,
        )
    return candidates


def _plan_candidate(lowered: Lowered, program_judge: ProgramJudge, strategy: str, limit_s: float) -> dict[str, Any]:
    options = {} if strategy == SEARCHED else {"force": strategy}
    with tempfile.TemporaryDirectory(prefix="bench-planner-") as folder:
        emitted = Path(folder) / "step.mlir"
        prediction = plan(lowered.hlo_text, program_judge.entry, options, limit_s=limit_s, emitted=emitted)
        compiled, counts = program_judge(emitted)
    return {"planner": prediction, "compiled": frozen.summarize_program(compiled, counts, program_judge.entry.machine)}


def correlate_steps(candidates: dict[str, dict[str, Any]]) -> float:
    """Spearman's correlation of predicted and compiled steps."""
    return spearman(
        [candidate["planner"]["predicted_step_s"] for candidate in candidates.values()],
        [frozen.step_s(candidate["compiled"]) for candidate in candidates.values()],
    )


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Pearson's correlation of two series' ranks; NaN for a series of equal values."""
    ranks = [_rank(np.asarray(series)) for series in (first, second)]
    if len(first) < 2 or any(np.ptp(values) == 0 for values in ranks):
        return math.nan
    return float(np.corrcoef(*ranks)[0, 1])


def _rank(values: np.ndarray) -> np.ndarray:
    """Ranks, 1 for the minimum; equal values share their mean rank."""
    _, indices, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return ((ends - counts + 1 + ends) / 2)[indices]


if __name__ == "__main__":
    main()
