"""Predictions of the TPU profile beside what the TPU compiler, which is not installed here, said of the same plans.

Its figures were made with libtpu 0.0.42.1 and jax 0.10.2 for a v5e:

    python -m oracles.memory --tpu-python PYTHON --models mlp,mlp-bf16,lstm,moe,resnet \\
        --plans data,tensor,mixed
"""

from __future__ import annotations

from pathlib import Path

import pytest

import shardwright as sw
from shardwright.cost import hardware_profile, predict_memory
from shardwright.hlo import parse
from workloads.memory_steps import LARGE_MODELS

ROOT = Path(__file__).resolve().parents[3]
MB = 10**6


@pytest.mark.dear
@pytest.mark.parametrize(
    ("model", "plan", "mesh", "parts", "taken_mb"),
    [
        ("mlp", "data", "8", 1, 1879),  # weights are copied into the layout of their gradients
        ("mlp-bf16", "data", "8", 1, 1510),
        ("mlp", "tensor", "8", 1, 5016),  # gradients of weights wait for collectives
        ("lstm", "tensor", "8", 1, 2629),  # what only products read is carried as bfloat16
        ("moe", "data", "8", 1, 2937),  # activations are rounded where they are made
        ("moe", "mixed", "2x4", 1, 2555),  # an iota that two one-hot encodings spread is gathered for one of them
        ("resnet", "data", "8", 1, 5007),  # reshapes of the innermost dimension copy
        ("resnet", "data", "8", 2, 2998),
        ("resnet", "data", "8", 4, 1779),  # and fill up tiles, where there are few images
    ],
)
def test_the_peak_is_that_of_the_tpu_compiler(model: str, plan: str, mesh: str, parts: int, taken_mb: int) -> None:
    cluster = ROOT / "cluster_configs" / "tpu_v5e_2x4.json"
    step_plan = sw.plan(LARGE_MODELS[model](), cluster, force=plan, mesh=mesh, micro_batches=parts)
    assert isinstance(step_plan, sw.Plan)
    profile = hardware_profile("tpu-v5e")
    module = parse(step_plan.require_hlo())
    predicted = predict_memory(
        module, step_plan.instructions, step_plan.parameters, step_plan.outputs, step_plan.mesh, profile
    )
    assert predicted.peak_bytes / MB == pytest.approx(taken_mb, rel=0.15)
