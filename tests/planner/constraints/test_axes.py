"""`force="axes"`: each axis of the mesh does what its name says, beside the others, with one device's numbers."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks.published.steps import Model, make_step
from shardwright.clusters.cluster import Cluster
from shardwright.errors import OptionError
from shardwright.options.plan_options import PlanOptions
from shardwright.options.user_options import plan_options
from shardwright.planner import plan
from shardwright.plans.plan import Plan
from tests.planner.programs import Program, lower
from tests.planner.test_numbers import assert_same, run_planned, run_single

SIZES: dict[str, Any] = {
    "layers": 2, "width": 32, "heads": 4, "kv_heads": 4, "hidden": 64, "vocabulary": 128, "positions": 16, "batch": 8,
    "compute": "fp32",
}  # fmt: skip
MODELS = {"llama": Model(gated=True, **SIZES), "mixture": Model(experts=4, **SIZES)}


@cache
def program_of(name: str) -> tuple[Program, str]:
    """The step of a model, with arguments, and its text."""
    step, types = make_step(MODELS[name])
    random = np.random.default_rng(0)

    def fill(kind: Any) -> np.ndarray:
        if kind.dtype == np.int32:
            return random.integers(0, 128, kind.shape).astype(np.int32) if kind.shape else np.zeros((), np.int32)
        return (0.1 * random.normal(size=kind.shape)).astype(kind.dtype)

    params, state, *batch = types
    arguments = jax.tree.map(fill, params), jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), state)
    program = step, (*arguments, *jax.tree.map(fill, batch)), (0, 1)
    return program, lower(program)


@cache
def plan_axes(name: str, axes: tuple[tuple[str, int], ...], micro_batches: int | None = None) -> Plan:
    options = PlanOptions(mesh=dict(axes), force="axes", micro_batches=micro_batches, rewrites="none")
    planned = plan(program_of(name)[1], Cluster.local(8), options)
    assert isinstance(planned, Plan)
    return planned


def axes_of(planned: Plan, part: str) -> set[str]:
    """Axes that split any argument whose name holds `part`."""
    named = [variable for variable in planned.parameters if part in variable.name]
    assert named, f"there is no {part}"
    return {axis for variable in named for dim in variable.sharding.dims for axis in dim}


def axes_of_kind(planned: Plan, kind: str) -> set[str]:
    return {axis for one in planned.collectives if one.kind == kind for axis in one.axes}


@pytest.mark.dear
def test_copies_of_shards_gather_inside_and_sum_across() -> None:
    """HSDP: state lies in shards over one axis, and as often over the other; batches over both."""
    planned = plan_axes("llama", (("data", 2), ("fsdp", 4)))
    assert axes_of(planned, "params") == {"fsdp"}
    assert planned.parameters[-1].sharding.dims == (("data", "fsdp"), ())
    assert axes_of_kind(planned, "all-gather") == {"fsdp"}
    assert "data" in axes_of_kind(planned, "all-reduce")
    assert "data" not in axes_of_kind(planned, "reduce-scatter")


@pytest.mark.dear
def test_optimizer_state_alone_is_split_beside_tensor_parallelism() -> None:
    planned = plan_axes("llama", (("zero1", 2), ("tensor", 4)))
    weights = [variable for variable in planned.parameters if variable.name.endswith("['up']")]
    read, *moments = (set(variable.sharding.axes) for variable in weights)
    assert read == {"tensor"}
    assert moments == [{"zero1", "tensor"}] * 2


@pytest.mark.dear
def test_weights_in_shards_of_tensor_parallelism_are_gathered_over_their_shards_alone() -> None:
    planned = plan_axes("llama", (("fsdp", 2), ("tensor", 4)))
    up = next(variable for variable in planned.parameters if variable.name.endswith("['up']"))
    assert set(up.sharding.axes) == {"fsdp", "tensor"}
    gathers = [one for one in planned.collectives if one.kind == "all-gather"]
    assert any(one.axes == ("fsdp",) for one in gathers)
    assert not any({"fsdp", "tensor"} <= set(one.axes) for one in gathers)


@pytest.mark.dear
def test_context_parallelism_splits_the_sequence_and_keeps_state_whole() -> None:
    planned = plan_axes("llama", (("data", 2), ("context", 4)))
    assert planned.parameters[-1].sharding.dims == (("data",), ("context",))
    state = planned.parameters[:-2]
    assert not any(variable.sharding.axes for variable in state)
    products = [entry for entry in planned.instructions if entry.name.startswith("dot_general")]
    used = [{axis for value in entry.operands for sharding in value for axis in sharding.axes} for entry in products]
    assert products
    assert all("context" in axes for axes in used)


@pytest.mark.dear
def test_gradients_are_scattered_in_every_micro_batch() -> None:
    """ZeRO-2 sums shards of gradients, ZeRO-1 may scatter once a step."""
    in_parts = plan_axes("llama", (("zero2", 2), ("tensor", 4)), micro_batches=2)
    once = plan_axes("llama", (("zero1", 2), ("tensor", 4)), micro_batches=2)

    def count(planned: Plan) -> float:
        return sum(one.count for one in planned.collectives if one.kind == "reduce-scatter")

    assert count(in_parts) > count(once)


@pytest.mark.dear
@pytest.mark.parametrize(
    ("name", "axes", "micro_batches"),
    [
        ("llama", {"data": 2, "fsdp": 4}, None),
        ("llama", {"zero1": 2, "tensor": 4}, None),
        ("llama", {"fsdp": 2, "model": 2, "context": 2}, None),
        ("llama", {"zero2": 4, "tensor": 2}, 2),
        ("mixture", {"fsdp": 2, "expert": 2, "tensor": 2}, None),
    ],
    ids=str,
)
def test_numbers_are_one_devices(name: str, axes: dict[str, int], micro_batches: int | None) -> None:
    program, _ = program_of(name)
    assert_same(run_planned(program, plan_axes(name, tuple(axes.items()), micro_batches)), run_single(program))


def test_axes_that_say_nothing_are_refused() -> None:
    with pytest.raises(OptionError, match="'datas' does not say") as caught:
        plan(program_of("llama")[1], Cluster.local(8), PlanOptions(mesh={"datas": 2, "fsdp": 4}, force="axes"))
    assert "data" in str(caught.value)
    with pytest.raises(OptionError, match="no mesh is given"):
        plan_options(force="axes")
