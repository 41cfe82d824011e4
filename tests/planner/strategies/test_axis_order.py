"""Arrays split along the mesh's first axis last: offered where one dimension is all that axes divide, moved as XLA
moves them, judged, and right in numbers."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardwright.clusters.cluster import Cluster
from shardwright.cost import hardware_profile
from shardwright.hlo import ArrayShape, Instruction, parse
from shardwright.options.plan_options import PlanOptions
from shardwright.planner import plan
from shardwright.planner.costs.prices import Prices
from shardwright.planner.strategies.axis_order import may_rotate
from shardwright.planner.strategies.expansion import shardings_of
from shardwright.planner.strategies.legality import form_problems, rule_problems
from shardwright.planner.strategies.strategy_set import StrategyBuilder
from shardwright.plans.plan import InstructionPlan, Plan
from shardwright.plans.plan_json import decode
from shardwright.plans.plan_text import plan_to_json
from shardwright.plans.shardings import Mesh, TensorSharding, has_rotated_axes, rotate_axes
from shardwright.user_plans import compile_and_prove
from tests.planner.programs import Program, lower
from tests.planner.search.test_meshes import cluster
from tests.planner.test_numbers import assert_same, run_planned, run_single

TWO, THREE = Mesh.of({"data": 2, "model": 4}), Mesh.of({"data": 2, "model": 2, "sequence": 2})

#: As a table of embeddings has it: no axis divides its rows.
TABLE = (4099, 256)

PLAIN, TURNED = TensorSharding(((), ("data", "model"))), TensorSharding(((), ("model", "data")))

STEP = """HloModule step

