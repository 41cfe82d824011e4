"""What a plan predicts beside what XLA makes of it: collectives, their bytes, arguments' bytes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shardwright.clusters.cluster import Cluster
from shardwright.options.plan_options import PlanOptions
from shardwright.planner import plan
from shardwright.report.proof import prove
from shardwright.xla import CompileService


def train_step(parameters: Any, x: jax.Array, y: jax.Array) -> Any:
    def loss(parameters: Any) -> jax.Array:
        hidden = x
        for weight in parameters:
            hidden = jax.nn.gelu(hidden @ weight)
        return jnp.mean((hidden - y) ** 2)

    value, gradients = jax.value_and_grad(loss)(parameters)
    return jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradients), value


@pytest.fixture(scope="module")
def text() -> str:
    weights = [jax.ShapeDtypeStruct((256, 256), "f4")] * 3
    batch = jax.ShapeDtypeStruct((512, 256), "f4")
    return jax.jit(train_step, donate_argnums=0, keep_unused=True).lower(weights, batch, batch).as_text("hlo")


@pytest.mark.dear
@pytest.mark.parametrize(
    ("force", "mesh"),
    [
        ("data", {"data": 8}),
        ("tensor", {"model": 8}),
        ("tensor", {"data": 4, "model": 2}),
        ("mixed", {"data": 2, "model": 4}),
        ("mixed", {"data": 2, "model": 2, "sequence": 2}),
        ("fsdp", {"data": 8}),
    ],
)
def test_predicted_collectives_are_those_that_xla_inserts(
    text: str, service: CompileService, force: str, mesh: dict[str, int]
) -> None:
    step_plan = plan(text, Cluster.local(8), PlanOptions(mesh=mesh, force=force))
    program = service.compile(step_plan.require_hlo(), step_plan, want_executable=False)
    proof = prove(step_plan, program.collectives)
    assert proof.predicted_wire_bytes > 0
    assert proof.holds, proof.explain()
    assert not proof.differences, proof.explain()
    assert step_plan.memory.arguments_bytes == program.memory.argument_bytes
