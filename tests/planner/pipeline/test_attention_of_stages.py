"""Attention in the stages of a pipeline: replaced before the cut, and said of the whole plan."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardwright as sw
from shardwright.attention import read_call
from shardwright.clusters.cluster import Cluster, ClusterNode
from shardwright.hlo import parse
from shardwright.user_plans import PipelinePlan

CLUSTER = Cluster(
    name="test", nodes=(ClusterNode(index=0, ip="127.0.0.1", port=1, device_count=2),), platform="cuda", hardware="a100"
)


def layer(x: Any, weights: Any) -> Any:
    q, k, v = (jnp.einsum("btd,dnh->btnh", x, each) for each in weights)
    return x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)


def step(weights: Any, x: Any) -> Any:
    def loss(weights: Any) -> Any:
        return jnp.square(layer(layer(x, weights[0]), weights[1]).astype(jnp.float32)).mean()

    value, gradients = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - g, weights, gradients), value


def lower(batch: int) -> str:
    shapes = (2, 3, 64, 4, 16), (batch, 2048, 64)
    types = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    return sw.lower(step, *types, platform="cuda", donate_argnums=0).hlo_text


def fused_calls(plan: PipelinePlan) -> list[bool]:
    """Whether each call of attention in its programs is a backward one."""
    programs = [parse(program.plan.require_hlo()) for program in plan.programs]
    return sorted(call.backward for each in programs for one in each.instructions() if (call := read_call(one)))


@pytest.mark.dear
def test_stages_run_fused_attention_and_a_plan_taken_up_again_does_too() -> None:
    text, changed = (lower(batch) for batch in (8, 16))
    how: dict[str, Any] = {"stages": 2, "micro_batches": 2, "effort": "fast", "cache": False}
    plan = sw.plan(text, CLUSTER, **how)
    assert isinstance(plan, PipelinePlan)
    assert fused_calls(plan) == [False, False, True, True]
    assert [(note.kind, note.count, note.replaced) for note in plan.attention] == [
        ("forward", 2, True), ("backward", 2, True)
    ]  # fmt: skip
    assert "2 forward, 2 backward fused" in plan.explain(width=200)
    assert PipelinePlan.from_json(plan.to_json(), hlo_text=text) == plan
    off = sw.plan(text, CLUSTER, fused_attention="off", **how)
    assert isinstance(off, PipelinePlan)
    assert (fused_calls(off), off.attention) == ([], ())
    again_too = sw.plan(text, CLUSTER, stages=1, micro_batches=1, remat="full", effort="fast", cache=False)
    counts = {note.kind: note.count for note in again_too.attention}
    assert counts == {"forward": 2, "backward": 2, "again": 2}
    assert all(note.saved_s > 0 for note in again_too.attention)
    for earlier in (plan, off):
        again = sw.plan(changed, CLUSTER, plan=earlier, cache=False)
        assert isinstance(again, PipelinePlan)
        assert fused_calls(again) == fused_calls(earlier)
