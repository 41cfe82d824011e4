"""The chosen plan is the fastest that fits of those listed; where a simpler one is preferred, the list says so."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardwright as sw
from benchmarks.planner.suite import cluster_json
from shardwright.clusters.cluster import Cluster
from shardwright.plans.plan import Plan


@cache
def scaled_products(width: int, batch: int) -> str:
    """Training in 8-bit floats with delayed scales: a maximum of each operand and gradient, all combined in one sum."""
    small, large = jnp.float8_e4m3fn, jnp.float8_e5m2

    def scaled(x: Any, scale: Any, kind: Any) -> Any:
        return (x / scale).astype(kind)

    def largest(x: Any) -> Any:
        return jnp.abs(x).max().astype(jnp.float32)

    @jax.custom_vjp
    def product(x: Any, w: Any, scales: Any) -> Any:
        made = jax.lax.dot(scaled(x, scales[0], small), scaled(w, scales[1], small), preferred_element_type=jnp.float32)
        return made * scales[0] * scales[1]

    def backward(kept: Any, gradient: Any) -> Any:
        x, w, scales = kept
        g = scaled(gradient, scales[2], large)
        dx = jax.lax.dot(g, scaled(w, scales[1], small).T, preferred_element_type=jnp.float32) * scales[2] * scales[1]
        dw = jax.lax.dot(scaled(x, scales[0], small).T, g, preferred_element_type=jnp.float32) * scales[0] * scales[2]
        return dx.astype(x.dtype), dw, jnp.stack([largest(x), largest(w), largest(gradient)])

    product.defvjp(lambda *kept: (product(*kept), kept), backward)

    def step(p: Any, scales: Any, x: Any, y: Any) -> Any:
        def loss(p: Any, scales: Any) -> Any:
            h = jax.nn.gelu(product(x, p[0], scales[0])).astype(x.dtype)
            return ((x + product(h, p[1], scales[1]) - y).astype(jnp.float32) ** 2).mean()

        value, (gradients, scales) = jax.value_and_grad(loss, (0, 1))(p, scales)
        return jax.tree.map(lambda a, b: a - 0.1 * b, p, gradients), scales, value

    shape = jax.ShapeDtypeStruct
    p = tuple(shape(sizes, jnp.float32) for sizes in ((width, 4 * width), (4 * width, width)))
    x = shape((batch, width), jnp.bfloat16)
    return sw.lower(step, p, shape((2, 3), jnp.float32), x, x, donate_argnums=(0, 1), platform="cuda").hlo_text


@cache
def plan_of(width: int, batch: int, hardware: str, *, simple: bool) -> Plan:
    cluster = Cluster.from_json(cluster_json(8, hardware))
    return sw.plan(scaled_products(width, batch), cluster, cache=False, simple=simple)


def listed(planned: Plan) -> dict[tuple[str, str], tuple[float, str]]:
    """Step and note of each priced plan, by its name and mesh."""
    return {(each.name, str(each.mesh)): (each.step_s, each.note) for each in planned.candidates if each.step_s}


@pytest.mark.dear
@pytest.mark.parametrize(("width", "batch", "hardware"), [(512, 4096, "h100"), (2048, 8192, "h100")])
def test_the_fastest_of_the_listed_plans_is_chosen(width: int, batch: int, hardware: str) -> None:
    planned = plan_of(width, batch, hardware, simple=False)
    assert planned.cost.step_s == pytest.approx(min(step_s for step_s, _ in listed(planned).values()), rel=1e-9)
    assert not any(note for _, note in listed(planned).values())


@pytest.mark.dear
def test_a_simpler_plan_within_a_percent_is_preferred_and_the_list_says_so() -> None:
    simple, fastest = (plan_of(2048, 8192, "a100", simple=simple) for simple in (True, False))
    assert fastest.cost.step_s < simple.cost.step_s < fastest.cost.step_s * 1.01
    assert len(simple.mesh.axes) < len(fastest.mesh.axes)
    faster = [note for step_s, note in listed(simple).values() if step_s < simple.cost.step_s * (1 - 1e-9)]
    assert set(faster) == {"less simple, and faster by less than 1 %"}
    assert [note for _, note in listed(simple).values() if note.startswith("the simplest within 1 %")]
