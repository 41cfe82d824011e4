"""The child of `planned`: plans one program and emits it, so that time and peak memory are the planner's own.

Reads {"hlo": path, "cluster": JSON text, "options": {...}, "compiler": profile or null, "stablehlo": path or null} on
stdin, prints one JSON line.
"""

from __future__ import annotations

import json
import resource
import sys
import time
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any


def main() -> None:
    job = json.load(sys.stdin)
    text = Path(job["hlo"]).read_text()
    import shardwright
    from shardwright.cluster import Cluster
    from shardwright.errors import ShardwrightError
    from shardwright.planner import cache, store  # noqa: F401 - importing is no part of planning

    if job["compiler"]:
        _predict_memory_for(job["compiler"])
    try:
        started = time.perf_counter()
        plan = shardwright.plan(text, Cluster.from_json(job["cluster"]), **job["options"])
        planning_s = time.perf_counter() - started
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if job["stablehlo"]:
            Path(job["stablehlo"]).write_text(plan.emit())
        answer = {**_summary(plan), "planning_s": planning_s, "planner_peak_bytes": peak_bytes}
    except ShardwrightError as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer))


def _predict_memory_for(compiler: str) -> None:
    """Every profile gets the compiler of the profile of this name.

    The judge counts memory as XLA:CPU assigns it: with `cpu` that is what the planner is asked to foresee. It leaves
    all-reduces apart (`partition.py`), which XLA:CPU merges elsewhere.
    """
    from shardwright.cost import profiles

    path = resources.files("shardwright.cost") / "data" / f"{compiler}.toml"
    table = tomllib.loads(path.read_text(encoding="utf-8"))["compiler"]
    table["merges_all_reduces"]["value"] = False
    made = profiles._profile
    profiles._profile = lambda name, data: made(name, {**data, "compiler": table})


def _summary(plan: Any) -> dict[str, Any]:
    predicted: dict[str, float] = {}
    for collective in plan.collectives:
        predicted[collective.kind] = predicted.get(collective.kind, 0) + collective.wire_bytes * collective.count
    return {
        "mesh": str(plan.mesh),
        "gap": plan.cost.gap if plan.cost.is_bounded else None,
        "predicted_step_s": plan.cost.step_s,
        "predicted_memory_bytes": plan.memory.peak_bytes,
        "predicted_wire_bytes": predicted,
    }


if __name__ == "__main__":
    main()
