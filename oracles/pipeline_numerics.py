"""Five steps of every model in a pipeline on real servers, beside single-device JAX.

    make check-pipelines          (or: python -m oracles.pipeline_numerics --workers 2 --model moe)

Every schedule on one, two and four workers of a cluster of eight CPU devices, two stages, four micro-batches. The loss
must agree within 1e-5, parameters within 1e-5 of each tensor's norm (SGD). Prints a line of JSON a case, with the
CPU seconds of servers and client, then the worst of each model; exit code 1 if a bar is missed.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("SHARDWRIGHT_CACHE", "off")

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import psutil

from shardwright.errors import ShardwrightError
from tests.client.clusters import Clusters
from tests.client.pipeline_training import BAR, MODELS, SCHEDULES, parts_of, train

WORKERS = (1, 2, 4)


def check_case(clusters: Clusters, model: str, schedule: str, workers: int) -> dict[str, Any]:
    """Train one case; returns its row of the table, with the error of a failing case."""
    row: dict[str, Any] = {"model": model, "schedule": schedule, "workers": workers, "holds": False}
    session = clusters.session(workers)
    begin_s, begin_cpu_s = time.perf_counter(), _measure_cpu_s()
    try:
        case = MODELS[model](parts_of(schedule))
        _, loss, tensor = train(session, case, stages=2, micro_batches=4, schedule=schedule)
    except ShardwrightError as error:
        row["error"] = f"{type(error).__name__}: {error}"
        clusters.stop()
    else:
        row |= {"holds": loss <= BAR and tensor <= BAR, "loss": loss, "tensor": tensor}
        row["cpu_s"] = round(_measure_cpu_s() - begin_cpu_s, 1)
    return row | {"seconds": round(time.perf_counter() - begin_s, 1)}


def _measure_cpu_s() -> float:
    """CPU seconds of this process and its children, ended ones included."""
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(sum(process.cpu_times()[:4]) for process in family)


def check_grid(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        clusters = Clusters(Path(folder))
        try:
            for workers, model, schedule in product(arguments.workers, MODELS, SCHEDULES):
                if arguments.model in model and arguments.schedule in ("", schedule):
                    yield check_case(clusters, model, schedule, workers)
        finally:
            clusters.stop()


def summarize(rows: list[dict[str, Any]]) -> str:
    """Per model: number of passing cases, largest difference of a loss and of a tensor."""
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        model_rows = [row for row in rows if row["model"] == model]
        loss, tensor = (max(row.get(key, float("inf")) for row in model_rows) for key in ("loss", "tensor"))
        passed = sum(row["holds"] for row in model_rows)
        lines.append(f"{model:22} {passed} of {len(model_rows)}, loss {loss:.1e}, parameters {tensor:.1e}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS, help="numbers of workers")
    parser.add_argument("--model", default="", help="models whose name has this in it")
    parser.add_argument("--schedule", default="", help="one schedule")
    arguments = parser.parse_args()
    rows = []
    for row in check_grid(arguments):
        print(json.dumps(row), flush=True)
        rows.append(row)
    print(summarize(rows))
    return any(not row["holds"] for row in rows)


if __name__ == "__main__":
    sys.exit(main())
