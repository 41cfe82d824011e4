"""The child of `planned`: plans and emits one program; time and peak memory are the planner's own.

Reads {"hlo": path, "cluster": JSON text, "options": {...}, "stablehlo": path or null} on stdin, prints one JSON line.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    job = json.load(sys.stdin)
    text = Path(job["hlo"]).read_text()
    import shardwright
    from shardwright.clusters.cluster import Cluster
    from shardwright.errors import ShardwrightError
    from shardwright.planner.cache import plan_cache, store  # noqa: F401 - importing is no part of planning

    try:
        started = time.perf_counter()
        plan = shardwright.plan(text, Cluster.from_json(job["cluster"]), **job["options"])
        planning_s = time.perf_counter() - started
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if job["stablehlo"]:
            Path(job["stablehlo"]).write_text(plan.emit())
        answer = {**_summarize(plan), "planning_s": planning_s, "planner_peak_bytes": peak_bytes}
    except ShardwrightError as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer))


def _summarize(plan: Any) -> dict[str, Any]:
    from shardwright.plans.plan import count_combined

    predicted: dict[str, float] = {}
    for collective in plan.collectives:
        predicted[collective.kind] = predicted.get(collective.kind, 0) + collective.wire_bytes * collective.count
    return {
        "mesh": str(plan.mesh),
        "gap": plan.cost.gap if plan.cost.is_bounded else None,
        "predicted_step_s": plan.cost.step_s,
        "predicted_compute_s": plan.cost.compute_s,
        "predicted_communication_s": sum(collective.time_s for collective in plan.collectives),  # inputs left out
        "predicted_collectives": count_combined(plan.collectives),
        "predicted_memory_bytes": plan.memory.peak_bytes,
        "predicted_wire_bytes": predicted,
    }


if __name__ == "__main__":
    main()
