"""Gradients of variables as programs of their own: the step stays what it was, and others wait for less."""

from __future__ import annotations

import cases
import jax
import numpy as np
import pytest
from executor import Executor

from shardwright.clusters.cluster import Cluster
from shardwright.hlo import parse
from shardwright.options.plan_options import PlanOptions
from shardwright.planner.pipeline import PipelineSpec, StageGroup, make_pipeline
from shardwright.plans.pipeline_plan import PipelinePlan
from shardwright.plans.shardings import Mesh


def make_plan(case: cases.Case, stages: int, schedule: str) -> PipelinePlan:
    step, arguments, donated = case
    lowered = jax.jit(step, keep_unused=True, donate_argnums=donated).lower(*arguments)
    text = lowered.as_text("hlo", debug_info=True)
    module = parse(text)
    groups = tuple(StageGroup(first_device=2 * stage, mesh=Mesh.of({"x": 2})) for stage in range(stages))
    choice = PipelineSpec(
        module=module, groups=groups, chunk_of=cases.chunk_of(module), micro_batches=4, schedule=schedule
    )  # fmt: skip
    return make_pipeline(text, Cluster.local(2 * stages), PlanOptions(), choice)


def dots(plan: PipelinePlan, kind: str, chunk: int) -> int:
    """Matrix products of a chunk's program; 0 where it has none of that kind."""
    results = [program for program in plan.programs if program.kind == kind and program.chunk == chunk]
    return sum(each.opcode == "dot" for program in results for each in program.plan.instructions)


def test_the_step_is_what_it_was_and_takes_less_time() -> None:
    case, stages = cases.mlp(3), 3
    plan, before = make_plan(case, stages, "zero-bubble"), make_plan(case, stages, "1f1b")
    assert plan.step_s < before.step_s
    assert plan.bubble_fraction < before.bubble_fraction
    done = Executor(plan).step(jax.tree.leaves(case[1]))
    for wanted, item in zip(jax.tree.leaves(jax.jit(case[0])(*case[1])), done, strict=True):
        np.testing.assert_allclose(item, wanted, rtol=0, atol=1e-5 * (float(np.linalg.norm(wanted)) + 1e-9))


@pytest.mark.dear
def test_what_a_loop_carries_is_not_delayed_before_the_loop() -> None:
    """Dropout's random bits are made by loops, which read what they carry as a tuple."""
    case = cases.gpt2(dropout=0.1)
    done = Executor(make_plan(case, 2, "zero-bubble")).step(jax.tree.leaves(case[1]))
    for wanted, item in zip(jax.tree.leaves(jax.jit(case[0])(*case[1])), done, strict=True):
        np.testing.assert_allclose(item, wanted, rtol=0, atol=1e-5 * (float(np.linalg.norm(wanted)) + 1e-9))


def test_what_nobody_waits_for_is_delayed_and_nothing_is_computed_twice() -> None:
    case = cases.mlp(3)
    plan, before = make_plan(case, 3, "zero-bubble"), make_plan(case, 3, "1f1b")
    # Two products a chunk forward. Backward: two for what it was sent (the first chunk: one, between its own), and two
    # for its variables.
    assert [dots(plan, "forward", chunk) for chunk in range(3)] == [2, 2, 0]
    assert [dots(plan, "backward", chunk) for chunk in range(3)] == [3, 2, 4]
    assert [dots(plan, "weight", chunk) for chunk in range(3)] == [0, 2, 2]
    assert [dots(before, "backward", chunk) for chunk in range(3)] == [3, 4, 6]
