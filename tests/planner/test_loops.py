"""Loops are planned as well as the same program written out: judged by the plan's costs and by XLA's collectives."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from shardwright import annotate
from shardwright.client.annotate import keep_annotations
from shardwright.clusters.cluster import Cluster
from shardwright.options.plan_options import PlanOptions
from shardwright.planner import plan
from shardwright.planner.constraints.forced import ForcedStrategy
from shardwright.planner.plans.assemble import decide
from shardwright.planner.plans.collectives import list_collectives
from shardwright.planner.search.search import Search
from shardwright.planner.segments.variables import variables_of
from shardwright.plans.plan import Plan
from shardwright.plans.shardings import Mesh, TensorSharding
from shardwright.user_plans import compile_and_prove
from tests.planner import programs
from tests.planner.test_numbers import assert_same, run_planned, run_single

LAYERS, WIDTH, ROWS = 3, 128, 16


def layer(x: Any, w: Any) -> Any:
    """Two products whose weights have one shape, and helpers that JAX lowers as one function for both."""
    y = jax.nn.silu(jnp.where(x > 0, x @ w["up"], 0.0))
    return x + jax.nn.silu(y @ w["down"]) * w["scale"]


def step(*, is_scanned: bool, is_rematerialized: bool) -> str:
    body = jax.checkpoint(layer) if is_rematerialized else layer

    def loss(params: Any, x: Any) -> Any:
        x = x * params["first"]  # so that the first layer's input needs a gradient, in a loop or not
        if is_scanned:
            x, _ = lax.scan(lambda y, w: (body(y, w), None), x, params["layers"])
        else:
            for number in range(LAYERS):
                x = body(x, jax.tree.map(lambda stack: stack[number], params["layers"]))  # noqa: B023
        return jnp.mean(x**2)

    def train(params: Any, x: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients), value

    square = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)
    layers = {"up": square, "down": square, "scale": jax.ShapeDtypeStruct((LAYERS, WIDTH), jnp.float32)}
    params = {"layers": layers, "first": jax.ShapeDtypeStruct((WIDTH,), jnp.float32)}
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    return jax.jit(train, donate_argnums=0).lower(params, x).as_text("hlo", debug_info=True)


def make_plan(mesh: dict[str, int], **kind: bool) -> Plan:
    return plan(step(**kind), Cluster.local(8), PlanOptions(mesh=mesh))


@pytest.mark.parametrize("is_rematerialized", [pytest.param(False, marks=pytest.mark.dear), True])
def test_a_scan_communicates_no_longer_than_its_layers_written_out(is_rematerialized: bool) -> None:
    """Nor does it compute more, but for taking layers out of stacks and putting them back."""
    scanned = make_plan({"data": 8}, is_scanned=True, is_rematerialized=is_rematerialized)
    unrolled = make_plan({"data": 8}, is_scanned=False, is_rematerialized=is_rematerialized)
    assert scanned.cost.communication_s <= 1.02 * unrolled.cost.communication_s
    assert scanned.cost.compute_s <= 1.25 * unrolled.cost.compute_s
    assert scanned.cost.gap < 0.01


@pytest.mark.dear
@pytest.mark.parametrize("is_rematerialized", [False, True])
def test_xla_makes_the_collectives_of_a_scan(is_rematerialized: bool) -> None:
    """As often as its trips, and no others."""
    step_plan = make_plan({"data": 2, "model": 4}, is_scanned=True, is_rematerialized=is_rematerialized)
    assert any(collective.count == LAYERS for collective in step_plan.collectives)
    proof = compile_and_prove(step_plan)
    assert proof.holds, proof.explain()


@pytest.mark.dear
@pytest.mark.parametrize("made", [programs.scan, programs.recurrent])
def test_gradients_with_several_readers_are_reduced_once_behind_the_loop(made: Any) -> None:
    """Clipping and two moments all read what the backward loop stacks or adds up."""
    program = made(optimizer=optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2)))
    step_plan = plan(programs.lower(program), Cluster.local(8), PlanOptions(force="data"))
    summed = [collective for collective in step_plan.collectives if collective.kind == "all-reduce"]
    assert [collective.count for collective in summed] == [1] * len(summed)
    assert len(summed) == len(program[1][0]) + 1  # one for each parameter, and the loss
    proof = compile_and_prove(step_plan)
    assert proof.holds, proof.explain()
    assert_same(run_planned(program, step_plan), run_single(program))


def followed() -> programs.Program:
    """A network that gives derivatives, followed over time: each step of the backward loop adds to the gradients. Their
    norm reads them whole, and momentum a part of them."""
    draw = np.random.default_rng(0).standard_normal
    params = {"up": 0.02 * draw((32, 128), np.float32), "down": 0.02 * draw((128, 32), np.float32)}

    def loss(params: Any, x: Any, y: Any) -> Any:
        result, _ = lax.scan(lambda x, _: (x + jnp.tanh(x @ params["up"]) @ params["down"], None), x, length=10)
        return jnp.mean((result - y) ** 2)

    def train(params: Any, momentum: Any, x: Any, y: Any) -> Any:
        gradients = jax.grad(loss)(params, x, y)
        norm = sum(jnp.sum(annotate(each, {0: None, 1: None}) ** 2) for each in gradients.values())
        momentum = jax.tree.map(lambda m, g: 0.9 * annotate(m, {0: "data"}) + g, momentum, gradients)
        return jax.tree.map(lambda w, m: w - 0.1 * m / (1 + norm), params, momentum), momentum, norm

    momentum = jax.tree.map(np.zeros_like, params)
    return train, (params, momentum, draw((64, 32), np.float32), draw((64, 32), np.float32)), (0, 1)


def test_a_gradient_that_a_loop_adds_up_is_reduced_once_for_those_that_read_a_part_of_it_too() -> None:
    program = followed()
    with keep_annotations():
        text = programs.lower(program)
    step_plan = plan(text, Cluster.local(8), PlanOptions(mesh={"data": 8}))
    summed = [each for each in step_plan.collectives if each.kind in ("all-reduce", "reduce-scatter")]
    assert [each.kind for each in summed] == ["all-reduce", "all-reduce"]
    again = [entry.opcode for entry in step_plan.instructions if entry.shared and entry.opcode != "parameter"]
    assert {*again} <= {"while", "get-tuple-element"}  # behind the loop, where that has its elements taken
    assert step_plan.cost.gap < 1e-3
    proof = compile_and_prove(step_plan)
    assert proof.holds, proof.explain()
    assert_same(run_planned(program, step_plan), run_single(program))


def test_a_carried_sum_that_the_body_reads_whole_is_reduced_in_each_pass() -> None:
    """A loop that carries what it lays out as a partial sum and reads split: it lies split, so each pass reduces."""
    trips, shape = 16, (64, 256)

    def recurrent(w: Any, x: Any) -> Any:
        return x + lax.scan(lambda h, _: (jnp.tanh(h) @ w, None), jnp.zeros_like(x), length=trips)[0]

    arguments = [jax.ShapeDtypeStruct(dims, jnp.float32) for dims in ((256, 256), shape)]
    text = jax.jit(recurrent, keep_unused=True).lower(*arguments).as_text("hlo")
    search = Search(text, Cluster.local(4), PlanOptions(mesh={"model": 4}))
    chain = search.build_chain(Mesh.of({"model": 4}), ForcedStrategy(), frozenset())
    graph = chain.graph
    columns, summands = TensorSharding(((), ("model",))), TensorSharding(((), ()), ("model",))
    entries = {"parameter": summands, "while": summands, "tanh": columns, "dot": summands}
    variables, _ = variables_of(graph.variables, [node for each in chain.instances for node in each.nodes])
    states = dict.fromkeys(variables, 0)
    for index, leaf in variables:
        node = graph.flow.nodes[index]
        is_carried = node.shapes[0].dimensions == shape and len(node.uses) == 2
        if node.instruction.opcode in entries and (is_carried or not node.is_value):
            wanted = entries[node.instruction.opcode] if leaf < 0 else columns
            results = [strategy.results[0] for strategy in graph.set_of((index, leaf)).strategies]
            states[index, leaf] = results.index(wanted)
    moves = list_collectives(decide(graph, states))
    assert [(each.kind, each.count) for each in moves if each.payload_bytes == 4 * 64 * 256] == [
        ("reduce-scatter", trips), ("all-gather", 1)
    ]  # fmt: skip
