"""Time to the first plan: CPU seconds from the end of parsing to the first plan that fits, with a deadline.

    python -m benchmarks.planner.first --case unet-128-8 --case gpt2-124M-16 --budgets 1 0.5
    python -m benchmarks.planner.first --case gpt2-124M-8 --layers 96 --budgets none

Budgets are parts of data parallelism's memory (`benchmarks/planner/experts`); `none`: the device's memory. Each is
planned in a process of its own, up to its first plan.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.planner import frozen
from benchmarks.planner.children import plan_in_child
from benchmarks.planner.planned import lower
from benchmarks.planner.suite import Entry, entries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", metavar="NAME", required=True, help="MODEL-SIZE-DEVICES; repeatable")
    parser.add_argument("--layers", type=int, help="layers of these cases' models")
    parser.add_argument("--budgets", nargs="*", default=["none"], metavar="PART", help="of data parallelism, or `none`")
    arguments = parser.parse_args()
    entry_of = {entry.name: entry for entry in entries()}
    for name in arguments.case:
        entry = entry_of[name]
        if arguments.layers:
            entry = replace(entry, changes={"layers": arguments.layers})
        with tempfile.TemporaryDirectory(prefix="bench-planner-") as folder:
            source = Path(folder) / "step.hlo"
            source.write_text(lower(entry).hlo_text)
            for budget in arguments.budgets:
                limit = _limit_bytes(entry, budget)
                answer = plan_in_child("benchmarks.planner.first", entry, source, memory_budget=limit)
                print(
                    f"{name:16} {budget:>5}  {answer['first_s']:6.2f} s  {answer['step_s'] * 1e3:9.2f} ms", flush=True
                )


def _limit_bytes(entry: Entry, budget: str) -> int | None:
    return None if budget == "none" else round(float(budget) * frozen.read(entry)["data"]["memory_bytes"])


def child() -> None:
    """Plan the job on stdin until the first plan that fits; print its CPU seconds and its step."""
    from shardwright.clusters.cluster import Cluster
    from shardwright.options.plan_options import PlanOptions
    from shardwright.planner.graph.source import Source
    from shardwright.planner.search.search import Search, plan
    from shardwright.planner.search.solutions import CandidatePlan

    job: dict[str, Any] = json.load(sys.stdin)
    source = Source(Path(job["hlo"]).read_text())
    assert source.module, "parsed ahead of the timed part"
    cluster = Cluster.from_json(job["cluster"])
    start_s = time.process_time()

    def report_first(_: Search, candidate: CandidatePlan) -> NoReturn:
        print(json.dumps({"first_s": time.process_time() - start_s, "step_s": candidate.cost.step_s}))
        sys.exit()

    Search.offer = report_first  # type: ignore[assignment,method-assign]
    options = PlanOptions(deadline_s=600.0, memory_budget=job["memory_budget"])
    plan(source, cluster, options)


if __name__ == "__main__":
    main()
