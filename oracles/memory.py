"""Predicted peak memory of plans beside the buffer assignments of XLA's compilers.

    make check-memory     (or: python -m oracles.memory --models gpt2-4,llama --plans data,fsdp)

For the models of `workloads/memory_steps.py` and every plan: arguments, results not aliased to arguments, and
temporaries of one device, predicted and assigned by XLA:CPU. With `--tpu-python` (an interpreter with jax and libtpu;
no TPU needed) the TPU compiler judges the TPU profile instead, on larger models planned for its memory; small buffers
stay on the chip and are not counted. A program over its prediction is compiled again with that prediction, margin
included, for a limit. With `--gpu-packages` (a folder with JAX's CUDA plugin, see `oracles.gpu_judge`; no GPU needed)
XLA:GPU judges the A100 profile.
Bars: median error of the peak at most 10 %, worst 25 %, and no plan over its prediction with the profile's margin.
Prints JSON; exit code 1 if a bar is missed, or a case was not measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import shardwright as sw
from shardwright.cost import hardware_profile, predict_memory
from shardwright.cost.peak.memory import bytes_with_margin
from shardwright.errors import ShardwrightError
from shardwright.hlo import parse
from shardwright.plans.plan import MemorySummary, Plan
from shardwright.xla import CompileService
from shardwright.xla.compiled import CompiledMemory
from workloads.memory_steps import LARGE_MODELS, MODELS

MEDIAN_BAR = 0.10
WORST_BAR = 0.25
DEVICES = 8
ROOT = Path(__file__).resolve().parents[1]
TPU_CLUSTER = ROOT / "cluster_configs" / "tpu_v5e_2x4.json"
PLANS: dict[str, dict[str, Any]] = {
    "data": {"force": "data", "mesh": "8"},
    "fsdp": {"force": "fsdp", "mesh": "8"},
    "tensor": {"force": "tensor", "mesh": "8"},
    "mixed": {"force": "mixed", "mesh": "2x4"},
    "replicated": {"force": "replicated", "mesh": "8"},
    "search": {"mesh": "2x4"},
    "full-remat": {"force": "data", "mesh": "8", "remat": "full"},
    "micro-batches": {"force": "data", "mesh": "8", "micro_batches": 2},
}
#: Plans of the models too large for XLA:CPU to compile them all in reasonable time.
FEW_PLANS = {"gpt2-12": ("data", "fsdp"), "gpt2-24": ("data",)}
DEEP_COMPILE_S = 1800.0


def measure_on_cpu(text: str, plan: Plan, service: CompileService) -> CompiledMemory:
    program = service.compile(text, plan, want_executable=False, deadline_s=DEEP_COMPILE_S)
    assert program.memory is not None
    return program.memory


def run_judge(text: str, plan: Plan, python: str, judge: str, *judge_arguments: str) -> CompiledMemory:
    """Figures of another compiler, from a child process of `oracles.<judge>`."""
    with tempfile.TemporaryDirectory() as folder:
        hlo_path, plan_path = Path(folder) / "step.hlo", Path(folder) / "plan.json"
        hlo_path.write_text(text)
        plan_path.write_text(plan.to_json())
        command = [python, "-m", f"oracles.{judge}", str(hlo_path), str(plan_path), *judge_arguments]
        process = subprocess.run(command, capture_output=True, text=True, timeout=DEEP_COMPILE_S, check=False, cwd=ROOT)
    if process.returncode:
        raise RuntimeError(process.stderr.strip()[-500:])
    return CompiledMemory(**json.loads(process.stdout.splitlines()[-1]))


def compare(model: str, name: str, text: str, arguments: argparse.Namespace, service: CompileService) -> dict[str, Any]:
    """One row: predicted and judged bytes of a model under a plan."""
    plan = sw.plan(text, TPU_CLUSTER if arguments.tpu_python else DEVICES, **PLANS[name])
    text = plan.require_hlo()  # after rewrites: inlined calls, rematerialization, micro-batches
    if arguments.tpu_python:
        profile = hardware_profile("tpu-v5e")
        assigned = run_judge(text, plan, arguments.tpu_python, "tpu_judge")
    elif arguments.gpu_packages:
        profile = hardware_profile("a100")
        assigned = run_judge(text, plan, sys.executable, "gpu_judge", str(Path(arguments.gpu_packages).resolve()))
    else:
        profile = hardware_profile("cpu")
        assigned = measure_on_cpu(text, plan, service)
    predicted = predict_memory(parse(text), plan.instructions, plan.parameters, plan.outputs, plan.mesh, profile)
    result, required = make_row(model, name, predicted, assigned), bytes_with_margin(predicted, profile)
    if arguments.tpu_python and required < assigned.peak_bytes:  # it had room to spare: compile again with a limit
        assigned = run_judge(text, plan, arguments.tpu_python, "tpu_judge", str(required))
        result["peak_ratio_within_limit"] = round(predicted.peak_bytes / assigned.peak_bytes, 3)
    return result | {"never_over": required >= assigned.peak_bytes}


def make_row(model: str, name: str, predicted: MemorySummary, assigned: CompiledMemory) -> dict[str, Any]:
    return {
        "model": model,
        "plan": name,
        "arguments": [predicted.arguments_bytes, assigned.argument_bytes],
        "outputs": [predicted.outputs_bytes, assigned.output_bytes - assigned.alias_bytes],
        "temporaries": [predicted.temporaries_bytes, assigned.temporary_bytes],
        "temporaries_ratio": round(predicted.temporaries_bytes / max(assigned.temporary_bytes, 1), 3),
        "peak_ratio": round(predicted.peak_bytes / assigned.peak_bytes, 3),
    }


def compare_all(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    steps = LARGE_MODELS if arguments.tpu_python else MODELS
    models = arguments.models.split(",") if arguments.models else list(steps)
    with CompileService(DEVICES) as service:
        for model in models:
            text = steps[model]()
            for name in arguments.plans.split(",") if arguments.plans else FEW_PLANS.get(model, PLANS):
                try:
                    yield compare(model, name, text, arguments, service)
                except (ShardwrightError, RuntimeError, subprocess.TimeoutExpired) as error:
                    yield {"model": model, "plan": name, "failed": f"{type(error).__name__}: {error}"[:300]}


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    compared = [row for row in rows if "peak_ratio" in row]
    errors = [abs(row["peak_ratio"] - 1) for row in compared]
    if not errors:
        return {"cases": 0, "failed": _list_failures(rows), "passed": False}
    median, worst = statistics.median(errors), max(errors)
    over = [f"{row['model']} {row['plan']}" for row in compared if not row["never_over"]]
    return {
        "cases": len(compared),
        "failed": _list_failures(rows),
        "median_error": round(median, 4),
        "worst_error": round(worst, 4),
        "least_temporaries_ratio": min(row["temporaries_ratio"] for row in compared),
        "over_in_spite_of_margin": over,
        "passed": median <= MEDIAN_BAR and worst <= WORST_BAR and not over and len(compared) == len(rows),
    }


def _list_failures(rows: list[dict[str, Any]]) -> list[str]:
    return [f"{row['model']} {row['plan']}" for row in rows if "failed" in row]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", help=f"some of {', '.join(MODELS)}; with --tpu-python of {', '.join(LARGE_MODELS)}")
    parser.add_argument("--plans", help=f"some of {', '.join(PLANS)}")
    parser.add_argument("--tpu-python", help="an interpreter with jax and libtpu: judge by the TPU compiler")
    parser.add_argument("--gpu-packages", help="a folder with JAX's CUDA plugin and nvcc: judge by XLA:GPU")
    rows = []
    arguments = parser.parse_args()
    for row in compare_all(arguments):
        rows.append(row)
        print(json.dumps(row), flush=True)
    summary = summarize(rows)
    print(json.dumps(summary, indent=2))
    return 0 if summary["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
