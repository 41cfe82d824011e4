"""Which instructions end a kernel, by hand and against XLA's own fusions; what a launch does to plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from shardwright.clusters.cluster import Cluster
from shardwright.cost import hardware_profile
from shardwright.options.plan_options import PlanOptions
from shardwright.planner import plan
from shardwright.planner.costs.kernels import Kernels, find_kernels
from shardwright.planner.graph.dataflow import Dataflow
from shardwright.planner.search.program import Program

EIGHT = replace(Cluster.local(8), hardware="a100")
LAUNCH_S = hardware_profile("a100").launch_s


def lower_text(function: Callable[..., object], *shapes: tuple[int, ...]) -> str:
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(function).lower(*arguments).as_text("hlo", debug_info=True)


def kernels_of(function: Callable[..., object], *shapes: tuple[int, ...]) -> tuple[Dataflow, Kernels]:
    flow = Program(lower_text(function, *shapes), PlanOptions()).flow
    return flow, find_kernels(flow)


def ending(function: Callable[..., object], *shapes: tuple[int, ...]) -> list[str]:
    flow, kernels = kernels_of(function, *shapes)
    return [node.instruction.opcode for node, ends in zip(flow.nodes, kernels.ends, strict=True) if ends]


def test_a_chain_is_one_kernel() -> None:
    assert ending(lambda x: jnp.maximum(x * 2.0 + 1.0, 0.0), (64, 64)) == ["maximum"]


def test_what_a_product_reads_is_written() -> None:
    assert ending(lambda x, w: jnp.negative(jnp.abs(x)) @ w, (64, 64), (64, 64)) == ["negate", "dot"]
    assert ending(lambda x, w: jnp.abs(x).reshape(32, 128) @ w, (64, 64), (128, 8)) == ["abs", "dot"]


def parts_of(function: Callable[..., object], *shapes: tuple[int, ...]) -> dict[str, float]:
    flow, kernels = kernels_of(function, *shapes)
    return {node.instruction.opcode: kernels.parts[node.index] for node in flow.nodes if not node.is_value}


def test_of_what_slices_alone_read_their_part_is_computed() -> None:
    shape = (64, 64)
    assert parts_of(lambda x: jnp.negative(jnp.abs(x).T)[:16], shape)["abs"] == 0.25
    assert parts_of(lambda x: (jnp.abs(x)[:16], jnp.negative(jnp.abs(x))), shape)["negate"] == 1.0


def test_slices_of_one_value_add_up() -> None:
    def thirds(x: jax.Array) -> tuple[jax.Array, ...]:
        whole = jnp.abs(x)
        return tuple(jnp.negative(part) for part in jnp.split(whole, 4, 1)[:3])

    assert parts_of(thirds, (64, 64))["abs"] == 0.75


def test_what_is_written_is_computed_whole() -> None:
    assert parts_of(lambda x: (jnp.abs(x) @ x)[:16], (64, 64))["abs"] == 1.0


def test_only_what_is_expensive_is_written_for_two_kernels() -> None:
    two = (64, 64), (64, 64)
    assert ending(lambda x, y: ((x + y).sum(0), jnp.negative(x + y)), *two) == ["reduce", "negate"]

    def summed_and_negated(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        e = jnp.exp(x)
        return e.sum(0), -e

    assert ending(summed_and_negated, (64, 64)) == ["exponential", "reduce", "negate"]


def test_what_is_expensive_is_part_of_the_one_kernel_that_reads_it_twice() -> None:
    def squared(x: jax.Array) -> jax.Array:
        e = jnp.exp(x)
        return e * (e + 1.0)

    assert ending(squared, (64, 64)) == ["multiply"]


def test_softmax_writes_what_xla_does() -> None:
    """The maximum, the exponentials, their sum, the quotients."""
    assert ending(lambda x: jax.nn.softmax(x, axis=-1), (64, 64)) == ["reduce", "exponential", "reduce", "divide"]


def test_what_a_loop_carries_is_written_in_each_pass() -> None:
    def scanned(x: jax.Array, steps: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda h, s: (h * 0.5 + s, None), x, steps)[0]

    flow, kernels = kernels_of(scanned, (256,), (1000, 256))
    ends = [node for node, ends in zip(flow.nodes, kernels.ends, strict=True) if ends and node.shapes[0].rank]
    assert [(node.instruction.opcode, node.weight) for node in ends] == [("add", 1000)]
    step_plan = plan(lower_text(scanned, (256,), (1000, 256)), EIGHT, PlanOptions(stages=1))
    assert 1000 * LAUNCH_S <= step_plan.cost.compute_s < 1100 * LAUNCH_S


@pytest.mark.parametrize("force", [None, "data"])
def test_plan_and_bound_pay_the_same_launches(force: str | None) -> None:
    def scanned(x: jax.Array, steps: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda h, s: (jnp.tanh(h) + s, None), x, steps)[0]

    step_plan = plan(lower_text(scanned, (256,), (1000, 256)), EIGHT, PlanOptions(stages=1, force=force))
    assert step_plan.cost.lower_bound_s >= 1000 * LAUNCH_S
    assert step_plan.cost.gap < 0.01


def test_an_array_too_small_to_fill_a_launch_is_not_split() -> None:
    """Elementwise work on 1 MiB takes less than a launch, so that an eighth of it saves nothing; on 64 MiB it does."""
    for rows, is_split in ((1 << 8, False), (1 << 14, True)):
        step_plan = plan(lower_text(jnp.negative, (rows, 1 << 10)), EIGHT, PlanOptions(stages=1))
        assert step_plan.cost.compute_s >= LAUNCH_S
        assert any(step_plan.outputs[0].sharding.dims) == is_split
