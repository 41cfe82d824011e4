"""Segments are called what the user calls the parts of the model."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import shardwright as sw
from shardwright.planner.graph.scopes import scopes_of


@pytest.mark.parametrize(
    ("op_name", "scopes"),
    [
        ("jit(step)/transpose(jvp(block_0))/attention/dot_general", ("block_0", "attention")),
        ("jit(step)/jvp(Model)/Dense_0/add", ("Model", "Dense_0")),
        ("jit(step)/jvp()/while/body/closed_call/checkpoint/mlp/dot_general", ("mlp",)),
        ("jit(step)/vmap(jvp(head))/pjit/exp", ("head",)),
        ("jit(step)/jvp(a)/mul;jit(step)/transpose(jvp(b))/broadcast_in_dim", ("a",)),
        ("params['w']", ()),
        ("", ()),
    ],
)
def test_scopes_are_what_is_left_of_a_path(op_name: str, scopes: tuple[str, ...]) -> None:
    assert scopes_of(op_name) == scopes


def test_explain_names_segments_by_scopes() -> None:
    def loss(params: list[jax.Array], x: jax.Array) -> jax.Array:
        for number, weight in enumerate(params):
            with jax.named_scope(f"block_{number}"):
                x = jnp.tanh(x @ weight)
        return jnp.square(x).mean()

    def step(params: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        value, gradients = jax.value_and_grad(loss)(params, x)
        return [p - 0.1 * g for p, g in zip(params, gradients, strict=True)], value

    weights = [jax.ShapeDtypeStruct((64, 64), "float32")] * 3
    text = sw.lower(step, weights, jax.ShapeDtypeStruct((32, 64), "float32"), donate_argnums=0).as_text()
    plan = sw.plan(text, 2, cache=False)
    names = [segment.name for segment in plan.segments]
    assert [name.split(", ")[1] for name in names[:3]] == ["block_0", "block_1", "block_2"]
    assert "block" not in names[3]  # what comes after is the loss
    assert "segment 0, block_0, to test_scopes.py:" in plan.explain()
