"""The plans of experts: Megatron without sequence sharding, expert parallelism; no plan is worse than these."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest

from benchmarks.planner.suite import cluster_json
from shardwright.clusters.cluster import Cluster
from shardwright.cost import bytes_with_margin, hardware_profile
from shardwright.errors import OptionError
from shardwright.hlo import parse
from shardwright.options.plan_options import PlanOptions
from shardwright.planner import plan
from shardwright.planner.graph.dataflow import build_dataflow
from shardwright.planner.graph.moe_detection import find_expert_weights
from shardwright.planner.search.experts import EXPERTS
from shardwright.planner.search.search import Search
from shardwright.planner.search.solutions import SearchResult
from shardwright.plans.plan import Plan
from shardwright.plans.shardings import TensorSharding
from tests.planner.programs import gpt2, lower, mlp
from workloads.models.registry import MODELS

A100 = Cluster.from_json(cluster_json(8, "a100"))

#: Sizes that no other dimension of the programs has.
BATCH, LENGTH, MIXTURE = 24, 1920, 16


@pytest.fixture(scope="module")
def long_sequences() -> str:
    """A residual layer over sequences so long that it pays to split them where the weights do not."""

    def normed(y: jax.Array) -> jax.Array:
        return jnp.tanh(y - y.mean(-1, keepdims=True)) / jnp.exp(jnp.std(y, axis=-1, keepdims=True))

    def loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        y = normed(x @ params["in"])
        y = y + jax.nn.relu(normed(y) @ params["up"]) @ params["down"]
        return jnp.mean((normed(y) @ params["out"]) ** 2)

    def step(params: dict[str, jax.Array], x: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
        value, gradients = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    sizes = {"in": (256, 1536), "up": (1536, 6144), "down": (6144, 1536), "out": (1536, 512)}
    params = {name: jax.ShapeDtypeStruct(size, "float32") for name, size in sizes.items()}
    x = jax.ShapeDtypeStruct((BATCH, LENGTH, 256), "float32")
    return jax.jit(step, donate_argnums=0).lower(params, x).as_text("hlo", debug_info=True)


@pytest.fixture(scope="module")
def mixture() -> str:
    """Two layers, one of them a mixture of experts."""
    sizes = {"layers": 2, "width": 128, "heads": 8, "vocabulary": 256, "context": 64, "experts": MIXTURE}
    return MODELS["moe"].build("8e", 8, **sizes).lower().as_text("hlo", debug_info=True)


def results(planned: Plan) -> Iterator[tuple[tuple[int, ...], TensorSharding]]:
    """Dimensions and sharding of every array that the entry computes."""
    entries = {entry.name: entry for entry in planned.instructions}
    for instruction in parse(planned.require_hlo()).entry:
        if instruction.name in entries and instruction.opcode not in ("broadcast", "constant", "iota"):
            for leaf, sharding in zip(instruction.shape.leaves, entries[instruction.name].result, strict=True):
                yield leaf.dimensions, sharding


def payload(planned: Plan) -> Counter[str]:
    counts = Counter[str]()
    for each in planned.collectives:
        counts[each.kind] += each.payload_bytes * each.count
    return counts


def test_megatron_splits_weights_and_no_sequence(long_sequences: str) -> None:
    free, strict = (
        plan(long_sequences, A100, PlanOptions(force=force, mesh={"data": 2, "model": 4}))
        for force in ("mixed", "megatron")
    )
    sequences = {
        force: {sharding.dims[1] for shape, sharding in results(planned) if shape[:2] == (BATCH, LENGTH)}
        for force, planned in (("mixed", free), ("megatron", strict))
    }
    assert sequences == {"mixed": {(), ("model",)}, "megatron": {()}}
    assert all("model" in variable.sharding.axes for variable in strict.parameters if variable.alias is not None)
    assert all(sharding.dims[0] == ("data",) for shape, sharding in results(strict) if shape[:2] == (BATCH, LENGTH))
    assert free.cost.step_s < strict.cost.step_s


def test_megatron_needs_two_axes(long_sequences: str) -> None:
    with pytest.raises(OptionError, match="a megatron strategy needs two axes"):
        plan(long_sequences, A100, PlanOptions(force="megatron", mesh={"data": 8}))


@pytest.mark.dear
@pytest.mark.parametrize("sizes", [{"data": 8}, {"data": 2, "model": 4}], ids=str)
def test_expert_parallel_sends_tokens_to_experts_that_stay_where_they_are(mixture: str, sizes: dict[str, int]) -> None:
    planned = plan(mixture, A100, PlanOptions(force="expert", mesh=sizes))
    axis = list(sizes)[-1]
    for variable in planned.parameters:
        if variable.alias is not None:
            by_experts = ((axis,), (), ()) if len(variable.shape) == 3 else ((),) * len(variable.shape)
            assert variable.sharding.dims == by_experts, variable.name
    dispatched = {sharding.dims[0] for shape, sharding in results(planned) if len(shape) == 4 and shape[0] == MIXTURE}
    assert (axis,) in dispatched
    whole = payload(plan(mixture, A100, PlanOptions(force="data", mesh=sizes)))
    assert payload(planned)["all-to-all"] > 0
    assert payload(planned)["all-reduce"] < 0.75 * whole["all-reduce"], "gradients of experts, of fewer devices"


def test_experts_that_the_axis_does_not_divide_are_whole(mixture: str) -> None:
    planned = plan(mixture, Cluster.local(3), PlanOptions(force="expert", mesh={"data": 3}))
    assert all(not variable.sharding.axes for variable in planned.parameters if len(variable.shape) == 3)


def test_expert_parallel_needs_a_mixture() -> None:
    with pytest.raises(OptionError, match="there is no mixture of experts"):
        plan(lower(gpt2()), A100, PlanOptions(force="expert"))


def test_experts_are_told_from_heads(mixture: str) -> None:
    flow = build_dataflow(parse(mixture))
    names = [instruction.op_name for instruction in (flow.nodes[node].instruction for node in flow.parameters)]
    batch = [node for node, name in zip(flow.parameters, names, strict=True) if name.startswith("batch")]
    result = find_expert_weights(flow, batch)
    shapes = sorted(flow.nodes[node].shapes[0].dimensions for node in result)
    assert shapes == [(MIXTURE, 128, 512), (MIXTURE, 512, 128)]
    assert set(result.values()) == {0}


@pytest.mark.dear
@pytest.mark.parametrize(
    ("text", "sizes", "absent"),
    [
        ("mixture", {"data": 8}, {"data × tensor", "data × tensor, no sequence sharding"}),
        ("gpt2", {"data": 2, "model": 4}, {"expert parallel"}),
    ],
)
def test_every_expert_is_among_the_candidates_and_none_is_better(
    text: str, sizes: dict[str, int], absent: set[str], request: pytest.FixtureRequest
) -> None:
    hlo = lower(gpt2()) if text == "gpt2" else request.getfixturevalue(text)
    planned = plan(hlo, A100, PlanOptions(mesh=sizes))
    priced = {each.name: each.step_s for each in planned.candidates if each.name in EXPERTS}
    assert set(priced) == EXPERTS.keys() - absent
    assert all(step_s is None or planned.cost.step_s <= step_s * 1.001 for step_s in priced.values())


class FindsNothing(Search):
    """A search whose every plan is over the memory, as it may think of plans that would fit."""

    def fit_memory(self, outcome: SearchResult, *, at_once: bool = False, below_s: float = math.inf) -> bool:
        return False


def test_where_the_search_finds_nothing_the_fastest_expert_that_fits_is_the_plan() -> None:
    text, sizes = lower(mlp()), {"data": 2, "model": 4}
    profile = hardware_profile("a100")
    forced = [plan(text, A100, PlanOptions(force=force, mesh=sizes)) for force in set(EXPERTS.values()) - {"expert"}]
    needed = {each.origin: bytes_with_margin(each.memory, profile) for each in forced}
    fastest = min(forced, key=lambda candidate: candidate.cost.step_s)
    budget = needed[fastest.origin] - 1
    best_s = min(each.cost.step_s for each in forced if needed[each.origin] <= budget)
    options = PlanOptions(mesh=sizes, memory_budget=budget, remat="none", micro_batches=1)
    found = FindsNothing(text, A100, options).run()
    assert found.cost.step_s == pytest.approx(best_s, rel=1e-3)
    assert "this is the plan that is known as" in found.cost.bound_scope
    free = plan(text, A100, PlanOptions(mesh=sizes, remat="none", micro_batches=1))
    assert free.cost.lower_bound_s * 0.999 <= found.cost.lower_bound_s <= found.cost.step_s
    assert f"bounded is every plan on mesh {found.mesh}" in found.cost.bound_scope
