"""Named strategies, rule mode and batches in odd places train to single-device losses on eight devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.client.annotate import keep_annotations
from shardwright.clusters.cluster import Cluster
from shardwright.options.plan_options import PlanOptions
from shardwright.planner import plan
from tests.planner.programs import Program, cnn, gpt2, lower, mlp, scan, time_major
from tests.planner.test_numbers import assert_same, run_planned, run_single

EIGHT = Cluster.local(8)
EXPERTS, CAPACITY = 8, 4


def mixture(batch: int = 32, width: int = 16, hidden: int = 32) -> Program:
    """Switch routing (Fedus et al., 2021): each token to one expert, those over its capacity dropped."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return (rng.normal(size=shape) * 0.3).astype(np.float32)

    params = {
        "gate": normal(width, EXPERTS), "up": normal(EXPERTS, width, hidden), "down": normal(EXPERTS, hidden, width)
    }  # fmt: skip

    def loss(p: Any, x: Any, y: Any) -> Any:
        gates = jax.nn.softmax(x @ p["gate"])
        chosen = jax.nn.one_hot(jnp.argmax(gates, -1), EXPERTS)
        place = jnp.cumsum(chosen, 0) * chosen - 1
        dispatch = chosen[..., None] * jax.nn.one_hot(place.astype(jnp.int32), CAPACITY)
        sent = jnp.einsum("bec,bd->ecd", dispatch, x)
        result = jnp.einsum("ech,ehd->ecd", jax.nn.relu(jnp.einsum("ecd,edh->ech", sent, p["up"])), p["down"])
        combined = jnp.einsum("bec,ecd->bd", dispatch * gates.max(-1)[:, None, None], result)
        return jnp.mean((x + combined - y) ** 2)

    def step(p: Any, x: Any, y: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(p, x, y)
        return jax.tree.map(lambda w, g: w - 0.5 * g, p, gradients), value

    return step, (params, normal(batch, width), normal(batch, width)), (0,)


def trains(program: Program, options: PlanOptions) -> Any:
    planned = plan(lower(program), EIGHT, options)
    assert_same(run_planned(program, planned), run_single(program))
    return planned


@pytest.mark.dear
@pytest.mark.parametrize("make", [mlp, gpt2, scan, time_major])
def test_megatron(make: Callable[[], Program]) -> None:
    planned = trains(make(), PlanOptions(force="megatron", mesh={"data": 2, "model": 4}))
    assert any("model" in variable.sharding.axes for variable in planned.parameters)


@pytest.mark.parametrize("sizes", [{"data": 8}, {"data": 2, "model": 4}], ids=str)
def test_expert(sizes: dict[str, int]) -> None:
    planned = trains(mixture(), PlanOptions(force="expert", mesh=sizes))
    assert planned.parameters[2].sharding.dims == ((list(sizes)[-1],), (), ())


@pytest.mark.dear
@pytest.mark.parametrize("force", ["data", "zero1", "fsdp"])
@pytest.mark.parametrize(
    "program", [mlp(batch=30), time_major(batch=24), cnn(batch=12)], ids=["uneven", "time", "images"]
)
def test_batches_that_are_uneven_or_behind_the_time(program: Program, force: str) -> None:
    planned = trains(program, PlanOptions(force=force))
    assert all("data" in variable.sharding.axes for variable in planned.parameters if variable.name.startswith("batch"))


def annotated() -> Program:
    """Megatron's layout, said of one weight and of the batch; the rest follows."""
    step, (params, state, x, y), donated = mlp()

    def said(p: Any, s: Any, x: Any, y: Any) -> Any:
        p = {**p, "w1": sw.annotate(p["w1"], {0: None, 1: "model"})}
        return step(p, s, sw.annotate(x, {0: "data"}), y)

    return said, (params, state, x, y), donated


def test_rule_mode() -> None:
    with keep_annotations():
        program = annotated()
        planned = plan(lower(program), EIGHT, PlanOptions(mesh={"data": 2, "model": 4}, mode="propagate"))
    assert planned.origin == "propagated from annotations"
    lies = {variable.name: variable.sharding.dims for variable in planned.parameters}
    assert lies["p['w1']"] == ((), ("model",))
    assert lies["p['w2']"] == (("model",), ())
    assert lies["x"] == (("data",), ())
    assert_same(run_planned(program, planned), run_single(program))


def test_rule_mode_follows_what_is_split_somewhere() -> None:
    """The activations are to be split along their features, no matter over what: the weights follow."""
    step, arguments, donated = mlp()

    def said(p: Any, s: Any, x: Any, y: Any) -> Any:
        return step({**p, "w1": sw.annotate(p["w1"], {0: None, 1: True})}, s, x, y)

    program = said, arguments, donated
    with keep_annotations():
        planned = plan(lower(program), EIGHT, PlanOptions(mesh={"data": 8}, mode="propagate"))
    lies = {variable.name: variable.sharding.dims for variable in planned.parameters}
    assert (lies["p['w1']"], lies["p['w2']"]) == (((), ("data",)), (("data",), ()))
    assert_same(run_planned(program, planned), run_single(program))
