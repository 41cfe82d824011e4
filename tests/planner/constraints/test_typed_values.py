"""Texts with a sharding in the type of every value, as JAX writes them under Explicit axes: counted and priced."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from shardwright.clusters.cluster import Cluster
from shardwright.hlo import parse
from shardwright.options.plan_options import PlanOptions
from shardwright.planner.constraints.typed_values import find_typed_values
from shardwright.planner.planning import plan_step
from shardwright.plans.plan import TYPED, Plan
from shardwright.report.text import explain_plan

EIGHT = Cluster.local(8)
EXPLICIT, AUTO = (
    AbstractMesh((4, 2), ("data", "model"), axis_types=(kind,) * 2) for kind in (AxisType.Explicit, AxisType.Auto)
)
TRIPS = 7


def lower_text(mesh: AbstractMesh) -> str:
    """A loop of 7 layers, trained, its batch and matrices split; two constraints of its author."""

    def shape(*dimensions: int, spec: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dimensions, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    def layer(h: Any, u: Any) -> Any:
        h = jnp.tanh(h @ u)
        return (jax.lax.with_sharding_constraint(h, P("data")) if mesh is AUTO else h), None

    def step(w: Any, x: Any) -> Any:
        return w - jax.grad(lambda w: (jax.lax.scan(layer, x, w)[0] ** 2).sum())(w)

    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(step).trace(shape(TRIPS, 64, 64, spec=()), shape(64, 64, spec=("data",)))
        return traced.lower(lowering_platforms=("cpu",)).as_text("hlo", debug_info=True)


def plan(text: str, **options: Any) -> Plan:
    planned = plan_step(text, EIGHT, PlanOptions(stages=1, **options))
    assert isinstance(planned, Plan)
    return planned


@pytest.mark.dear
def test_types_are_counted_and_priced_and_loops_read_through_them() -> None:
    typed = plan(lower_text(EXPLICIT))
    (note,) = typed.notes  # none of an unknown trip count
    assert note.startswith(f"{TYPED} ")
    assert " a step" in note
    assert "  types " in explain_plan(typed)
    assert not plan(lower_text(AUTO)).notes
    assert not plan(lower_text(EXPLICIT), constraints="ignore").notes


def test_a_few_constraints_are_no_types() -> None:
    assert find_typed_values(parse(lower_text(AUTO))) is None
    typed = find_typed_values(parse(lower_text(EXPLICIT)))
    assert typed is not None
    assert typed.pinned > 0.6 * typed.count
