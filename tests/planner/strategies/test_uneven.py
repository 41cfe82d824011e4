"""Dimensions split over axes that do not divide them: offered where it pays, priced by the largest shard, right.

The programs have odd sizes everywhere. What the search would rather not do is made cheap for it, so that plans hold
uneven splits of every kind; XLA's program must then have the collectives that the plan predicts, and give the
numbers of one device.
"""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import pytest

import shardwright as sw
from shardwright.clusters.cluster import Cluster
from shardwright.cost import hardware_profile
from shardwright.errors import PlanError
from shardwright.hlo import ArrayShape, Instruction, parse
from shardwright.options.plan_options import PlanOptions
from shardwright.planner import plan
from shardwright.planner.costs.prices import Prices
from shardwright.planner.search.search import Search
from shardwright.planner.strategies.expansion import Strategy, shardings_of
from shardwright.planner.strategies.padding import divides, divides_or_pays, divides_or_pays_along_one
from shardwright.planner.strategies.strategy_set import StrategyBuilder
from shardwright.plans.plan import Plan
from shardwright.plans.shardings import Mesh
from shardwright.user_plans import compile_and_prove
from tests.planner.programs import Program, gpt2, lower, mlp, scan
from tests.planner.test_numbers import assert_same, run_planned, run_single

EIGHT, TWO = Mesh.of({"x": 8}), Mesh.of({"x": 4, "y": 2})

DOT = """HloModule odd, entry_computation_layout={(f32[512,64]{1,0}, f32[64,50257]{1,0})->f32[512,50257]{1,0}}

ENTRY main {
  a = f32[512,64]{1,0} parameter(0)
  b = f32[64,50257]{1,0} parameter(1)
  ROOT c = f32[512,50257]{1,0} dot(a, b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


@pytest.mark.parametrize(
    ("size", "axes", "pays"),
    [
        (50257, (8,), True),
        (30, (4,), True),
        (29, (4,), True),
        (12, (8,), True),  # 16 are computed: six ways are better than four
        (9, (8,), False),
        (3, (2,), False),
        (12, (4,), True),
    ],
)
def test_what_pays(size: int, axes: tuple[int, ...], pays: bool) -> None:
    assert divides_or_pays(size, axes) == divides_or_pays_along_one(size, axes) == pays


def test_several_axes_pad_near_a_chosen_strategy_only() -> None:
    assert divides_or_pays(50257, (4, 2))
    assert not divides_or_pays_along_one(50257, (4, 2))
    assert divides_or_pays_along_one(50257, (8, 1))


def builder(mesh: Mesh, *, pads: bool) -> StrategyBuilder:
    prices = Prices(mesh, Cluster.local(mesh.device_count), hardware_profile("cpu"))
    return StrategyBuilder(prices, pads=pads)


def uneven(instruction: Instruction, strategy: Strategy, mesh: Mesh) -> list[bool]:
    """Per array of operands and result, whether it is split unevenly."""
    leaves = [leaf for operand in instruction.operands for leaf in operand.shape.leaves] + [*instruction.shape.leaves]
    lies = (*strategy.operands, *strategy.results)
    return [not sharding.is_even(leaf.dimensions, mesh) for leaf, sharding in zip(leaves, lies, strict=True)]


def test_an_uneven_split_costs_what_its_largest_shard_does() -> None:
    product = parse(DOT).entry.root
    strategies = builder(EIGHT, pads=True).of_instruction(product)
    split = [i for i, each in enumerate(strategies.strategies) if any(uneven(product, each, EIGHT))]
    (padded,) = split
    assert strategies.strategies[padded].results[0].shard_shape((512, 50257), EIGHT) == (512, 6283)
    assert strategies.time_s[0] / 8 < strategies.time_s[padded] < strategies.time_s[0] / 7.5
    even = builder(EIGHT, pads=False).of_instruction(product)
    assert not any(any(uneven(product, each, EIGHT)) for each in even.strategies)


def test_sums_that_stay_partial_have_even_shards() -> None:
    """Shardy aborts at others."""
    shape = ArrayShape("f32", (30, 50257))
    items = list(shardings_of(shape, TWO, partial=True, may_split=divides_or_pays_along_one))
    assert any(not each.is_even(shape.dimensions, TWO) for each in items)
    assert all(each.is_even(shape.dimensions, TWO) for each in items if each.unreduced)
    assert len(items) > len(list(shardings_of(shape, TWO, partial=True, may_split=divides)))


# ---- plans -----------------------------------------------------------------------

PROGRAMS = {
    "mlp": lambda: mlp(batch=30, width=13, hidden=29),
    "gpt2": lambda: gpt2(vocabulary=61, batch=12, heads=5, width=40, length=15),
    "scan": lambda: scan(layers=3, batch=13, width=30),
}


class _UnevenBuilder(StrategyBuilder):
    """Prices by chance, lower where something is split unevenly: nearly every instruction then is."""

    seed: int

    def _combine_seconds(self, instruction: Instruction, strategy: Strategy) -> float:
        shapes = (instruction.shape, *(operand.shape for operand in instruction.operands))
        said = str((self.seed, instruction.opcode, shapes, strategy.operands, strategy.results))
        surcharge = 0.0 if any(uneven(instruction, strategy, self.prices.mesh)) else 0.3
        return 0.01 * super()._combine_seconds(instruction, strategy) + 3e-2 * (
            surcharge + random.Random(said).random()
        )


class _UnevenSearch(Search):
    """A search by such prices; experts' plans, which are better by the real ones, are left out."""

    seed: int
    is_unforced = False

    def strategy_builder(self, prices: Prices) -> StrategyBuilder:
        builder = _UnevenBuilder(prices, pads=True, rules=self.program.rules)
        builder.seed = self.seed
        return builder


