"""Rule mode: shardings follow from pins as Shardy's own propagation makes them follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from shardwright.clusters.cluster import Cluster
from shardwright.cost import hardware_profile
from shardwright.hlo import parse
from shardwright.options.plan_options import PlanOptions
from shardwright.planner.constraints.annotations import collect_requirements
from shardwright.planner.constraints.pins import satisfying_shardings
from shardwright.planner.constraints.propagate import propagate
from shardwright.planner.costs.prices import Prices
from shardwright.planner.graph.dataflow import Dataflow, build_dataflow
from shardwright.planner.strategies.expansion import Strategy
from shardwright.planner.strategies.strategy_set import StrategyBuilder
from shardwright.plans.shardings import Mesh
from tests.planner.programs import PROGRAMS

MESH = Mesh.of({"dp": 2, "tp": 4})
DEVICES = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
Dims = tuple[tuple[str, ...], ...]


def on(*axes: Any) -> NamedSharding:
    return NamedSharding(DEVICES, PartitionSpec(*axes))


def f32(*dimensions: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dimensions, jnp.float32)


def followed(text: str) -> tuple[Dataflow, list[Strategy]]:
    """What propagation alone makes of a program's own shardings."""
    flow = build_dataflow(parse(text))
    builder = StrategyBuilder(Prices(MESH, Cluster.local(8), hardware_profile("cpu")))
    pins = collect_requirements(flow, PlanOptions())
    sets = [
        builder.of_shardings(satisfying_shardings(flow, node, pins[node.index], MESH, node.instruction.name))
        if node.index in pins
        else builder.of_value(node.shapes[0])
        if node.is_value
        else builder.of_instruction(node.instruction)
        for node in flow.nodes
    ]
    chosen = propagate(flow, MESH, sets)
    return flow, [found.strategies[number] for found, number in zip(sets, chosen, strict=True)]


def output_dims(text: str) -> list[Dims]:
    flow, strategies = followed(text)
    return [strategies[node].results[0].dims for node in flow.outputs]


def shardy_dims(compiled: Any, ranks: list[int]) -> list[Dims]:
    results = []
    for sharding, rank in zip(jax.tree.leaves(compiled.output_shardings), ranks, strict=True):
        spec = tuple(sharding.spec) if hasattr(sharding, "spec") else ()
        dims = tuple(() if axes is None else (axes,) if isinstance(axes, str) else tuple(axes) for axes in spec)
        results.append(dims + ((),) * (rank - len(dims)))
    return results


def attention(q: Any, k: Any, v: Any) -> Any:
    weights = jax.nn.softmax(jnp.einsum("bhqd,bhkd->bhqk", q, k))
    return jnp.einsum("bhqk,bhkd->bhqd", weights, v).transpose(0, 2, 1, 3).reshape(8, 16, 64)


def megatron(w1: Any, w2: Any, x: Any) -> Any:
    return jax.nn.gelu(x @ w1) @ w2, x @ w1


def scanned(w: Any, x: Any) -> Any:
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), x.sum(0)), x, w)


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]] = {
    "elementwise": (lambda x, y: jnp.sin(x) * y, (f32(8, 16), f32(8, 16)), (on("dp", None), on(None, "tp"))),
    "dot": (lambda x, w: x @ w, (f32(8, 16), f32(16, 32)), (on("dp"), on(None, "tp"))),
    "contraction": (lambda x, w: x @ w, (f32(8, 16), f32(16, 32)), (on("dp", "tp"), on("tp"))),
    "reduce": (lambda x: (x.sum(0), x.sum(1)), (f32(8, 16),), (on("dp", "tp"),)),
    "transpose": (lambda x: x.transpose(2, 0, 1), (f32(8, 16, 4),), (on("dp", None, "tp"),)),
    "broadcast": (lambda b: jnp.broadcast_to(b[:, None], (16, 8)) * 2, (f32(16),), (on(("dp", "tp")),)),
    "reshape": (lambda x: x.reshape(8, 16, 4), (f32(8, 64),), (on("dp", "tp"),)),
    "attention": (attention, (f32(8, 4, 16, 16),) * 3, (on("dp", "tp"), None, None)),
    "megatron": (megatron, (f32(16, 64), f32(64, 16), f32(8, 16)), (on(None, "tp"), on("tp"), on("dp"))),
    "scan": (scanned, (f32(3, 16, 16), f32(8, 16)), (None, on("dp"))),
    "embedding": (lambda e, i: e[i], (f32(64, 16), jax.ShapeDtypeStruct((8, 4), jnp.int32)), (None, on("dp"))),
}


@pytest.mark.parametrize("name", sorted(CASES))
def test_outputs_lie_as_shardy_lays_them(name: str) -> None:
    function, arguments, shardings = CASES[name]
    given = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s) if s is not None else a
        for a, s in zip(arguments, shardings, strict=True)
    ]
    lowered = jax.jit(function).lower(*given)
    ranks = [len(leaf.shape) for leaf in jax.tree.leaves(jax.eval_shape(function, *arguments))]
    assert output_dims(lowered.as_text("hlo")) == shardy_dims(lowered.compile(), ranks)


def pinned_later(x: Any, w: Any) -> Any:
    return jax.lax.with_sharding_constraint(jnp.sin(x).T @ w, on("dp", "tp")).sum()


def test_splits_go_backward_to_the_arguments() -> None:
    lowered = jax.jit(pinned_later).lower(f32(16, 8), f32(16, 32))
    flow, strategies = followed(lowered.as_text("hlo"))
    results = [strategies[node].results[0].dims for node in flow.parameters]
    assert results == [((), ("dp",)), ((), ("tp",))]
    first, second = lowered.compile().input_shardings[0]
    assert (first.shard_shape((16, 8)), second.shard_shape((16, 32))) == ((16, 4), (16, 8))


def test_a_training_step_follows_its_batch() -> None:
    """State stays whole, gradients are reduced, everything else lies along the batch: plain data parallelism."""
    step, arguments, _ = PROGRAMS["mlp"]()
    *state, x, y = jax.tree.map(lambda a: f32(*a.shape) if a.dtype == jnp.float32 else a, arguments)
    batch = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=on(("dp", "tp"))) for a in (x, y)]
    flow, strategies = followed(jax.jit(step).lower(*state, *batch).as_text("hlo"))
    assert all(not any(strategies[node].results[0].dims) for node in flow.outputs)
    dots = [strategies[node.index] for node in flow.nodes if node.instruction.opcode == "dot"]
    assert sum(bool(dot.partial) for dot in dots) == 2  # the gradients of two weights
    assert all(dot.partial or dot.results[0].dims[0] == ("dp", "tp") for dot in dots)


def test_nothing_is_split_without_pins() -> None:
    text = jax.jit(megatron).lower(f32(16, 64), f32(64, 16), f32(8, 16)).as_text("hlo")
    assert all(sharding.is_replicated for strategy in followed(text)[1] for sharding in strategy.results)
