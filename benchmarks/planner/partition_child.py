"""The child of `partition`: reads one job as JSON on stdin and compiles the program; XLA writes dumps.

A job is {"stablehlo": path, "devices": n}, or {"model", "size", "devices", "changes", "expert"}: an expert's name.
"target" and "packages" of both: the target GPUs, and the folder with their compiler; else the host's devices.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu_targets import compile_only_devices
from benchmarks.planner.partition import DOES_NOT_APPLY


def main() -> None:
    job = json.load(sys.stdin)
    if "stablehlo" in job:
        _compile_stablehlo(Path(job["stablehlo"]).read_text(), job)
    else:
        _compile_expert(job)


def _select_devices(job: dict[str, Any]) -> list[Any]:
    from shardwright.xla import private

    if "target" in job:
        return compile_only_devices(job["packages"], job["target"], job["devices"])
    return list(private.local_devices()[: job["devices"]])


def _compile_stablehlo(text: str, job: dict[str, Any]) -> None:
    from shardwright.xla import private

    devices = _select_devices(job)
    ids = [device.id for device in devices]
    if "target" in job:
        options = private.compile_options(ids, platform="cuda")
        with private.mlir_context():
            devices[0].client.compile(private.parse_module(text), private.device_list(devices), options)
        return
    private.compile_and_load(text, devices, private.compile_options(ids))


def _compile_expert(job: dict[str, Any]) -> None:
    from benchmarks.planner.experts.plans import build_experts
    from benchmarks.planner.experts.rules import DoesNotApply, lower
    from workloads.every_model import EVERY_MODEL

    model = EVERY_MODEL[job["model"]]
    expert = build_experts(model, job["devices"])[job["expert"]]
    case = model.build(job["size"], job["devices"], **{**job["changes"], **expert.changes})
    try:
        lowered = lower(case, expert, _select_devices(job))
    except DoesNotApply as reason:
        sys.exit(f"{DOES_NOT_APPLY}{reason}")
    lowered.compile()


if __name__ == "__main__":
    main()
