"""Does a step take as long as its simulation says? A fixed grid of stages × micro-batches × schedule.

With sleeping programs, whose seconds are known, on links that are free or slow: the error of the simulation itself,
the runner's overhead included. With computing programs, timed one by one before: whether the simulation ranks
pipelines as this machine does, though its cores are shared by the stages. Of several steps the fastest counts, since
whatever else the machine does makes steps slower only.

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

from benchmarks.runtime.pipelines import Case, computing, sleeping
from benchmarks.runtime.workers import Workers
from shardwright.tasks import simulate

#: The most that the simulated step may differ from the measured one.
TOLERANCE = 0.05

STAGES = (1, 2, 4)
MICRO_BATCHES = (1, 2, 4, 8)
SCHEDULES = (("gpipe", 1), ("1f1b", 1), ("2f2b", 1), ("interleaved", 2), ("zero-bubble", 1))

FORWARD_S = 0.04

#: Steps that are tried at most. Fewer where one is within the tolerance: nothing makes a sleeping step too fast.
TRIES = 10

#: Matrix products of a forward program that computes.
ROUNDS = 200


def grid() -> Iterator[Case]:
    """Every point with equal chunks and free links; and with unequal ones on links that take half a forward cell."""
    for uneven, link_s in ((0.0, 0.0), (0.5, FORWARD_S / 2)):
        for stages in STAGES[1:] if link_s else STAGES:
            for micro_batches in MICRO_BATCHES:
                for schedule, chunks in SCHEDULES:
                    yield Case(
                        stages=stages, micro_batches=micro_batches, schedule=schedule, chunks=chunks, uneven=uneven,
                        link_s=link_s,
                    )  # fmt: skip


def slept(case: Case) -> dict[str, Any]:
    """Simulated and measured seconds of a case whose programs sleep."""
    graph, pipeline = sleeping(case, FORWARD_S)
    row = _row(case, simulate(graph).step_s, _fastest_s(pipeline.step_s, simulate(graph).step_s))
    pipeline.close()
    return row


def slept_apart(case: Case, workers: Workers) -> dict[str, Any]:
    """The same with stages in processes of their own."""
    predicted_s = simulate(workers.open(case, FORWARD_S)).step_s
    return _row(case, predicted_s, _fastest_s(workers.step_s, predicted_s))


def _fastest_s(step_s: Callable[[], float], predicted_s: float) -> float:
    measured_s = float("inf")
    for _ in range(TRIES):
        measured_s = min(measured_s, step_s())
        if measured_s <= predicted_s * (1 + TOLERANCE / 2):
            break
    return measured_s


def computed(case: Case) -> dict[str, Any]:
    """Simulated and measured seconds of a case whose programs compute."""
    graph, pipeline = computing(case, ROUNDS)
    pipeline.step_s()
    measured_s = min(pipeline.step_s() for _ in range(TRIES))
    pipeline.close()
    return _row(case, simulate(graph).step_s, measured_s)


def _row(case: Case, predicted_s: float, measured_s: float) -> dict[str, Any]:
    return {
        "stages": case.stages, "micro_batches": case.micro_batches, "schedule": case.schedule, "chunks": case.chunks,
        "uneven": case.uneven, "link_s": case.link_s, "predicted_s": predicted_s, "measured_s": measured_s,
        "error": predicted_s / measured_s - 1,
    }  # fmt: skip


def rank_correlation(rows: Sequence[dict[str, Any]], predicted: str = "predicted_s") -> float:
    """Spearman's, equal values of equal rank: 1 where the simulation orders all cases as the clock does.

    predicted: which figure of it.
    """
    ranks = []
    for key in (predicted, "measured_s"):
        values = [row[key] for row in rows]
        places = sorted(values)
        ranks.append([(places.index(each) + places.index(each) + places.count(each) - 1) / 2 for each in values])
    return statistics.correlation(*ranks)


def table(rows: Sequence[dict[str, Any]]) -> str:
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
        rows = [slept_apart(case, workers) for case in grid() if not case.link_s]
        workers.close()
    else:
        rows = [slept(case) for case in grid()]
    errors = [abs(row["error"]) for row in rows]
    print(table(rows))
    within = sum(error <= TOLERANCE for error in errors)
    print(
        f"sleeping, {arguments.workers} processes: simulated step within {TOLERANCE:.0%} of the measured one in "
        f"{within} of {len(rows)} cases; median {median(errors):.1%}, worst {max(errors):.1%}"
    )
    done: dict[str, Any] = {"sleeping": rows, "worst": max(errors), "median": median(errors), "tolerance": TOLERANCE}
    if not arguments.skip_computing:
        ran = [computed(case) for case in grid() if not case.link_s]
        done |= {"computing": ran, "rank_correlation": rank_correlation(ran), "cores": os.cpu_count()}
        print(table(ran))
        print(
            f"computing on {os.cpu_count()} cores: rank correlation {rank_correlation(ran):.3f} "
            f"({len(ran)} cases; up to as many stages as cores: "
            f"{rank_correlation([row for row in ran if row['stages'] <= (os.cpu_count() or 1)]):.3f})"
        )
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(done, indent=1), encoding="utf-8")
    return 0 if max(errors) <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
