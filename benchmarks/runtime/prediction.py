"""Simulated and measured steps over a fixed grid of stages × micro-batches × schedule.

Sleeping programs of known seconds, on free or slow links: the error of the simulation itself, the runner's overhead
included. Computing programs, timed one by one before: the rank correlation of simulated and measured steps, though the
stages share the machine's cores. The minimum of several steps counts, because other load only slows them.

    python -m benchmarks.runtime.prediction --json build/prediction.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

from benchmarks.runtime.pipelines import Case, build_computing, build_sleeping
from benchmarks.runtime.workers import Workers
from shardwright.tasks import simulate

#: Maximum relative error of the simulated step.
TOLERANCE = 0.05

STAGES = (1, 2, 4)
MICRO_BATCHES = (1, 2, 4, 8)
SCHEDULES = (("gpipe", 1), ("1f1b", 1), ("2f2b", 1), ("interleaved", 2), ("zero-bubble", 1))

FORWARD_S = 0.04

#: Maximum number of measured steps. Fewer if one is within the tolerance: nothing makes a sleeping step too fast.
TRIES = 10

#: Matrix products of a forward program that computes.
ROUNDS = 200


def list_cases() -> Iterator[Case]:
    """Every point with equal chunks and free links; and with unequal ones on links of half a forward's seconds."""
    for uneven, link_s in ((0.0, 0.0), (0.5, FORWARD_S / 2)):
        for stages in STAGES[1:] if link_s else STAGES:
            for micro_batches in MICRO_BATCHES:
                for schedule, chunks in SCHEDULES:
                    yield Case(
                        stages=stages, micro_batches=micro_batches, schedule=schedule, chunks=chunks, uneven=uneven,
                        link_s=link_s,
                    )  # fmt: skip


def measure_sleeping(case: Case) -> dict[str, Any]:
    """Simulate and measure a case of sleeping programs."""
    graph, pipeline = build_sleeping(case, FORWARD_S)
    row = _make_row(case, simulate(graph).step_s, _min_step_s(pipeline.step_s, simulate(graph).step_s))
    pipeline.close()
    return row


def measure_sleeping_on_workers(case: Case, workers: Workers) -> dict[str, Any]:
    """Simulate and measure a case of sleeping programs, stages in processes of their own."""
    predicted_s = simulate(workers.open(case, FORWARD_S)).step_s
    return _make_row(case, predicted_s, _min_step_s(workers.step_s, predicted_s))


def _min_step_s(step_s: Callable[[], float], predicted_s: float) -> float:
    measured_s = float("inf")
    for _ in range(TRIES):
        measured_s = min(measured_s, step_s())
        if measured_s <= predicted_s * (1 + TOLERANCE / 2):
            break
    return measured_s


def measure_computing(case: Case) -> dict[str, Any]:
    """Simulate and measure a case of computing programs."""
    graph, pipeline = build_computing(case, ROUNDS)
    pipeline.step_s()
    measured_s = min(pipeline.step_s() for _ in range(TRIES))
    pipeline.close()
    return _make_row(case, simulate(graph).step_s, measured_s)


def _make_row(case: Case, predicted_s: float, measured_s: float) -> dict[str, Any]:
    return {
        "stages": case.stages, "micro_batches": case.micro_batches, "schedule": case.schedule, "chunks": case.chunks,
        "uneven": case.uneven, "link_s": case.link_s, "predicted_s": predicted_s, "measured_s": measured_s,
        "error": predicted_s / measured_s - 1,
    }  # fmt: skip


def rank_correlation(rows: Sequence[dict[str, Any]], predicted: str = "predicted_s") -> float:
    """Spearman's rank correlation of predicted and measured seconds; equal values share their mean rank.

    predicted: key of the predicted seconds.
    """
    ranks = []
    for key in (predicted, "measured_s"):
        values = [row[key] for row in rows]
        ordered = sorted(values)
        ranks.append([(ordered.index(value) + ordered.index(value) + ordered.count(value) - 1) / 2 for value in values])
    return statistics.correlation(*ranks)


def format_table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [f"{'stages':>6} {'micro-batches':>13}  {'schedule':14} {'simulated':>10} {'measured':>10} {'error':>7}"]
    for row in rows:
        name = row["schedule"] + (f" ×{row['chunks']}" if row["chunks"] > 1 else "")
        name += " slow links" if row["link_s"] else ""
        lines.append(
            f"{row['stages']:>6} {row['micro_batches']:>13}  {name:25} {row['predicted_s'] * 1e3:>7.1f} ms "
            f"{row['measured_s'] * 1e3:>7.1f} ms {row['error']:>+7.1%}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write all figures")
    parser.add_argument("--workers", metavar="N", type=int, default=1, help="processes that the stages lie on")
    parser.add_argument("--skip-computing", action="store_true", help="sleeping programs only")
    arguments = parser.parse_args()
    if arguments.workers > 1:
        workers = Workers(arguments.workers)
        rows = [measure_sleeping_on_workers(case, workers) for case in list_cases() if not case.link_s]
        workers.close()
    else:
        rows = [measure_sleeping(case) for case in list_cases()]
    errors = [abs(row["error"]) for row in rows]
    print(format_table(rows))
    within = sum(error <= TOLERANCE for error in errors)
    print(
        f"sleeping, {arguments.workers} processes: simulated step within {TOLERANCE:.0%} of the measured one in "
        f"{within} of {len(rows)} cases; median {median(errors):.1%}, worst {max(errors):.1%}"
    )
    figures: dict[str, Any] = {"sleeping": rows, "worst": max(errors), "median": median(errors), "tolerance": TOLERANCE}
    if not arguments.skip_computing:
        computing_rows = [measure_computing(case) for case in list_cases() if not case.link_s]
        figures |= {
            "computing": computing_rows,
            "rank_correlation": rank_correlation(computing_rows),
            "cores": os.cpu_count(),
        }
        print(format_table(computing_rows))
        print(
            f"computing on {os.cpu_count()} cores: rank correlation {rank_correlation(computing_rows):.3f} "
            f"({len(computing_rows)} cases; up to as many stages as cores: "
            f"{rank_correlation([row for row in computing_rows if row['stages'] <= (os.cpu_count() or 1)]):.3f})"
        )
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(figures, indent=1), encoding="utf-8")
    return 0 if max(errors) <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
