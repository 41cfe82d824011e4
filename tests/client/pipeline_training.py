"""Models trained in pipelines on servers and on one device, side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

import shardwright as sw
from shardwright.plans.pipeline_plan import PipelinePlan
from tests.planner.pipeline import cases

STEPS = 5
#: What a loss may differ by, and a tensor as a part of its norm.
BAR = 1e-5

SGD = optax.sgd(0.1)

#: Model → the step, given how many parts it is to be cut into.
MODELS: dict[str, Callable[[int], cases.Case]] = {
    "gpt2, tied": lambda parts: cases.gpt2(chunks=parts, layers=parts, optimizer=SGD),
    "gpt2, tied, dropout": lambda parts: cases.gpt2(chunks=parts, layers=parts, dropout=0.1, optimizer=SGD),
    "moe": lambda parts: cases.moe(chunks=parts, layers=parts),
    "wide resnet": lambda parts: cases.wide_resnet(chunks=parts, layers=parts),
    "unet": lambda parts: cases.unet(chunks=max(parts, 4)),
}
SCHEDULES = ("gpipe", "1f1b", "2f2b", "interleaved", "zero-bubble")


def parts_of(schedule: str) -> int:
    """How many parts two stages need."""
    return 4 if schedule == "interleaved" else 2


def distance(actual: Any, expected: Any) -> float:
    """The largest difference of a tensor, as a part of its norm."""
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    return max(float(np.linalg.norm(np.asarray(a) - b) / (np.linalg.norm(b) + 1e-12)) for a, b in pairs)


def train(session: sw.Session, case: cases.Case, **options: Any) -> tuple[sw.Step, float, float]:
    """Trains on the servers and on one device: the step, the largest difference of a loss and of a tensor."""
    function, (params, state, *batch), donated = case
    step = session.parallelize(function, donate_argnums=donated, **options)
    alone = jax.jit(function)
    expected = (params, state)
    worst = 0.0
    for _ in range(STEPS):
        params, state, loss = step(params, state, *batch)
        *expected, expected_loss = alone(*expected, *batch)
        worst = max(worst, abs(float(loss) - float(expected_loss)))
    assert isinstance(step.plan, PipelinePlan)
    assert len(step.plan.stages) == options["stages"]
    return step, worst, distance(params, expected[0])
