"""Models of the planner's benchmark, tiny: experts with capacity per sequence, group norm, a U-Net."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest

from shardwright.hlo import parse
from shardwright.planner.microbatch import accumulate_step, split_step
from tests.planner.microbatch.test_whole_batch import arguments_of, assert_equal, run_accumulated
from tests.planner.programs import Program, lower
from tests.planner.rewrites.rewrite_programs import run
from workloads.models import moe, resnet, unet

MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "mixture of experts": (
        moe,
        {"size": "8e", "experts": 4, "layers": 2, "width": 16, "heads": 2, "context": 8, "vocabulary": 32},
    ),
    "residual, group norm": (
        resnet,
        {"size": "250M", "channels": 32, "blocks": (1,), "image": 8, "classes": 8},
    ),
    "skip connections": (
        unet,
        {"size": "128", "channels": 32, "multipliers": (1,), "blocks": 1, "attention_at": (), "image": 4},
    ),
}


def program(name: str) -> Program:
    """The model's step with plain gradient descent, and numbers to run it on."""
    module, changes = MODELS[name]
    case = module.build(devices=1, optimizer=optax.sgd(0.1), batch_per_device=4, **changes)
    random = np.random.default_rng(0)

    def values(aval: jax.ShapeDtypeStruct) -> np.ndarray:
        if np.issubdtype(aval.dtype, np.integer):
            return random.integers(0, 8, aval.shape).astype(aval.dtype)
        return random.uniform(0.05, 0.3, aval.shape).astype(aval.dtype)

    return case.step, jax.tree.map(values, case.avals), (0, 1)


@pytest.mark.dear
@pytest.mark.parametrize("name", MODELS)
def test_equals_the_whole_batch(name: str) -> None:
    result = program(name)
    text, arguments = lower(result), arguments_of(result)
    split = split_step(parse(text))
    assert all(along.dim == 0 for along in split.batch.values())
    assert_equal(run(text, arguments), run_accumulated(accumulate_step(split, 2), arguments))