def split_unevenly(planned: Plan) -> int:
    """How many instructions make something that is."""
    module = parse(planned.require_hlo())
    shapes = {each.name: each.shape.leaves for each in module.instructions()}
    return sum(
        any(
            not lies.is_even(leaf.dimensions, planned.mesh)
            for leaf, lies in zip(shapes[entry.name], entry.result, strict=True)
        )
        for entry in planned.instructions
    )


def assert_right(program: Program, planned: Plan) -> None:
    """XLA's program may differ by half a percent of the bytes: over which devices a small array is exchanged."""
    proof = compile_and_prove(planned)
    assert sum(abs(each.difference_bytes) for each in proof.differences) <= 0.005 * proof.predicted_wire_bytes
    assert_same(run_planned(program, planned), run_single(program))


@pytest.mark.dear
@pytest.mark.parametrize(
    ("name", "mesh", "seed"), [("mlp", "8", 0), ("gpt2", "4x2", 0), ("scan", "3x2", 3), ("scan", "3x2", 5)]
)
def test_uneven_plans_give_single_device_numbers(name: str, mesh: str, seed: int) -> None:
    program = PROGRAMS[name]()
    sizes = dict(zip("xy", map(int, mesh.split("x")), strict=False))
    search = _UnevenSearch(lower(program), Cluster.local(Mesh.of(sizes).device_count), PlanOptions(mesh=sizes))
    search.seed = seed
    planned = search.run()
    assert split_unevenly(planned) > 20
    assert_right(program, planned)


@pytest.mark.dear
def test_state_is_stored_padded_like_its_parameter() -> None:
    """An odd vocabulary pinned to all devices: the table, its momentum, and what the client is told."""
    program = gpt2(vocabulary=61)
    planned = plan(lower(program), Cluster.local(8), PlanOptions(mesh={"x": 8}, force={"*wte*": {0: "x"}}))
    tables = [each for each in (*planned.parameters, *planned.outputs) if each.shape == (61, 32)]
    assert {(each.stored_shape, each.is_padded) for each in tables} == {((64, 32), True)}
    assert len(tables) == 4
    assert not planned.portable
    with pytest.raises(PlanError, match="stored as"):
        planned.require_portable()
    assert_right(program, planned)


def test_a_batch_of_twelve_is_split_over_eight() -> None:
    """Rows that are sorted can be split along the batch only: with padding six devices work, without one."""

    def step(x: jax.Array) -> jax.Array:
        return jnp.sort(jnp.tanh(x), axis=1).sum(0)

    text = jax.jit(step).lower(jax.ShapeDtypeStruct((12, 100_003), jnp.float32)).as_text("hlo")
    padded, even = (sw.plan(text, Cluster.local(8), mesh="8", rewrites=each, cache=False) for each in ("auto", "none"))
    (sorted_as, whole) = (
        next(entry.result[0] for entry in each.instructions if entry.opcode == "sort") for each in (padded, even)
    )
    assert (sorted_as.dims, whole.dims) == ((("data",), ()), ((), ()))
    assert not any(each.is_padded for each in even.parameters)
    assert padded.cost.step_s < even.cost.step_s
    assert compile_and_prove(padded).holds


@pytest.mark.dear
def test_an_odd_vocabulary_is_split_in_the_loss() -> None:
    """GPT-2's 50257 words over eight devices, where four sequences cannot be split eight ways: the search's choice."""
    from benchmarks.planner.suite import cluster_json
    from workloads.models.registry import MODELS

    text = MODELS["gpt2"].build("124M", 4, layers=1).lower().as_text("hlo")
    cluster = Cluster.from_json(cluster_json(8, "a100"))
    padded, even = (sw.plan(text, cluster, mesh="8", rewrites=each, cache=False) for each in ("auto", "none"))
    assert split_unevenly(padded) > 5
    assert split_unevenly(even) == 0
    assert padded.cost.step_s < 0.98 * even.cost.step_s
    assert compile_and_prove(padded).holds
