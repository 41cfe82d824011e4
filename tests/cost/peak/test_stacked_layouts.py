"""Stacks of weights whose slices a loop gathers are copied into another order, as XLA's own memory shows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from shardwright.client.annotate import annotate, keep_annotations
from shardwright.clusters.cluster import Cluster
from shardwright.options.plan_options import PlanOptions
from shardwright.planner import plan
from shardwright.planner.xla_version import xla_version
from shardwright.plans.plan import Plan
from shardwright.xla import CompileService

LAYERS, WIDTH, BATCH = 24, 128, 128
STACK = LAYERS * WIDTH * WIDTH * 4 // 4

ROWS, COLUMNS, WHOLE = {0: None, 1: "x", 2: None}, {0: None, 1: None, 2: "x"}, {0: None, 1: None, 2: None}


def make_plan(layout: dict[int, str | None], sliced: dict[int, str | None], *, again: bool = False) -> Plan:
    """Layers that lie as given, before and after one is cut out. again: in two loops."""

    def step(weights: jax.Array, x: jax.Array) -> jax.Array:
        def layer(i: jax.Array, h: jax.Array) -> jax.Array:
            one = jax.lax.dynamic_slice(annotate(weights, layout), (i, 0, 0), (1, WIDTH, WIDTH))
            return annotate(jnp.tanh(h @ annotate(one, sliced)[0]), {0: "x", 1: None})

        for _ in range(1 + again):
            x = jax.lax.fori_loop(0, LAYERS, layer, x)
        return x

    shapes = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), "f4"), jax.ShapeDtypeStruct((BATCH, WIDTH), "f4")
    with keep_annotations():
        text = jax.jit(step, keep_unused=True).lower(*shapes).as_text("hlo")
    stored = tuple((axis,) if axis else () for axis in layout.values())
    return plan(text, Cluster.local(4), PlanOptions(mesh={"x": 4}, argument_axes={0: stored}, stages=1))


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("layout", [ROWS, COLUMNS])
def test_a_stack_whose_slices_are_gathered_is_copied_once(
    layout: dict[int, str | None], again: bool, service: CompileService
) -> None:
    step_plan = make_plan(layout, WHOLE, again=again)
    program = service.compile(step_plan.require_hlo(), step_plan, want_executable=False)
    assert program.memory is not None
    assert step_plan.memory.temporaries_bytes == pytest.approx(program.memory.temporary_bytes, rel=0.05)
    assert STACK < step_plan.memory.temporaries_bytes < 2 * STACK


def test_a_stack_that_lies_whole_stays(service: CompileService) -> None:
    step_plan = make_plan(WHOLE, WHOLE)
    program = service.compile(step_plan.require_hlo(), step_plan, want_executable=False)
    assert program.memory is not None
    assert program.memory.temporary_bytes < STACK
    assert step_plan.memory.temporaries_bytes == pytest.approx(program.memory.temporary_bytes, rel=0.05)


def test_a_loop_carries_a_copy_of_a_view_that_is_gathered_otherwise_behind_it(service: CompileService) -> None:
    """The variable's new value is computed by columns of the view, and gathered."""

    def step(weight: jax.Array, x: jax.Array) -> jax.Array:
        view = weight.reshape(WIDTH, 3, 2 * WIDTH)

        def layer(_: jax.Array, h: jax.Array) -> jax.Array:
            return annotate(jnp.tanh(h @ view.reshape(WIDTH, 6 * WIDTH))[:, :WIDTH], {0: "x", 1: None})

        y = jax.lax.fori_loop(0, LAYERS, layer, x)
        return annotate(annotate(view, COLUMNS) - jnp.sum(y), WHOLE)

    shapes = jax.ShapeDtypeStruct((WIDTH, 6 * WIDTH), "f4"), jax.ShapeDtypeStruct((8 * BATCH, WIDTH), "f4")
    with keep_annotations():
        text = jax.jit(step, keep_unused=True).lower(*shapes).as_text("hlo")
    step_plan = plan(text, Cluster.local(4), PlanOptions(mesh={"x": 4}, argument_axes={0: ((), ())}, stages=1))
    program = service.compile(step_plan.require_hlo(), step_plan, want_executable=False)
    assert program.memory is not None
    spared = 2 * WIDTH * WIDTH * 4 if xla_version() >= (0, 12) else 0  # a third of the view, by newer XLA
    assert step_plan.memory.temporaries_bytes - spared == pytest.approx(program.memory.temporary_bytes, rel=0.05)
