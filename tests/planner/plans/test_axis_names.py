"""The axis that splits the batch is called `data`, wherever a plan writes its name; names of the user's stay."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardwright as sw
from shardwright.hlo import parse
from shardwright.planner.plans.axis_names import name_axes
from shardwright.planner.plans.verify import check_plan

#: Two products, a batch of 64: the batch over one axis, the weights over another.
FORCE = {"weights[0]": {1: "data"}, "weights[1]": {0: "data"}}


@cache
def text(batch: int = 64) -> str:
    def step(weights: Any, x: jax.Array) -> Any:
        def loss_of(weights: Any) -> jax.Array:
            return jnp.square(jnp.tanh(jnp.tanh(x @ weights[0]) @ weights[1])).mean()

        loss, gradients = jax.value_and_grad(loss_of)(weights)
        return [weight - 0.1 * gradient for weight, gradient in zip(weights, gradients, strict=True)], loss

    weights = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 2
    lowered = jax.jit(step, donate_argnums=0).lower(weights, jax.ShapeDtypeStruct((batch, 256), jnp.float32))
    return lowered.as_text("hlo", debug_info=True)


def plan(force: Any = FORCE | {"x": {0: "model"}}, mesh: Any = "4x2") -> sw.Plan:
    made = sw.plan(text(), 8, mesh=mesh, force=force, effort="fast", cache=False)
    assert isinstance(made, sw.Plan)
    return made


def test_names_are_exchanged_everywhere_and_the_plan_holds() -> None:
    before = plan()
    after = name_axes(before)
    assert (str(before.mesh), str(after.mesh)) == ("data=4 × model=2", "model=4 × data=2")
    names = {"data": "model", "model": "data"}
    for old, new in zip(before.parameters, after.parameters, strict=True):
        assert [[names[axis] for axis in dim] for dim in old.sharding.dims] == [[*dim] for dim in new.sharding.dims]
    assert after.parameters[-1].sharding.dims[0] == ("data",)
    for old, new in zip(before.collectives, after.collectives, strict=True):
        assert [names[axis] for axis in old.axes] == [*new.axes]
    assert str(before.mesh) not in after.cost.bound_scope
    assert any(candidate.mesh == after.mesh for candidate in after.candidates)
    check_plan(parse(after.require_hlo()), after)
    assert name_axes(after) is after


@pytest.mark.parametrize("force", [{"x": {0: "data"}}, {"x": {0: None, 1: "model"}}])
def test_a_batch_on_data_or_on_no_axis_changes_nothing(force: Any) -> None:
    made = plan(force)
    assert name_axes(made) is made


def test_names_of_the_users_stay() -> None:
    assert plan().parameters[-1].sharding.dims[0] == ("model",)
    own = plan({"x": {0: "rows"}}, mesh={"data": 4, "rows": 2})
    assert own.parameters[-1].sharding.dims[0] == ("rows",)


def test_a_search_calls_the_axis_of_the_batch_data() -> None:
    made = sw.plan(text(512), 8, cache=False)
    assert isinstance(made, sw.Plan)
    assert str(made.mesh) == "model=4 × data=2"
    assert made.parameters[-1].sharding.dims == (("data",), ("model",))
