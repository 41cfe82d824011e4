"""What a pipeline does once a step instead of once a micro-batch: sums of several stages, copies of weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardwright as sw
from oracles.late_collectives import find_late, find_late_in_text, plan_model
from shardwright.hlo import Instruction, parse
from shardwright.plans.pipeline_plan import MICRO_BATCH, PipelinePlan
from tests.planner.pipeline.executor import Executor
from workloads.cases import Leaf, training_case
from workloads.pipeline_steps import MODELS, arguments_of, build_gpt2

MESH = {"data": 2, "model": 2}
MICRO_BATCHES = 4

#: Of the tied table of `build_gpt2`.
TABLE = (256, 64)

#: Largest ||a - b|| / ||b|| of a tensor after a step: bfloat16 rounds each micro-batch's gradient by itself.
BARS = {"llama": 2e-2}


def pipeline_of(case: Any, mesh: Mapping[str, int] = MESH, **options: Any) -> PipelinePlan:
    text = case.lower().as_text("hlo", debug_info=True)
    plan = sw.plan(
        text, 8, cache=False, stages=2, mesh=dict(mesh), micro_batches=MICRO_BATCHES, **{"schedule": "1f1b", **options}
    )
    assert isinstance(plan, PipelinePlan)
    return plan


def count_sends(plan: PipelinePlan) -> Counter[str]:
    return Counter(task.reads[0].value for _, task in plan.tasks.tasks() if task.kind == "send")


def worst_distance(case: Any, plan: PipelinePlan, steps: int = 1) -> float:
    """Of all outputs after some steps beside single-device JAX, in norms of the output."""
    params, state, batch = arguments_of(case)
    flat, tree = jax.tree.flatten((params, state))
    ours, executor, reference = flat, Executor(plan), jax.jit(case.step)
    theirs = (params, state)
    for _ in range(steps):
        result = executor.step([*ours, *jax.tree.leaves(batch)])
        ours = result[: len(flat)]
        *theirs, loss = reference(*theirs, batch)
    expected = [*jax.tree.leaves(theirs), loss]
    assert jax.tree.structure(tuple(theirs)) == tree
    return max(
        float(np.linalg.norm(np.asarray(a) - np.asarray(b)) / max(np.linalg.norm(np.asarray(b)), 1e-6))
        for a, b in zip(result, expected, strict=True)
    )


@pytest.mark.dear
@pytest.mark.parametrize("model", MODELS)
def test_nothing_is_reduced_in_micro_batches_that_could_be_after_them(model: str) -> None:
    """As XLA compiles the programs; and the numbers are one device's."""
    plan = plan_model(model, MESH, MICRO_BATCHES)
    assert list(find_late(plan)) == []
    if model != "mixed":  # has a bar of its own
        assert worst_distance(MODELS[model](), plan) <= BARS.get(model, 1e-4)


def distances(ours: Iterable[Any], exact: Iterable[Any]) -> list[float]:
    return [
        float(np.linalg.norm(np.asarray(a) - np.asarray(b)) / max(np.linalg.norm(np.asarray(b)), 1e-6))
        for a, b in zip(ours, exact, strict=True)
    ]


@pytest.mark.dear
def test_mixed_precision_is_as_exact_as_on_one_device() -> None:
    """Both beside the step in float32: terms of bfloat16 are added up in float32."""
    mixed = build_gpt2(is_mixed=True)
    arguments = arguments_of(mixed)
    exact = jax.tree.leaves(jax.jit(build_gpt2().step)(*arguments))
    one_device = distances(jax.tree.leaves(jax.jit(mixed.step)(*arguments)), exact)
    ours = distances(Executor(pipeline_of(mixed)).step(jax.tree.leaves(arguments)), exact)
    assert max(ours) <= 1.5 * max(one_device)


