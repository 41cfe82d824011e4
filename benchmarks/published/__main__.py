"""Plan published training runs as they were run: step and memory beside what was measured, and the order of plans.

python -m benchmarks.published [--only mpt-7b] [--group NAME] [--sample 20] [--free] [--json FILE] [--resume]

Rows are those of `rows.json` (fields: rows.py). `--only`: rows whose id begins so, may repeat; `--group`: one sweep.
`--sample`: as many, one of each sweep before a second of any. `--free`: the planner's own choice, not the row's plan.
`--json` writes a line a row as it goes on; `--resume` leaves out rows that are in that file already.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain, zip_longest
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from rich.console import Console
from rich.table import Table

from benchmarks.published.judge import Prediction, predict, rank, summarize
from benchmarks.published.rows import ROWS, PublishedRow, read_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=ROWS, help="another file of rows")
    parser.add_argument("--only", action="append", metavar="ID")
    parser.add_argument("--group")
    parser.add_argument("--sample", type=int)
    parser.add_argument("--free", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--resume", action="store_true")
    arguments = parser.parse_args()
    rows = [
        row
        for row in read_rows(arguments.rows)
        if (arguments.group in (None, row.group)) and row.id.startswith(tuple(arguments.only or [""]))
    ]
    rows = take_sample(rows, arguments.sample) if arguments.sample else rows
    known = _read(arguments.json) if arguments.json and arguments.resume and arguments.json.exists() else {}
    options = {"force": None, "mesh": None, "micro_batches": None, "stages": None, "schedule": None}
    predictions = []
    for row in rows:
        one = known.get(row.id) or predict(row, **(options if arguments.free else {}))
        predictions.append(one)
        if row.id not in known:
            print(f"{one.id}: {one.plan_s:.1f} s {one.refusal}", file=sys.stderr, flush=True)
            if arguments.json:
                with arguments.json.open("a") as file:
                    file.write(json.dumps(asdict(one)) + "\n")
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(_build_table(rows, predictions))
    for order in rank(rows, predictions):
        if order.pairs:
            console.print(f"{order.group}: {order.right} of {order.pairs} pairs in order")
    console.print(summarize(rows, predictions))


def take_sample(rows: Sequence[PublishedRow], count: int) -> list[PublishedRow]:
    """So many rows, one of each sweep before a second of any."""
    sweeps: dict[str, list[PublishedRow]] = defaultdict(list)
    for row in rows:
        sweeps[row.group].append(row)
    return [row for row in chain.from_iterable(zip_longest(*sweeps.values())) if row is not None][:count]


def _read(path: Path) -> dict[str, Prediction]:
    return {one["id"]: Prediction(**one) for one in map(json.loads, path.read_text().splitlines())}


def _build_table(rows: Sequence[PublishedRow], predictions: Sequence[Prediction]) -> Table:
    table = Table("run", "plan", "measured", "predicted", "ratio", "memory", "predicted", box=None)
    for row, one in zip(rows, predictions, strict=True):
        measured = row.measured
        memory = (
            "out of it" if measured.oom else "" if measured.memory_gib is None else f"{measured.memory_gib:.1f} GiB"
        )
        step = "" if measured.step_s is None else f"{measured.step_s:.3f} s"
        if one.step_s is None or one.peak_bytes is None or one.layout is None:
            table.add_row(row.id, f"none: {one.refusal}", step, "", "", memory, "")
            continue
        ratio = "" if measured.step_s is None else f"{one.step_s / measured.step_s:.2f}"
        over = " (too much)" if one.peak_bytes > (one.device_bytes or 0) else ""
        peak = f"{one.peak_bytes / 2**30:.1f} GiB{over}"
        table.add_row(row.id, one.layout, step, f"{one.step_s:.3f} s", ratio, memory, peak)
    return table


if __name__ == "__main__":
    main()
