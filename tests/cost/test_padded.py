"""What is cut into uneven parts is padded first; two kernels that read parts of it do not pad it each for itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shardwright.client.annotate import annotate, annotations_kept
from shardwright.cluster import Cluster
from shardwright.options import plan_options
from shardwright.planner import plan
from shardwright.plans import Plan
from shardwright.xla import CompileService

ROWS, INNER, MIDDLE = 4, 64, 32


@pytest.fixture(scope="module")
def service() -> Iterator[CompileService]:
    with CompileService(4) as service:
        yield service


def planned(columns: int) -> Plan:
    """Something whole on every device, of which two products read a part: one as it lies, one turned."""

    def step(whole: jax.Array, other: jax.Array, w: jax.Array, x: jax.Array) -> Any:
        ordered = annotate(jnp.sort(annotate(whole, {2: None}), 2), {0: None, 1: None, 2: None})
        part = annotate(ordered, {2: "x"}) + annotate(other, {2: "x"})
        return jnp.einsum("blv,vd->bld", part, annotate(w, {0: "x"})), jnp.einsum("blv,bld->vd", part, x)

    shapes = ((ROWS, INNER, columns), (ROWS, INNER, columns), (columns, MIDDLE), (ROWS, INNER, MIDDLE))
    with annotations_kept():
        lowered = jax.jit(step).lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    return plan(lowered.as_text("hlo"), Cluster.local(4), plan_options(mesh={"x": 4}))


@pytest.mark.parametrize("columns", [4001, 4000])
def test_what_is_cut_unevenly_is_stored_padded(columns: int, service: CompileService) -> None:
    made = planned(columns)
    program = service.compile(made.require_hlo(), made, want_executable=False)
    assert program.memory is not None
    assert made.memory.temporaries_bytes == pytest.approx(program.memory.temporary_bytes, rel=0.03)
