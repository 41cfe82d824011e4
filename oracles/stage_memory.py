"""Predicted memory of a pipeline's stages beside that of its programs as XLA:GPU compiles them.

    python -m oracles.stage_memory --gpu-packages FOLDER [--models gpt2,mixed]

Plans the models of `workloads/pipeline_steps.py`, of larger sizes, in two stages of eight A100s, has every program
compiled for these without a GPU (`benchmarks.gpu_targets`), and takes XLA's temporaries in place of the predicted ones
when the tasks run at their predicted times. Bar: every stage's peak within 15 %. Prints a line of JSON a stage; exit
code 1 if the bar is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import shardwright as sw
from benchmarks.gpu_targets import add_packages_option, compile_only_devices, compiler_environment, require_packages
from shardwright.plans.pipeline_plan import PipelinePlan
from shardwright.tasks import memory_over_time, simulate
from workloads.cases import Case
from workloads.models import gpt2, llama, moe, t5, vit
from workloads.pipeline_steps import build_gpt2

BAR = 0.15
ROOT = Path(__file__).resolve().parents[1]
CLUSTER = ROOT / "cluster_configs" / "a100_2x8.json"
STAGE_DEVICES, MICRO_BATCHES = 8, 8

_GPT2 = gpt2.Config(layers=4, width=512, heads=8, context=512, vocabulary=32000, batch_per_device=64)


def build(model: str) -> Case:
    """A model of `workloads.pipeline_steps`, large enough that memory is what its arrays take."""
    size = {"layers": 4, "width": 512, "heads": 8, "batch_per_device": 64}
    builders: Mapping[str, Any] = {
        "gpt2": lambda: build_gpt2(config=_GPT2),
        "mixed": lambda: build_gpt2(config=_GPT2, is_mixed=True),
        "t5": lambda: t5.build("base", 1, hidden=2048, inputs=256, targets=64, **size),
        "moe": lambda: moe.build("8e", 1, context=256, **size),
        "llama": lambda: llama.build("1B", 1, kv_heads=4, hidden=2048, context=512, **size),
        "vit": lambda: vit.build("B16", 1, patch=16, image=224, **size),
    }
    return builders[model]()


def plan_model(model: str) -> PipelinePlan:
    text = build(model).lower().as_text("hlo", debug_info=True)
    options: dict[str, Any] = {"mesh": {"data": STAGE_DEVICES}, "micro_batches": MICRO_BATCHES, "schedule": "1f1b"}
    plan = sw.plan(text, CLUSTER, cache=False, stages=2, **options)
    assert isinstance(plan, PipelinePlan)
    return plan


def compile_temporaries(plan: PipelinePlan, packages: str) -> dict[str, int]:
    """Bytes of XLA's temporaries on one device, by program; from a child, whose compiler is another one."""
    with tempfile.TemporaryDirectory() as folder:
        for program in plan.programs:
            (Path(folder) / f"{program.name}.hlo").write_text(program.plan.require_hlo())
            (Path(folder) / f"{program.name}.json").write_text(sw.Plan.to_json(program.plan))
        command = [sys.executable, "-m", "oracles.stage_memory", "--compile", folder, "--gpu-packages", packages]
        child = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if child.returncode:
        raise RuntimeError(child.stderr[-2000:])
    return dict(json.loads(child.stdout.splitlines()[-1]))


def compile_folder(folder: str, packages: str) -> None:
    """Prints what `compile_temporaries` reads."""
    os.environ |= compiler_environment(packages)
    from oracles.memory_judge import compile_for, read_step
    from shardwright.xla import private

    devices = compile_only_devices(packages, "a100", STAGE_DEVICES)
    sizes = {}
    for path in sorted(Path(folder).glob("*.hlo")):
        text, plan = read_step(str(path), str(path.with_suffix(".json")))
        *_, temporaries = private.memory_figures(compile_for(text, plan, devices, "cuda"))
        sizes[path.stem] = temporaries
    print(json.dumps(sizes))


def compare(model: str, packages: str) -> Iterator[dict[str, Any]]:
    plan = plan_model(model)
    compiled = compile_temporaries(plan, packages)
    stages = tuple(
        tuple(
            replace(task, workspace_bytes=compiled[task.program]) if task.program in compiled else task
            for task in tasks
        )
        for tasks in plan.tasks.stages
    )
    timeline = simulate(plan.tasks)
    actual = memory_over_time(replace(plan.tasks, stages=stages), timeline)
    for stage, peak in zip(plan.stages, actual, strict=True):
        predicted = stage.memory.peak_bytes
        error = predicted / peak.peak_bytes - 1
        yield {
            "model": model, "stage": stage.number, "predicted": predicted, "compiled": peak.peak_bytes,
            "error": round(error, 3),
        }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="gpt2,t5,moe,llama,vit,mixed")
    parser.add_argument("--compile", help="for the child: a folder of programs")
    add_packages_option(parser)
    arguments = parser.parse_args()
    require_packages(arguments)
    if arguments.compile:
        compile_folder(arguments.compile, arguments.gpu_packages)
        return 0
    missed = 0
    for model in arguments.models.split(","):
        for row in compare(model, arguments.gpu_packages):
            missed += abs(row["error"]) > BAR
            print(json.dumps(row), flush=True)
    return missed > 0


if __name__ == "__main__":
    sys.exit(main())
