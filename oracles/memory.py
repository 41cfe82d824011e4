"""Predicted peak memory of plans beside what XLA's own compilers say.

    make check-memory     (or: python -m oracles.memory --models gpt2-4,llama --plans data,fsdp)

For the models of `workloads/memory_steps.py` and every plan: arguments, results that are not written over them, and
temporaries of one device, as the plan predicts them and as XLA:CPU's buffer assignment has them. With
`--tpu-python` (an interpreter with jax and libtpu; no TPU is needed) the TPU compiler judges predictions of the
TPU profile instead, for larger models planned for its memory (what is small stays on the chip and is not counted);
where it takes more than a plan must have, it is asked again for a device that has no more. With
`--gpu-packages` (a folder with JAX's CUDA plugin, see `oracles.gpu_judge`; no GPU is needed) XLA:GPU judges the
A100 profile.
Bars: median error of the peak at most 10 %, worst 25 %, and with the profile's margin no plan needs more
than it was predicted to. Prints JSON; exit code 1 where a bar is missed, or a case was not measured.
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
#: Models of which XLA:CPU compiles only these plans in reasonable time.
FEW_PLANS = {"gpt2-12": ("data", "fsdp"), "gpt2-24": ("data",)}
DEEP_COMPILE_S = 1800.0


def judged_by_cpu(text: str, plan: Plan, service: CompileService) -> CompiledMemory:
    program = service.compile(text, plan, want_executable=False, deadline_s=DEEP_COMPILE_S)
    assert program.memory is not None
    return program.memory


def judged_elsewhere(text: str, plan: Plan, python: str, judge: str, *more: str) -> CompiledMemory:
    """Another compiler's figures, from a process that has it."""
    with tempfile.TemporaryDirectory() as folder:
        hlo, result = Path(folder) / "step.hlo", Path(folder) / "plan.json"
        hlo.write_text(text)
        result.write_text(plan.to_json())
        command = [python, "-m", f"oracles.{judge}", str(hlo), str(result), *more]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEEP_COMPILE_S, check=False, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-500:])
    return CompiledMemory(**json.loads(done.stdout.splitlines()[-1]))


def compare(model: str, name: str, text: str, arguments: argparse.Namespace, service: CompileService) -> dict[str, Any]:
    """One row: predicted and judged bytes of a model under a plan."""
    plan = sw.plan(text, TPU_CLUSTER if arguments.tpu_python else DEVICES, **PLANS[name])
    text = plan.require_hlo()  # as it was rewritten: calls written out, values computed again, micro-batches
    if arguments.tpu_python:
        profile = hardware_profile("tpu-v5e")
        judged = judged_elsewhere(text, plan, arguments.tpu_python, "tpu_judge")
    elif arguments.gpu_packages:
        profile = hardware_profile("a100")
        judged = judged_elsewhere(text, plan, sys.executable, "gpu_judge", str(Path(arguments.gpu_packages).resolve()))
    else:
        profile = hardware_profile("cpu")
        judged = judged_by_cpu(text, plan, service)
    predicted = predict_memory(parse(text), plan.instructions, plan.parameters, plan.outputs, plan.mesh, profile)
    result, required = row(model, name, predicted, judged), bytes_with_margin(predicted, profile)
    if arguments.tpu_python and required < judged.peak_bytes:  # it had room: what does it take where it has none?
        judged = judged_elsewhere(text, plan, arguments.tpu_python, "tpu_judge", str(required))
        result["peak_ratio_within_limit"] = round(predicted.peak_bytes / judged.peak_bytes, 3)
    return result | {"never_over": required >= judged.peak_bytes}


def row(model: str, name: str, predicted: MemorySummary, judged: CompiledMemory) -> dict[str, Any]:
    return {
        "model": model,
        "plan": name,
        "arguments": [predicted.arguments_bytes, judged.argument_bytes],
        "outputs": [predicted.outputs_bytes, judged.output_bytes - judged.alias_bytes],
        "temporaries": [predicted.temporaries_bytes, judged.temporary_bytes],
        "temporaries_ratio": round(predicted.temporaries_bytes / max(judged.temporary_bytes, 1), 3),
        "peak_ratio": round(predicted.peak_bytes / judged.peak_bytes, 3),
    }


def rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    result = LARGE_MODELS if arguments.tpu_python else MODELS
    models = arguments.models.split(",") if arguments.models else list(result)
    with CompileService(DEVICES) as service:
        for model in models:
            text = result[model]()
            for name in arguments.plans.split(",") if arguments.plans else FEW_PLANS.get(model, PLANS):
                try:
                    yield compare(model, name, text, arguments, service)
                except (ShardwrightError, RuntimeError, subprocess.TimeoutExpired) as error:
                    yield {"model": model, "plan": name, "failed": f"{type(error).__name__}: {error}"[:300]}


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    compared = [each for each in found if "peak_ratio" in each]
    errors = [abs(each["peak_ratio"] - 1) for each in compared]
    if not errors:
        return {"cases": 0, "failed": _failed(found), "passed": False}
    median, worst = statistics.median(errors), max(errors)
    over = [f"{each['model']} {each['plan']}" for each in compared if not each["never_over"]]
    return {
        "cases": len(compared),
        "failed": _failed(found),
        "median_error": round(median, 4),
        "worst_error": round(worst, 4),
        "least_temporaries_ratio": min(each["temporaries_ratio"] for each in compared),
        "over_in_spite_of_margin": over,
        "passed": median <= MEDIAN_BAR and worst <= WORST_BAR and not over and len(compared) == len(found),
    }


def _failed(found: list[dict[str, Any]]) -> list[str]:
    return [f"{each['model']} {each['plan']}" for each in found if "failed" in each]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", help=f"some of {', '.join(MODELS)}; with --tpu-python of {', '.join(LARGE_MODELS)}")
    parser.add_argument("--plans", help=f"some of {', '.join(PLANS)}")
    parser.add_argument("--tpu-python", help="an interpreter with jax and libtpu: judge by the TPU compiler")
    parser.add_argument("--gpu-packages", help="a folder with JAX's CUDA plugin and nvcc: judge by XLA:GPU")
    results = []
    arguments = parser.parse_args()
    for each in rows(arguments):
        results.append(each)
        print(json.dumps(each), flush=True)
    result = summary(results)
    print(json.dumps(result, indent=2))
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
