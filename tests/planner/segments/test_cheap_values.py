"""What is made of indices alone is remade for each reader, unless that is a good part of the program."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shardwright.clusters.cluster import Cluster
from shardwright.cost import hardware_profile
from shardwright.options.plan_options import PlanOptions
from shardwright.planner.costs.kernels import find_kernels, one_device_s
from shardwright.planner.search.program import Program
from shardwright.planner.search.search import plan
from shardwright.planner.segments.cheap_values import expensive_nodes


def lower_text(function: Any, *shapes: tuple[int, ...]) -> str:
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return str(jax.jit(function).lower(*arguments).as_text("hlo"))


def roots(x: jax.Array) -> jax.Array:
    """Inverse roots of small matrices, with much comparing of indices: of the identity, of triangles, of infinities."""
    values, vectors = jnp.linalg.eigh(x @ x.T + 1e-4 * jnp.eye(x.shape[0]))
    return (vectors * values**-0.25) @ vectors.T


def masked(x: jax.Array, w: jax.Array) -> jax.Array:
    """A product with a triangular mask that hardly counts."""
    return jnp.sum((x @ w) * jnp.tril(jnp.ones((x.shape[0], w.shape[1]))))


def dear(function: Any, *shapes: tuple[int, ...]) -> set[str]:
    flow = Program(lower_text(function, *shapes), PlanOptions()).flow
    nodes = expensive_nodes(flow, find_kernels(flow), hardware_profile("cpu"))
    return {flow.nodes[index].instruction.opcode for index in nodes}


def with_dropout(x: jax.Array, w: jax.Array) -> jax.Array:
    """Many layers, each of which counts the elements of its mask, beside a large product."""
    large = jnp.sum(w @ w)
    for i in range(24):
        result = jax.random.bernoulli(jax.random.fold_in(jax.random.key(0), i), 0.9, x.shape)
        x = jnp.where(result, jnp.tanh(x), 0.0)
    return x.sum() + large


def test_many_that_take_little_each_are_chosen_together() -> None:
    shapes = (1024, 256), (4096, 4096)
    flow = Program(lower_text(with_dropout, *shapes), PlanOptions()).flow
    kernels, profile = find_kernels(flow), hardware_profile("cpu")
    total_s = sum(one_device_s(node, kernels, profile) for node in flow.nodes if not node.is_value)
    results = [flow.nodes[index] for index in expensive_nodes(flow, kernels, profile)]
    assert any(one_device_s(node, kernels, profile) < 1e-4 * total_s for node in results)


def triangle_of(longest: int, x: jax.Array) -> jax.Array:
    """Attention to what comes before, by a part of a mask that is made for the longest sequence there may be."""
    mask = jnp.tril(jnp.ones((longest, longest), bool))[: x.shape[0], : x.shape[0]]
    return jnp.sum(jnp.where(mask, x @ x.T, -1e9))


def test_of_a_mask_only_what_is_read_has_a_price() -> None:
    short = triangle_step_s(64)
    assert triangle_step_s(2**15) == pytest.approx(short, rel=0.02)


def triangle_step_s(longest: int) -> float:
    step_plan = plan(lower_text(partial(triangle_of, longest), (64, 512)), Cluster.local(2), PlanOptions())
    return step_plan.cost.step_s


def test_what_takes_long_is_chosen_and_what_does_not_is_remade() -> None:
    assert "compare" in dear(roots, (48, 48))
    assert dear(masked, (64, 2**17), (2**17, 64)) == set()


@pytest.mark.parametrize("devices", [2, 8])
def test_the_bound_knows_what_comparing_indices_takes(devices: int) -> None:
    step_plan = plan(lower_text(roots, (48, 48)), Cluster.local(devices), PlanOptions())
    assert step_plan.cost.gap < 1e-3
    searched = [each.step_s for each in step_plan.candidates if each.mesh == step_plan.mesh and each.name == "search"]
    assert searched == [pytest.approx(step_plan.cost.step_s)]
    assert all(each.step_s is None or each.step_s > 0.999 * step_plan.cost.step_s for each in step_plan.candidates)
