"""The child of `partition`: reads one job as JSON on stdin, hands the program to XLA, leaves dumps behind.

A job is {"stablehlo": path, "devices": n}, or {"model", "size", "devices", "changes", "expert"}: an expert's name.
"without" of both: XLA's passes that are left out.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.planner.partition import DOES_NOT_APPLY


def main() -> None:
    job = json.load(sys.stdin)
    if "stablehlo" in job:
        _compile_stablehlo(Path(job["stablehlo"]).read_text(), job["devices"], job["without"])
    else:
        _compile_expert(job)


def _compile_stablehlo(text: str, devices: int, without: str) -> None:
    from shardwright.xla import private

    chosen = private.local_devices()[:devices]
    options = private.compile_options([device.id for device in chosen], overrides=[("xla_disable_hlo_passes", without)])
    private.compile_and_load(text, chosen, options)


def _compile_expert(job: dict[str, Any]) -> None:
    from benchmarks.planner.every_model import EVERY_MODEL
    from benchmarks.planner.experts.rules import DoesNotApply, lower

    model = EVERY_MODEL[job["model"]]
    expert = model.experts(job["devices"])[job["expert"]]
    case = model.build(job["size"], job["devices"], **{**job["changes"], **expert.changes})
    try:
        lowered = lower(case, expert)
    except DoesNotApply as reason:
        sys.exit(f"{DOES_NOT_APPLY}{reason}")
    lowered.compile()


if __name__ == "__main__":
    main()
