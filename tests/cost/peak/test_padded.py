"""What is cut into uneven parts is padded first; two kernels that read parts of it do not pad it each for itself."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shardwright.client.annotate import annotate, keep_annotations
from shardwright.clusters.cluster import Cluster
from shardwright.options.user_options import plan_options
from shardwright.planner import plan
from shardwright.planner.search.search import Search
from shardwright.xla import CompileService

ROWS, INNER, MIDDLE = 4, 64, 32


def lower_text(columns: int) -> str:
    """Something whole on every device, of which two products read a part: one as it lies, one turned."""

    def step(whole: jax.Array, other: jax.Array, w: jax.Array, x: jax.Array) -> Any:
        ordered = annotate(jnp.sort(annotate(whole, {2: None}), 2), {0: None, 1: None, 2: None})
        part = annotate(ordered, {2: "x"}) + annotate(other, {2: "x"})
        return jnp.einsum("blv,vd->bld", part, annotate(w, {0: "x"})), jnp.einsum("blv,bld->vd", part, x)

    shapes = ((ROWS, INNER, columns), (ROWS, INNER, columns), (columns, MIDDLE), (ROWS, INNER, MIDDLE))
    with keep_annotations():
        return jax.jit(step).lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).as_text("hlo")


@pytest.mark.parametrize("columns", [4001, 4000])
def test_what_is_cut_unevenly_is_stored_padded(columns: int, service: CompileService) -> None:
    step_plan = plan(lower_text(columns), Cluster.local(4), plan_options(mesh={"x": 4}))
    program = service.compile(step_plan.require_hlo(), step_plan, want_executable=False)
    assert program.memory is not None
    assert step_plan.memory.temporaries_bytes == pytest.approx(program.memory.temporary_bytes, rel=0.03)


def test_a_price_of_memory_takes_what_is_padded_for_the_value_as_it_is_made() -> None:
    search = Search(lower_text(4001), Cluster.local(4), plan_options(mesh={"x": 4}))
    outcome = search.search_meshes()
    candidate = outcome.evaluate(outcome.fastest)
    padded = max(candidate.live_buffers, key=lambda buffer: buffer.size_bytes)
    model = search.memory_model(candidate.chain.graph.variables.shared_layouts)
    values = model.constraint_of_buffers(candidate.live_buffers, candidate.decisions).values
    assert padded.size_bytes > ROWS * INNER * 4001 * 4
    assert padded.name in {search.flow.nodes[node].instruction.name for node, _ in values}
