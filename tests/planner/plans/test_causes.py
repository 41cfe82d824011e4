"""Causes of collectives name tensors as the user does, and operations by source line."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from shardwright.clusters.cluster import Cluster
from shardwright.hlo import parse
from shardwright.options.plan_options import PlanOptions
from shardwright.planner import plan
from shardwright.planner.graph.dataflow import build_dataflow
from shardwright.planner.graph.inlining import inline_calls
from shardwright.planner.graph.names import argument_names, output_names
from shardwright.planner.plans.causes import Causes
from tests.planner.programs import gpt2, lower, scan

EIGHT = Cluster.local(8)


@pytest.fixture(scope="module")
def text() -> str:
    return lower(gpt2(layers=2, batch=16))


def causes(text: str, force: str, kind: str) -> set[str]:
    return {c.cause for c in plan(text, EIGHT, PlanOptions(force=force)).collectives if c.kind == kind}


def test_gradients_carry_the_names_of_what_they_update(text: str) -> None:
    result = causes(text, "data", "all-reduce")
    names = {"params['wte']", "params['wpe']", "params['ln']['g']"} | {
        f"params['h{i}']['{layer}']['{part}']"
        for i in range(2)
        for layer, parts in {"ln1": "gb", "qkv": "wb", "proj": "wb", "ln2": "gb", "fc": "wb", "out": "wb"}.items()
        for part in parts
    }
    assert {f"gradient of {name}" for name in names} <= result
    (loss,) = (cause for cause in result if not cause.startswith("gradient of"))
    assert re.fullmatch(r"partial sum of sum \(programs\.py:\d+\)", loss)


def test_a_maximum_is_called_no_sum() -> None:
    def step(x: Any, at: Any) -> Any:
        return x.max(), jnp.zeros(3).at[at].max(x)

    arrays = jax.ShapeDtypeStruct((64,), jnp.float32), jax.ShapeDtypeStruct((64,), jnp.int32)
    result = causes(lower((step, arrays, ())), "data", "all-reduce")
    assert {cause.split(" (")[0] for cause in result} == {"partial maximum of maximum", "partial maximum of scatter"}


def test_gathered_weights_are_named_with_their_use(text: str) -> None:
    result = causes(text, "fsdp", "all-gather")
    for name in ("params['h0']['qkv']['w']", "params['h1']['out']['w']", "params['wte']"):
        assert any(cause.startswith(f"{name} for ") and "(programs.py:" in cause for cause in result), name


def test_sums_inside_a_loop_name_what_they_update_or_their_line() -> None:
    result = causes(lower(scan()), "data", "all-reduce")
    assert {"gradient of params['w']", "gradient of params['b']"} <= result
    assert all(cause.startswith("gradient of params[") or "(programs.py:" in cause for cause in result)


@pytest.fixture(scope="module")
def stacked() -> str:
    """Six layers in a scan: weights are slices of stacks, activations are saved for the backward loop."""

    def step(params: Any, x: Any) -> Any:
        def loss(p: Any) -> Any:
            layer = lambda y, w: (jnp.tanh(y @ w["up"]) @ w["down"], None)  # noqa: E731
            return jnp.mean(lax.scan(layer, x, p)[0] ** 2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))

    params = {"up": jnp.ones((6, 64, 256)), "down": jnp.ones((6, 256, 64))}
    return jax.jit(step, donate_argnums=0).lower(params, jnp.ones((64, 64))).as_text("hlo", debug_info=True)


def test_layers_of_a_stack_are_named_by_their_stack(stacked: str) -> None:
    gradients = causes(stacked, "data", "all-reduce")
    assert {"gradient of params['up']", "gradient of params['down']"} <= gradients
    flow = build_dataflow(inline_calls(parse(stacked)))
    words = Causes(flow, argument_names(flow, ()), output_names(flow, ()))
    dots = [node for node in flow.nodes if node.instruction.opcode == "dot"]
    values = {words.move(node, use) for node in dots for use in node.uses}
    for start in (
        r"params\['up'\]\[i\] for matmul",
        r"params\['down'\]\[i\] for matmul",
        r"params\['up'\]\[i\] for backward matmul",
        r"saved result of tanh \(test_causes\.py:\d+\) for backward matmul",
    ):
        assert any(re.match(start, cause) for cause in values), (start, values)


def test_what_a_loop_carries_names_the_loop(stacked: str) -> None:
    gathered = causes(stacked, "fsdp", "all-gather")
    assert any(re.fullmatch(r"params\['up'\] for a loop \(test_causes\.py:\d+\)", cause) for cause in gathered), (
        gathered
    )