@pytest.mark.dear
def test_a_tied_table_in_mixed_precision_meets_once() -> None:
    """A convert stands between the sum of both stages' terms and the accumulator; the sum goes with it."""
    plan = pipeline_of(build_gpt2(is_mixed=True))
    shapes = {value.name: value.variable.shape for value in plan.values}
    tables = {value: times for value, times in count_sends(plan).items() if shapes[value] == TABLE}
    assert set(tables.values()) == {1}, "the weight there, the sum of its gradients back"
    assert len(tables) == 2


@pytest.mark.dear
def test_narrower_copies_are_made_once() -> None:
    """No program of a micro-batch converts a weight, and none is kept for every micro-batch in flight."""
    plan = pipeline_of(build_gpt2(is_mixed=True))
    weights = {variable.variable.shape for variable in plan.arguments if len(variable.variable.shape) == 2}
    for program in plan.programs:
        if program.kind in ("forward", "backward"):
            read = [plan.value[name, program.stage].variable for name in program.reads if name != MICRO_BATCH]
            given = [value for value in read if value.name.startswith("argument.")]
            assert not any(value.shape in weights and value.element_type == "f32" for value in given)
            assert any(name.startswith("ahead.") for name in program.reads)
    kept = [value for value in plan.values if value.scope == "micro_batch" and value.variable.shape in weights]
    assert [value.name for value in kept if value.variable.element_type == "bf16"] == []


@pytest.mark.dear
def test_one_program_makes_narrower_copies_ahead_of_its_loop() -> None:
    text = build_gpt2(is_mixed=True).lower().as_text("hlo", debug_info=True)
    plan = sw.plan(text, 4, cache=False, stages=1, micro_batches=MICRO_BATCHES)
    module = parse(plan.require_hlo())

    def count_copies(instructions: Iterable[Instruction]) -> int:
        """Conversions of matrices of the shape of the table, which both layers' second matrices have."""
        return sum(
            i.opcode == "convert" and i.shape.leaves[0].element_type == "bf16" and i.shape.leaves[0].dimensions == TABLE
            for i in instructions
        )

    assert count_copies(module.entry) == 3
    assert count_copies(module.instructions()) == 3


@pytest.mark.dear
def test_casts_inside_a_checkpoint_and_a_scaled_loss() -> None:
    """A cast that the backward pass makes again, and a constant between the terms and their sum."""
    width = 32
    params = {"table": Leaf((64, width), (None, None)), "w": [Leaf((width, width), (None, None)) for _ in range(4)]}
    batch = {name: Leaf((16, 8), ("batch", None), jnp.int32) for name in "xy"}

    def loss(params: Any, batch: Any) -> jax.Array:
        table = 0.5 * params["table"].astype(jnp.bfloat16)
        x = table[batch["x"]]
        for weight in params["w"]:
            x = jax.checkpoint(lambda x, w: x + jnp.tanh(x @ w.astype(jnp.bfloat16)))(x, weight)
        logits = (x @ table.T).astype(jnp.float32)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["y"][..., None], -1).mean()

    case = training_case(loss, params, batch, optax.sgd(0.1))
    plan = pipeline_of(case)
    assert max(count_sends(plan)[value.name] for value in plan.values if value.variable.shape == (64, width)) == 1
    assert worst_distance(case, plan) <= 2e-2


LATE = """
HloModule backward, entry_computation_layout={(f32[8]{0}, f32[8]{0}, f32[4]{0})->(f32[8]{0}, f32[4]{0})}

sum {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b)
}

ENTRY main {
  term = f32[8]{0} parameter(0)
  total = f32[8]{0} parameter(1)
  handed = f32[4]{0} parameter(2)
  late = f32[8]{0} all-reduce(term), to_apply=sum, replica_groups={}
  scaled = f32[8]{0} negate(late)
  added = f32[8]{0} add(total, scaled)
  needed = f32[4]{0} all-reduce(handed), to_apply=sum, replica_groups={}
  ROOT results = (f32[8]{0}, f32[4]{0}) tuple(added, needed)
}
"""


def test_late_collectives_are_found() -> None:
    found = find_late_in_text(LATE, reads=("x", "total.w", "y"), writes=("total.w", "y.back"))
    assert [instruction.name for instruction in found] == ["late"]
