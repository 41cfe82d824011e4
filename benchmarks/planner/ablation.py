"""Ablation of the mechanisms of memory and gap closing: the whole search with one of them switched off.

    python -m benchmarks.planner.ablation [--case lstm-1024-16] [--deadline 60] [--json FILE] [--markdown FILE]

The memory of a case is a part of data parallelism's. Each search runs in a child of its own, without shared caches and
with a deadline in CPU seconds. `mechanisms` lists the switches. A mechanism unused by the whole search is not measured.
Every first search is without warm start; the column of warm start is the next search of the same program, from the
record of the first.

With `--json` every outcome is written at once, and the next run of the same commit continues from the file.
`ablation_parts` switches off parts of one mesh's chain.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.planner import frozen
from benchmarks.planner.mechanisms import MECHANISMS, AblatedSearch
from benchmarks.planner.planned import lower
from benchmarks.planner.results import Results, budget_text, find_commit
from benchmarks.planner.run import compute_limit_bytes
from benchmarks.planner.suite import Entry, cluster_json, entries
from shardwright.clusters.cluster import Cluster
from shardwright.errors import ShardwrightError
from shardwright.options.plan_options import PlanOptions
from shardwright.planner.cache.store import FileStore
from shardwright.planner.gc_pause import gc_paused
from shardwright.planner.warm_start.search_records import SearchHistory

_ROOT = Path(__file__).resolve().parents[2]

#: CPU seconds of a search; limit of its child, as a multiple of them.
DEADLINE_S = 60.0
_MAX_CPU_RATIO = 5.0

#: CPU seconds of a mechanism up to which it counts as unused.
_MIN_CPU_S = 0.01

WARM_START = "warm start"
COLUMNS = (*MECHANISMS, WARM_START)

#: (case, part of data parallelism's memory), in the order of searching.
CASES = (
    *((name, 1.0) for name in ("lstm-1024-16", "gpt2-124M-8", "unet-128-8")),
    *((name, 0.25) for name in ("gpt2-124M-8-b8", "unet-128-8")),
    *((name, 1.0) for name in ("gpt2-124M-8-b8", "lstm-1024-8", "gpt2-124M-16")),
    *((name, 0.25) for name in ("gpt2-124M-8", "lstm-1024-16", "lstm-1024-8", "gpt2-124M-16")),
)

# ---- one search --------------------------------------------------------------------


def measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """Run one search; returns its outcome."""
    import jaxlib  # noqa: F401 - keeps the search from forking: all CPU seconds are this process's

    limit_s = math.ceil(_MAX_CPU_RATIO * job["deadline_s"])
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s + 10))
    is_warm_start = job["off"] == WARM_START
    text, cluster = Path(job["hlo"]).read_text(), Cluster.from_json(job["cluster"])
    options = PlanOptions(stages=1, memory_budget=job["budget_bytes"], deadline_s=job["deadline_s"])
    records = SearchHistory(FileStore(Path(job["records"])))
    start_s = time.process_time()
    with gc_paused():
        search = AblatedSearch("" if is_warm_start else job["off"], text, cluster, options, history=records)
        outcome: dict[str, Any]
        try:
            plan = search.run()
        except ShardwrightError as error:
            outcome = {"no_plan": f"{type(error).__name__}: {error.message}"}
        else:
            outcome = {
                "step_s": plan.cost.step_s, "bound_s": plan.cost.lower_bound_s if plan.cost.is_bounded else None,
                "mesh": str(plan.mesh), "micro_batches": plan.micro_batches,
            }  # fmt: skip
        cpu_s = time.process_time() - start_s
    if is_warm_start and search.record is None:
        return {"unused": "the first search left no record"}
    is_late = search.clock.elapsed_s > job["deadline_s"]
    return {**outcome, "cpu_s": cpu_s, "is_late": is_late, "spent_s": search.spent_s}


# ---- all of them -------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=sorted(dict(CASES)), help="may repeat (default: all)")
    parser.add_argument("--deadline", type=float, default=DEADLINE_S, metavar="S", help="CPU seconds of each search")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every outcome there, and go on from it")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(json.load(sys.stdin))))
        return
    results = Results(path=arguments.json, commit=find_commit(), how={"deadline_s": arguments.deadline})
    entry_of = {entry.name: entry for entry in entries()}
    chosen = [(entry_of[name], budget) for name, budget in CASES if name in (arguments.case or entry_of)]
    for entry, budget in chosen:
        run_case(entry, budget, results)
    rows = [results.of([entry], [budget], ("", *COLUMNS)) for entry, budget in chosen]
    Console(width=None if sys.stdout.isatty() else 160).print(_build_table(rows))
    if arguments.markdown:
        arguments.markdown.write_text(to_markdown(rows))


def run_case(entry: Entry, budget: float, results: Results) -> None:
    """Measure the outcomes of a case missing in the results."""
    missing = [off for off in COLUMNS if not results.has(entry, budget, off)]
    if results.has(entry, budget) and not missing:
        return
    with tempfile.TemporaryDirectory(prefix="ablation-") as folder:
        source, records = Path(folder) / "step.hlo", Path(folder) / "records"
        source.write_text(lower(entry).hlo_text)
        job = {
            "hlo": str(source), "cluster": cluster_json(entry.devices, entry.machine),
            "budget_bytes": compute_limit_bytes(frozen.read(entry), budget), "deadline_s": results.how["deadline_s"],
        }  # fmt: skip

        def add(off: str, outcome: Mapping[str, Any]) -> None:
            results.add({"case": entry.name, "budget": budget, "off": off, **outcome})
            print(entry.name, budget_text(budget), off or "nothing", json.dumps(outcome), file=sys.stderr, flush=True)

        if not results.has(entry, budget) or WARM_START in missing:  # its record is needed
            add("", _run_child({**job, "off": "", "records": str(records)}))
        spent_s = results.of([entry], [budget])[0].get("spent_s", {})
        for off in sorted(missing, key=lambda off: off != WARM_START):
            if off != WARM_START and spent_s.get(off, 0.0) < _MIN_CPU_S:
                add(off, {"unused": "the whole search does not use it"})
            else:
                add(
                    off,
                    _run_child({**job, "off": off, "records": str(records if off == WARM_START else records / off)}),
                )


def _run_child(job: Mapping[str, Any]) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.planner.ablation", "--child"]
    child = subprocess.run(command, cwd=_ROOT, input=json.dumps(job), capture_output=True, text=True, check=False)
    if child.returncode == -signal.SIGXCPU:
        return {"error": f"not done after {_MAX_CPU_RATIO * job['deadline_s']:.0f} CPU seconds"}
    if child.returncode:
        return {"error": (child.stderr.splitlines() or ["no message"])[-1]}
    answer: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    return answer


# ---- the table ---------------------------------------------------------------------


def _build_table(rows: Sequence[Sequence[Mapping[str, Any]]]) -> Table:
    table = Table(title="CPU seconds and step, beside nothing off; gap")
    for heading in ("case", "nothing off", *COLUMNS):
        table.add_column(heading, justify="left" if heading == "case" else "right")
    for row in rows:
        if row:
            table.add_row(*(cell.replace(", ", "\n") for cell in _format_cells(row)))
    return table


def to_markdown(rows: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    """The table of the documents."""
    headings = ("case", "nothing off", *COLUMNS)
    lines = [headings, ["---"] * len(headings), *(_format_cells(row) for row in rows if row)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _format_cells(row: Sequence[Mapping[str, Any]]) -> list[str]:
    """The cells of a case: its name, and for each column CPU seconds, step and gap."""
    outcomes = {outcome["off"]: outcome for outcome in row}
    whole = outcomes[""]
    cells = [f"{whole['case']} at {budget_text(whole['budget'])}", _format_cell(whole, None)]
    return cells + [_format_cell(outcomes[off], whole) if off in outcomes else "" for off in COLUMNS]


def _format_cell(outcome: Mapping[str, Any], whole: Mapping[str, Any] | None) -> str:
    """An outcome relative to the whole search's, or absolute if that has none."""
    if "unused" in outcome:
        return "not used"
    if "error" in outcome:
        return "failed"
    late = "*" if outcome.get("is_late") else ""
    cpu = f"{outcome['cpu_s']:.1f} s" if whole is None else f"× {outcome['cpu_s'] / whole['cpu_s']:.2f}"
    if "no_plan" in outcome:
        return f"{cpu}{late}, no plan"
    is_alone = whole is None or "step_s" not in whole
    step = f"{1e3 * outcome['step_s']:.2f} ms" if is_alone else f"× {outcome['step_s'] / whole['step_s']:.4f}"
    bound_s = outcome["bound_s"]
    gap = "no bound" if bound_s is None else f"{max(0.0, 1 - bound_s / outcome['step_s']):.1%}"
    return f"{cpu}{late}, {step}, {gap}"


if __name__ == "__main__":
    main()
