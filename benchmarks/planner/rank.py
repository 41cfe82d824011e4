"""Whether predicted steps order the candidates of a case as compiled steps do.

    python -m benchmarks.planner.rank --gpu-packages F --case gpt2-124M-8-b8 --case unet-128-8

Candidates are the plans of every strategy that can be forced on the case, and the one that the search finds. For each
case: every candidate's predicted and compiled milliseconds (communication + compute), and the rank correlation of the
two steps (Spearman, 1904; ties share their mean rank). The last line is the median over the cases.
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
from benchmarks.planner.planned import Judging, Lowered, PlanningFailed, lower, plan
from benchmarks.planner.suite import Entry, entries, is_meant

#: Strategies that are forced; one that does not fit a case is left out.
STRATEGIES = ("data", "zero1", "fsdp", "tensor", "mixed", "megatron", "expert")

#: What the search finds, among them.
SEARCHED = "searched"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", required=True, metavar="NAME", help="cases whose name begins so")
    parser.add_argument("--limit", type=float, default=600.0, metavar="SECONDS", help="for one plan or program")
    parser.add_argument("--json", type=Path, help="write everything there")
    add_packages_option(parser)
    arguments = parser.parse_args()
    chosen = [entry for entry in entries() if any(is_meant(entry, name) for name in arguments.case)]
    if any(entry.machine in TARGETS for entry in chosen):
        require_packages(arguments)
    cases = {}
    for entry in chosen:
        cases[entry.name] = candidates = candidates_of(entry, arguments.limit)
        print(f"{entry.name}: rank correlation {correlation(candidates):.3f} of {len(candidates)}", flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(cases, indent=1) + "\n")
    known = [value for each in cases.values() if not math.isnan(value := correlation(each))]
    if known:
        print(f"median {median(known):.3f} over {len(known)} cases")


def candidates_of(entry: Entry, limit_s: float) -> dict[str, dict[str, Any]]:
    """Strategy → what its plan says, and its compiled figures; those that could not be planned are printed."""
    lowered, judging = lower(entry), Judging(entry, limit_s)
    result: dict[str, dict[str, Any]] = {}
    for strategy in (*STRATEGIES, SEARCHED):
        try:
            result[strategy] = _candidate(lowered, judging, strategy, limit_s)
        except (PlanningFailed, PartitionError, CountingError) as error:
            print(f"  {strategy:9} {str(error).splitlines()[0][:100]}", flush=True)
            continue
        said, compiled = result[strategy]["planner"], result[strategy]["compiled"]
        print(
            f"  {strategy:9} predicted {said['predicted_step_s'] * 1e3:8.2f} = "
            f"{said['predicted_communication_s'] * 1e3:.2f} + {said['predicted_compute_s'] * 1e3:.2f}, compiled "
            f"{frozen.step_s(compiled) * 1e3:8.2f} = {compiled['communication_s'] * 1e3:.2f} + "
            f"{(compiled['memory_s'] + compiled['product_s']) * 1e3:.2f} ms",
            flush=True,
        )
    return result


def _candidate(lowered: Lowered, judging: Judging, strategy: str, limit_s: float) -> dict[str, Any]:
    options = {} if strategy == SEARCHED else {"force": strategy}
    with tempfile.TemporaryDirectory(prefix="bench-planner-") as folder:
        emitted = Path(folder) / "step.mlir"
        said = plan(lowered.hlo_text, judging.entry, options, limit_s=limit_s, emitted=emitted)
        compiled, counted = judging(emitted)
    return {"planner": said, "compiled": frozen.figures(compiled, counted, judging.entry.machine)}


def correlation(candidates: dict[str, dict[str, Any]]) -> float:
    """Of the predicted steps with the compiled ones."""
    return spearman(
        [each["planner"]["predicted_step_s"] for each in candidates.values()],
        [frozen.step_s(each["compiled"]) for each in candidates.values()],
    )


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """The correlation of two series' ranks; not a number where one of them has only equal values."""
    ranks = [_ranks(np.asarray(series)) for series in (first, second)]
    if len(first) < 2 or any(np.ptp(each) == 0 for each in ranks):
        return math.nan
    return float(np.corrcoef(*ranks)[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    """1 for the least; equal values share their mean rank."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return ((ends - counts + 1 + ends) / 2)[places]


if __name__ == "__main__":
    main()
