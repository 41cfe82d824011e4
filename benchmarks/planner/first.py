"""How soon the first plan is there: CPU seconds from the end of parsing to the first that fits, with a deadline.

    python -m benchmarks.planner.first --case unet-128-8 --case gpt2-124M-16 --budgets 1 0.5
    python -m benchmarks.planner.first --case gpt2-124M-8 --layers 96 --budgets none

Budgets are parts of what data parallelism takes (`benchmarks/planner/experts`), memory is predicted for XLA:CPU, which
that was counted from; `none`: all that a device has. Each is planned in a process of its own, which ends there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.planner import frozen
from benchmarks.planner.plan_child import _predict_memory_for
from benchmarks.planner.planned import lower
from benchmarks.planner.suite import Entry, cluster_json, entries

_ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", metavar="NAME", required=True, help="MODEL-SIZE-DEVICES; repeatable")
    parser.add_argument("--layers", type=int, help="layers of these cases' models")
    parser.add_argument("--budgets", nargs="*", default=["none"], metavar="PART", help="of data parallelism, or `none`")
    arguments = parser.parse_args()
    known = {entry.name: entry for entry in entries()}
    for name in arguments.case:
        entry = known[name]
        if arguments.layers:
            entry = replace(entry, changes={"layers": arguments.layers})
        with tempfile.TemporaryDirectory(prefix="bench-planner-") as folder:
            source = Path(folder) / "step.hlo"
            source.write_text(lower(entry).hlo_text)
            for budget in arguments.budgets:
                said = _in_a_child(entry, source, None if budget == "none" else float(budget))
                print(f"{name:16} {budget:>5}  {said['first_s']:6.2f} s  {said['step_s'] * 1e3:9.2f} ms", flush=True)


def _in_a_child(entry: Entry, source: Path, budget: float | None) -> dict[str, float]:
    limit = None if budget is None else round(budget * frozen.read(entry)["data"]["memory_bytes"])
    job = {"hlo": str(source), "cluster": cluster_json(entry.devices, entry.machine), "memory_budget": limit}
    command = [sys.executable, "-c", "from benchmarks.planner.first import child; child()"]
    made = subprocess.run(command, cwd=_ROOT, input=json.dumps(job), capture_output=True, text=True, check=True)
    answer: dict[str, float] = json.loads(made.stdout)
    return answer


def child() -> None:
    """Plan the job on stdin until the first plan that fits is offered; print when that was, and its step."""
    from shardwright.cluster import Cluster
    from shardwright.config import PlanOptions
    from shardwright.planner.graph.source import Source
    from shardwright.planner.search.found import Found
    from shardwright.planner.search.search import Search, plan

    job: dict[str, Any] = json.load(sys.stdin)
    if job["memory_budget"]:
        _predict_memory_for("cpu")
    source = Source(Path(job["hlo"]).read_text())
    assert source.module, "parsed ahead of what is timed"
    cluster = Cluster.from_json(job["cluster"])
    started_s = time.process_time()

    def first(_: Search, found: Found) -> NoReturn:
        print(json.dumps({"first_s": time.process_time() - started_s, "step_s": found.cost.step_s}))
        sys.exit()

    Search.offer = first  # type: ignore[assignment,method-assign]
    options = PlanOptions(deadline_s=600.0, memory_budget=job["memory_budget"])
    plan(source, cluster, options)


if __name__ == "__main__":
    main()
