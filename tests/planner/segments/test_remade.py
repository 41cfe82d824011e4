"""What is made of indices alone is remade for each reader, unless that is a good part of the program."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shardwright.cluster import Cluster
from shardwright.config import PlanOptions
from shardwright.cost import hardware_profile
from shardwright.planner.search.program import Program
from shardwright.planner.search.search import plan
from shardwright.planner.segments.remade import dear_nodes


def lowered(function: Any, *shapes: tuple[int, ...]) -> str:
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
    flow = Program(lowered(function, *shapes), PlanOptions()).flow
    return {flow.nodes[index].instruction.opcode for index in dear_nodes(flow, hardware_profile("cpu"))}


def test_what_takes_long_is_chosen_and_what_does_not_is_remade() -> None:
    assert "compare" in dear(roots, (48, 48))
    assert dear(masked, (64, 2**17), (2**17, 64)) == set()


@pytest.mark.parametrize("devices", [2, 8])
def test_the_bound_knows_what_comparing_indices_takes(devices: int) -> None:
    found = plan(lowered(roots, (48, 48)), Cluster.local(devices), PlanOptions())
    assert found.cost.gap < 1e-3
    searched = [each.step_s for each in found.candidates if each.mesh == found.mesh and each.name == "search"]
    assert searched == [pytest.approx(found.cost.step_s)]
    assert all(each.step_s is None or each.step_s > 0.999 * found.cost.step_s for each in found.candidates)
