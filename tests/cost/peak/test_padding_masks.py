"""Padding that a reduction or a product would add up is masked, as XLA's own memory shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shardwright.client.annotate import annotate, keep_annotations
from shardwright.clusters.cluster import Cluster
from shardwright.cost.peak.padding_masks import dims_to_mask, is_counted_in_group
from shardwright.hlo import parse
from shardwright.options.user_options import plan_options
from shardwright.planner import plan
from shardwright.plans.plan import Plan
from shardwright.plans.shardings import Mesh, TensorSharding
from shardwright.xla import CompileService

ROWS, MIDDLE, COLUMNS = 256, 128, 1001

MESH = Mesh.of({"x": 4, "y": 2})
PRODUCT = """HloModule product

ENTRY main {
  a = f32[16,1001]{1,0} parameter(0)
  b = f32[1001,32]{1,0} parameter(1)
  ROOT c = f32[16,32]{1,0} dot(a, b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


def columns(value: jax.Array) -> jax.Array:
    """Split unevenly."""
    return annotate(value, {0: None, 1: "x"})


def twice(w: jax.Array, x: jax.Array) -> Any:
    """What is masked for its maxima stays for its sums."""
    wide = columns(x @ w)
    largest = jnp.max(wide, 1, keepdims=True)
    return jnp.sum(jnp.sort(columns(wide - largest), 0), 0), largest


def loop(w: jax.Array, x: jax.Array) -> Any:
    """The masks are the same in each pass, and stay."""

    def part(total: jax.Array, some: jax.Array) -> Any:
        wide = columns(some @ w)
        return total + jnp.sum(jnp.exp(wide - jnp.max(wide, 1, keepdims=True)), 1), None

    return jax.lax.scan(part, jnp.zeros(ROWS), jnp.stack([x, x + 1]))[0]


def make_plan(step: Callable[..., Any]) -> Plan:
    w, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((MIDDLE, COLUMNS), (ROWS, MIDDLE)))
    with keep_annotations():
        text = jax.jit(step, keep_unused=True).lower(w, x).as_text("hlo")
    return plan(text, Cluster.local(4), plan_options(mesh={"x": 4}))


@pytest.mark.parametrize("step", [twice, loop])
def test_masked_values_are_stored(step: Callable[..., Any], service: CompileService) -> None:
    step_plan = make_plan(step)
    program = service.compile(step_plan.require_hlo(), step_plan, want_executable=False)
    assert program.memory is not None
    assert step_plan.memory.temporaries_bytes == pytest.approx(program.memory.temporary_bytes, rel=0.05)


def test_only_uneven_dimensions_that_are_added_up_are_masked() -> None:
    dot = parse(PRODUCT).entry.root
    split = [TensorSharding((("y",), ("x",))), TensorSharding((("x",), ()))]
    assert dims_to_mask(dot, 0, split, MESH) == (1,)
    assert dims_to_mask(dot, 1, split, MESH) == (0,)
    along_others = [TensorSharding((("x",), ())), TensorSharding(((), ()))]
    assert dims_to_mask(dot, 0, along_others, MESH) == ()
    even = Mesh.of({"x": 7, "y": 2})  # 1001 is 7 × 143
    assert dims_to_mask(dot, 0, split, even) == ()


@pytest.mark.parametrize(("rows", "in_group"), [(("y",), True), ((), False)])
def test_products_split_elsewhere_count_in_groups(rows: tuple[str, ...], in_group: bool) -> None:
    dot = parse(PRODUCT).entry.root
    split = [TensorSharding((rows, ("x",))), TensorSharding((("x",), ()))]
    assert is_counted_in_group(dot, split) == in_group
