"""One plan of each benchmark model, kept as text: it changes on purpose (`make golden`), or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from tests.planner.golden_plans import CASES, FOLDER, golden_text, plan_of
from workloads.models.registry import MODELS

ROOT = Path(__file__).resolve().parent.parent.parent

#: Models that plan fast, for runs under other hash seeds; each run of the tests has a seed of its own besides.
QUICK = ("vit", "llama", "dlrm")


def golden(model: str) -> str:
    """The kept text. Skips where another JAX lowers the models to other programs."""
    text = (FOLDER / f"{model}.txt").read_text()
    version = text.splitlines()[0].rpartition("jax ")[2]
    if version != jax.__version__:
        pytest.skip(f"the golden plans are of programs that jax {version} lowers")
    return text


#: Plans whose whole latencies take that much more than the shares that a bound counts.
MOST_OPEN = {"llama": 0.011, "dlrm": 0.065}


def test_every_benchmark_model_has_a_golden_plan() -> None:
    assert CASES.keys() == MODELS.keys() == {path.stem for path in FOLDER.glob("*.txt")}


@pytest.mark.dear
@pytest.mark.parametrize("model", CASES)
def test_the_plan_is_the_golden_one(model: str) -> None:
    plan = plan_of(model)
    assert plan.cost.is_bounded
    assert plan.cost.gap <= MOST_OPEN.get(model, 0.01)
    assert golden_text(model, plan) == golden(model), "if the change is meant: make golden, and say why in the commit"


@pytest.mark.dear
def test_the_plan_is_the_same_under_any_hash_seed() -> None:
    command = [sys.executable, "-m", "tests.planner.golden_plans", *QUICK, "--print"]
    environment = {**os.environ, "PYTHONHASHSEED": "4711"}
    child = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert child.returncode == 0, child.stderr[-2000:]
    assert child.stdout == "".join(golden(model) for model in QUICK)
