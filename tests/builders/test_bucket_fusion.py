"""A bucket is a value of the plan, priced as XLA's combiner follows it, and XLA:GPU follows it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardwright as sw
from benchmarks.gpu_targets import PACKAGES_VARIABLE
from shardwright.clusters.cluster import Cluster
from shardwright.plans.plan import count_combined

GPUS = Cluster(name="gpus", platform="cuda", hardware="a100", nodes=Cluster.local(8).nodes)
LAYERS, WIDTH = 24, 1024  # 24 gradients of 4 MiB, and the loss

#: Bucket → all-reduces of a step: each by itself, two a bucket, seven a bucket of 30 MiB, all in one.
COUNTS = [(0, 25), ("8MiB", 13), (None, 4), ("1GiB", 1)]


def step(weights: Any, x: Any) -> Any:
    def loss(weights: Any) -> Any:
        hidden = x
        for weight in weights:
            hidden = jnp.tanh(hidden @ weight)
        return (hidden**2).mean()

    value, gradients = jax.value_and_grad(loss)(weights)
    return [weight - 0.1 * gradient for weight, gradient in zip(weights, gradients, strict=True)], value


@pytest.fixture(scope="module")
def text() -> str:
    weights = [jax.ShapeDtypeStruct((WIDTH, WIDTH), "float32")] * LAYERS
    batch = jax.ShapeDtypeStruct((512, WIDTH), "float32")
    return sw.lower(step, weights, batch, donate_argnums=0, platform="cuda").hlo_text


def planned(text: str, bucket: Any, cluster: Cluster = GPUS) -> sw.Plan:
    made = sw.plan(text, cluster, force="data", bucket=bucket, cache=False)
    assert isinstance(made, sw.Plan)
    return made


@pytest.mark.parametrize(("bucket", "count"), COUNTS)
def test_the_plan_predicts_what_is_combined(text: str, bucket: Any, count: int) -> None:
    made = planned(text, bucket)
    assert count_combined(made.collectives) == count
    assert bool(made.compile_options) == (bucket is not None)
    assert sw.Plan.from_json(made.to_json(), hlo_text=text).compile_options == made.compile_options


def test_fewer_collectives_are_fewer_latencies_and_more_memory(text: str) -> None:
    plans = [planned(text, bucket) for bucket, _ in COUNTS]
    steps_s, bytes_needed = [made.cost.step_s for made in plans], [made.memory.peak_bytes for made in plans]
    assert steps_s == sorted(steps_s, reverse=True)
    assert bytes_needed == sorted(bytes_needed)
    assert steps_s[0] > 1.2 * steps_s[-1]


def test_where_xla_has_no_threshold_the_plan_says_so(text: str) -> None:
    made = planned(text, "8MiB", Cluster.local(8))
    assert made.compile_options == {}
    assert any("no such threshold" in note and "all-reduces of any size" in note for note in made.notes)


@pytest.mark.parametrize("bucket", ["much", "8 apples", "50%", -1, 2.5, True])
def test_a_bucket_is_a_size(bucket: Any) -> None:
    with pytest.raises(sw.OptionError) as refusal:
        sw.plan("", 8, bucket=bucket)
    assert refusal.value.where == "bucket"


@pytest.mark.dear
@pytest.mark.skipif(PACKAGES_VARIABLE not in os.environ, reason=f"{PACKAGES_VARIABLE} names no compiler for GPUs")
@pytest.mark.parametrize(("bucket", "count"), COUNTS)
def test_xla_for_gpus_combines_so(text: str, bucket: Any, count: int, tmp_path: Path) -> None:
    step_file, plan_file = tmp_path / "step.hlo", tmp_path / "plan.json"
    step_file.write_text(text)
    plan_file.write_text(planned(text, bucket).to_json())
    command = [sys.executable, "-m", "tests.builders.gpu_all_reduces", str(step_file), str(plan_file)]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [*command, os.environ[PACKAGES_VARIABLE]], cwd=root, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[-1]) == count