ENTRY main {
  a = f32[4099,256]{1,0} parameter(0)
  b = f32[4099,256]{1,0} parameter(1)
  c = f32[256,64]{1,0} parameter(2)
  sum = f32[4099,256]{1,0} add(a, b)
  d = f32[512,4099]{1,0} parameter(3)
  e = f32[512,256]{1,0} parameter(4)
  gradient = f32[4099,256]{1,0} dot(d, e), lhs_contracting_dims={0}, rhs_contracting_dims={0}
  ROOT product = f32[4099,64]{1,0} dot(sum, c), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


def instruction(name: str) -> Instruction:
    return next(each for each in parse(STEP).entry if each.name == name)


@pytest.mark.parametrize(
    ("dims", "sizes", "expected"),
    [
        (TABLE, {"data": 2, "model": 4}, True),
        ((50257, 768), {"data": 2, "model": 4, "sequence": 2}, True),
        ((4096, 256), {"data": 2, "model": 4}, False),  # two dimensions for two axes: nothing to choose
        ((4099, 64), {"data": 2, "model": 4}, False),  # small
        (TABLE, {"data": 8}, False),
        (TABLE, {"data": 8, "model": 1}, False),
        ((4099, 258), {"data": 2, "model": 4}, False),  # both axes together do not divide it
        ((4099, 4098), {"data": 3, "model": 4}, False),
    ],
)
def test_where_there_is_an_order_to_choose(dims: tuple[int, ...], sizes: dict[str, int], expected: bool) -> None:
    assert may_rotate(dims, Mesh.of(sizes)) is expected


def test_the_first_axis_comes_last() -> None:
    assert rotate_axes(PLAIN, TWO) == TURNED
    assert rotate_axes(TensorSharding((("data",), ("model",))), TWO) == TensorSharding((("data",), ("model",)))
    whole = TensorSharding(((), ("data", "model", "sequence")))
    assert rotate_axes(whole, THREE).dims[1] == ("model", "sequence", "data")
    assert [has_rotated_axes(lies, TWO) for lies in (PLAIN, TURNED)] == [False, True]
    assert not has_rotated_axes(TensorSharding(((), ("sequence", "model"))), THREE)


def test_what_computes_element_by_element_may_be_turned_and_products_not() -> None:
    builder = StrategyBuilder(Prices(TWO, cluster(4, 4), hardware_profile("a100")))
    elementwise = builder.of_instruction(instruction("sum")).strategies
    assert any(each.operands == (TURNED, TURNED) and each.results == (TURNED,) for each in elementwise)
    for each in elementwise:
        assert len({has_rotated_axes(lies, TWO) for lies in (*each.operands, *each.results)}) == 1
    product = builder.of_instruction(instruction("product")).strategies
    assert not any(has_rotated_axes(lies, TWO) for each in product for lies in (*each.operands, *each.results))
    assert TURNED in shardings_of(ArrayShape("f32", TABLE), TWO)


def problems(
    name: str, operands: tuple[TensorSharding, ...], result: TensorSharding, partial: tuple[str, ...] = ()
) -> tuple[str, ...]:
    computed = instruction(name)
    entry = InstructionPlan(
        computation="main", name=name, opcode=computed.opcode,
        operands=tuple((lies,) for lies in operands), result=(result,), partial=partial,
    )  # fmt: skip
    return form_problems(computed, entry, TWO) or rule_problems(computed, entry, TWO)


def test_arrays_computed_with_one_another_are_split_in_one_order() -> None:
    assert problems("sum", (TURNED, TURNED), TURNED) == problems("sum", (PLAIN, PLAIN), PLAIN) == ()
    assert "first axis last" in problems("sum", (TURNED, TURNED), PLAIN)[0]
    assert "first axis last" in problems("sum", (PLAIN, TURNED), TURNED)[0]


def test_a_product_is_summed_to_what_is_turned() -> None:
    """Split along `model`, and scattered over `data` as it is summed: a part of a part."""
    rows, columns = TensorSharding((("data",), ())), TensorSharding((("data",), ("model",)))
    assert problems("gradient", (rows, columns), TURNED, ("data",)) == ()
    assert problems("gradient", (rows, columns), TURNED)


def test_small_arrays_and_other_orders_are_out_of_order() -> None:
    small = TensorSharding((("model", "data"), ()))
    summed = problems("product", (PLAIN, small), TensorSharding.replicated(2))
    assert "out of mesh order" in summed[0]


def language_model(vocabulary: int = 4099, width: int = 256, length: int = 64, batch: int = 64) -> Program:
    """A table that rows are looked up in and that gives the logits, too, trained by Adam."""
    rng = np.random.default_rng(0)
    params = {
        "table": rng.normal(0, 0.1, (vocabulary, width)).astype(np.float32),
        "up": rng.normal(0, 0.1, (width, 512)).astype(np.float32),
        "down": rng.normal(0, 0.1, (512, width)).astype(np.float32),
    }
    tokens = rng.integers(0, vocabulary, (batch, length), dtype=np.int32)
    optimizer = optax.adam(1e-3)

    def loss(p: Any, tokens: Any) -> Any:
        x = p["table"][tokens]
        x = x + jax.nn.gelu(x @ p["up"]) @ p["down"]
        logits = jax.nn.log_softmax(x @ p["table"].T)
        return -jnp.mean(jnp.take_along_axis(logits, jnp.roll(tokens, -1)[..., None], -1))

    def step(params: Any, state: Any, tokens: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, tokens)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state, value

    return step, (params, optimizer.init(params), tokens), (0, 1)


def two_nodes() -> Cluster:
    """Four devices each, and little between them."""
    nodes = [{"ip": f"10.0.0.{i}", "port": 2222, "gpu_ids": [0, 1, 2, 3]} for i in (1, 2)]
    said = {
        "name": "slow", "platform": "cuda", "hardware": "a100", "insecure": True, "master": nodes[0],
        "workers": nodes[1:], "links": {"inter_node": {"bandwidth_gb_per_s": 3.125, "latency_us": 8.0}},
    }  # fmt: skip
    return Cluster.from_json(json.dumps(said))


def turned_state() -> PlanOptions:
    """The table split over the devices of a node, Adam's state of it over both nodes, too."""
    over_both, over_one = {1: ("model", "data")}, {1: ("model",)}
    pins = {
        "state[0].mu['table']": over_both, "state[0].nu['table']": over_both, "params['table']": over_one,
        "tokens": {0: ("data",)},
    }  # fmt: skip
    return PlanOptions(mesh={"data": 2, "model": 4}, force=pins, micro_batches=1)


@pytest.fixture(scope="module")
def program() -> Program:
    return language_model()


@pytest.fixture(scope="module")
def planned(program: Program) -> Plan:
    return plan(lower(program), two_nodes(), turned_state())


def test_what_is_turned_is_scattered_and_gathered_and_never_handed_to_another_device(planned: Plan) -> None:
    lies = {variable.name: variable.stored_sharding for variable in planned.parameters if variable.shape == TABLE}
    assert sum(has_rotated_axes(each, planned.mesh) for each in lies.values()) == 2, lies
    over_nodes = [each.kind for each in planned.collectives if "data" in each.axes and each.payload_bytes > 1 << 18]
    assert over_nodes
    assert set(over_nodes) <= {"reduce-scatter", "all-gather"}


def test_xla_makes_of_it_what_the_plan_says(planned: Plan) -> None:
    assert compile_and_prove(planned).holds


@pytest.mark.dear
def test_numbers_are_those_of_one_device(program: Program, planned: Plan) -> None:
    assert_same(run_planned(program, planned), run_single(program))


def test_it_is_in_the_plan_as_json(planned: Plan) -> None:
    read = decode(plan_to_json(planned))
    assert [each.stored_sharding for each in read.parameters] == [each.stored_sharding for each in planned.parameters]
