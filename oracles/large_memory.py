"""Predicted memory beside XLA:CPU's for models at their full width: 24 layers, unseen models, 16 devices.

Models: those of the planner's benchmark (`collectives.LARGE`: judged slices and held-out models), T5 large and ViT, and
GPT-2 and BERT of 24 layers, unrolled or scanned, each layer rematerialized or not. `name:16` asks for 16 devices.
Plans: strategies forced on one axis, `mixed` on two, the search, the search in 50 % of data parallelism's memory
(`half`), everything rematerialized (`remat`), and two micro-batches (`parts`). Only `half` has a memory limit.

XLA:CPU assigns buffers; code generation is skipped. Exit code 1 if the error of a peak is over 25 %, the assigned bytes
exceed the predicted ones with their margin, or a plan was not judged; refused plans do not count.

    python -m oracles.large_memory [--models gpt2-24,clip-base:16] [--plans data,search]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.planner.partition import PartitionError
from benchmarks.planner.planned import lower
from benchmarks.planner.suite import Entry
from oracles.collectives import LARGE
from oracles.fuzz_memory import FAR_OFF, PeakComparison, compare_with_xla, print_summary
from shardwright.clusters.cluster import Cluster
from shardwright.errors import PlanError, ShardwrightError
from shardwright.options.user_options import plan_options
from shardwright.planner import plan
from shardwright.plans.plan import Plan

_MEDIUM = {"layers": 24, "width": 1024, "heads": 16}
_WRITTEN: dict[str, dict[str, Any]] = {
    "": {}, "-scan": {"scanned": True}, "-remat": {"remat": True}, "-scan-remat": {"scanned": True, "remat": True},
}  # fmt: skip
DEEP: dict[str, tuple[str, str, Mapping[str, Any]]] = {
    **{f"gpt2-24{name}": ("gpt2", "124M", {**_MEDIUM, **changes}) for name, changes in _WRITTEN.items()},
    **{f"bert-24{name}": ("bert", "large", changes) for name, changes in _WRITTEN.items()},
    "t5-24": ("t5", "large", {}),
    "vit-24": ("vit", "L16", {}),
}
MODELS = {**LARGE, **DEEP}

#: Two axes for a number of devices.
_MESHES = {4: "2x2", 6: "2x3", 8: "2x4", 16: "4x4"}
_FORCED: dict[str, dict[str, Any]] = {
    "data": {"force": "data"},
    "fsdp": {"force": "fsdp"},
    "tensor": {"force": "tensor"},
    "remat": {"force": "data", "remat": "full"},
    "parts": {"force": "data", "micro_batches": 2},
}
PLANS = (*_FORCED, "mixed", "search", "half")
_LIMIT = 0.5
#: More than any plan takes: the memory of a CPU device is no limit here.
_UNLIMITED_BYTES = 1 << 42
#: A step of 24 layers that are written out takes XLA two minutes on a busy machine.
_JUDGE_LIMIT_S = 1800.0


def plan_step(text: str, devices: int, name: str) -> Plan:
    """Plan a step in one way. Raises ShardwrightError if there is no plan."""
    options = dict(_FORCED.get(name, {}))
    if name != "half":
        options["mesh"] = str(devices) if name in _FORCED else _MESHES[devices]
        options["memory_budget"] = _UNLIMITED_BYTES
    if name == "mixed":
        options["force"] = "mixed"
    if name == "half":
        options["memory_budget"] = round(_LIMIT * plan_step(text, devices, "data").memory.peak_bytes)
    return plan(text, Cluster.local(devices), plan_options(stages=1, **options))


def lower_cases(models: list[str], plans: list[str]) -> Iterator[tuple[str, int, str, str]]:
    """(model, devices, plan, HLO text)."""
    for request in models:
        model, _, devices = request.partition(":")
        name, size, changes = MODELS[model]
        entry = Entry(model=name, size=size, devices=int(devices or 8), changes=changes)
        text = lower(entry).hlo_text
        yield from ((model, entry.devices, plan_name, text) for plan_name in plans)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(DEEP), help=f"of {', '.join(MODELS)} (default: %(default)s)")
    parser.add_argument("--plans", default=",".join(PLANS), help="(default: %(default)s)")
    options = parser.parse_args()
    results: list[PeakComparison] = []
    failed = 0
    for model, devices, name, text in lower_cases(options.models.split(","), options.plans.split(",")):
        try:
            step_plan = plan_step(text, devices, name)
            results.append(compare_with_xla(step_plan, Cluster.local(devices), limit_s=_JUDGE_LIMIT_S))
            print(f"{model} {devices} {name}: {step_plan.mesh}: {results[-1]}", flush=True)
        except PlanError as error:  # nothing fits, or the batch cannot be cut
            print(f"{model} {devices} {name}: refused: {error.message.splitlines()[0]}", flush=True)
        except (ShardwrightError, PartitionError) as error:
            failed += 1
            print(f"{model} {devices} {name}: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
    is_far_off = any(abs(result.ratio - 1) > FAR_OFF for result in results)
    return max(print_summary(results, failed), int(is_far_off))


if __name__ == "__main__":
    sys.exit(main())
