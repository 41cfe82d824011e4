"""Images split over devices: neighbours exchange borders, as the plan says and as XLA does it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import pytest
from jax import lax

from shardwright.clusters.cluster import Cluster
from shardwright.options.plan_options import PlanOptions
from shardwright.planner import plan
from shardwright.plans.plan import Plan
from shardwright.user_plans import compile_and_prove
from tests.planner.test_numbers import assert_same, run_planned, run_single


def convolve(x: Any, w: Any) -> Any:
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def step(weights: Any, image: Any) -> Any:
    """One image: there is no batch to split."""
    return weights, convolve(jax.nn.relu(convolve(image, weights["in"])), weights["out"])


def program() -> tuple[Any, Any, tuple[int, ...]]:
    keys = jax.random.split(jax.random.key(0), 3)
    weights = {"in": jax.random.normal(keys[0], (3, 3, 16, 32)), "out": jax.random.normal(keys[1], (5, 5, 32, 16))}
    return step, (weights, jax.random.normal(keys[2], (1, 512, 256, 16))), (0,)


def make_plan(mesh: dict[str, int]) -> Plan:
    function, arguments, donated = program()
    text = jax.jit(function, donate_argnums=donated, keep_unused=True).lower(*arguments).as_text("hlo", debug_info=True)
    return plan(text, replace(Cluster.local(8), hardware="a100"), PlanOptions(mesh=mesh))


@pytest.mark.dear
@pytest.mark.parametrize("mesh", [{"data": 8}, {"data": 4, "model": 2}], ids=str)
def test_an_image_is_split_and_its_borders_are_exchanged(mesh: dict[str, int]) -> None:
    step_plan = make_plan(mesh)
    convolutions = [entry for entry in step_plan.instructions if entry.opcode == "convolution"]
    assert all(any(entry.result[0].dims[1:3]) for entry in convolutions)
    assert {collective.kind for collective in step_plan.collectives} == {"collective-permute"}
    assert all(collective.cause.startswith("borders for convolution") for collective in step_plan.collectives)
    proof = compile_and_prove(step_plan)
    assert proof.holds, proof.explain()


@pytest.mark.dear
def test_an_axis_of_one_device_needs_no_borders() -> None:
    assert make_plan({"data": 1, "model": 8}).cost.step_s == pytest.approx(make_plan({"model": 8}).cost.step_s)


@pytest.mark.dear
def test_split_images_give_single_device_numbers() -> None:
    assert_same(run_planned(program(), make_plan({"data": 8})), run_single(program()))
