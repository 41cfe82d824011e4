"""Planning nearly the same program again: the same plans as from nothing, by a part of the search."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardwright as sw
from shardwright.client.annotate import keep_annotations
from shardwright.clusters.cluster import Cluster
from shardwright.hlo import parse
from shardwright.options.plan_options import Pin, PlanOptions
from shardwright.planner import plan
from shardwright.planner.cache.keys import build_outline
from shardwright.planner.cache.store import MemoryStore
from shardwright.planner.limits import SearchLimits
from shardwright.planner.memory.recompute import Recomputation
from shardwright.planner.search.search import Search
from shardwright.planner.search.solutions import MeshSolution, SearchResult
from shardwright.planner.tuning import COST_TOLERANCE, MAX_RECORDS
from shardwright.planner.warm_start.replanning import replan
from shardwright.planner.warm_start.search_records import SearchHistory, SearchQuery
from shardwright.plans.plan import Plan
from shardwright.plans.shardings import Mesh
from tests.planner.programs import LOOSE, gpt2, lower

CLUSTER = Cluster.local(8)
FEWER = Cluster.local(4)
LAYERS = 3


def text_of(pins: dict[int, Pin] | None = None, *, at: int = 0, batch: int = 64, width: int = 64) -> str:
    """A training step of a few layers; the hidden value of layer `at` is annotated with `pins`."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for number, layer in enumerate(params):
            hidden = jnp.tanh(x @ layer["up"])
            hidden = sw.annotate(hidden, pins) if pins and number == at else hidden
            x = x + jnp.tanh(hidden @ layer["down"])
        return jnp.mean(x**2)

    def step(params: Any, x: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda a, b: a - 0.1 * b, params, gradients), value

    params = [{"up": jnp.ones((width, 4 * width)), "down": jnp.ones((4 * width, width))} for _ in range(LAYERS)]
    with keep_annotations():
        return str(jax.jit(step, donate_argnums=0).lower(params, jnp.ones((batch, width))).as_text("hlo"))


@cache
def plan_from_nothing(text: str, cluster: Cluster) -> Plan:
    return plan(text, cluster)


@cache
def _left_by(text: str) -> MemoryStore:
    store = MemoryStore()
    plan(text, CLUSTER, history=SearchHistory(store))
    return store


def store_after(text: str) -> MemoryStore:
    """What the search for the plan of a text left behind."""
    return copy.deepcopy(_left_by(text))


class _RecordingSearch(Search):
    """Records what it searches, and what its variants do.

    meshes: those that were searched outright.
    variants: their micro-batches.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.meshes: list[Mesh] = []
        self.variants: list[int] = []

    def solve_mesh(self, mesh: Mesh, close: float = 0.0) -> MeshSolution:
        self.meshes.append(mesh)
        return super().solve_mesh(mesh, close)

    def search_variant(
        self, again: Recomputation | None, micro_batches: int, without: frozenset[Mesh] = frozenset()
    ) -> SearchResult:
        self.variants.append(micro_batches)
        return super().search_variant(again, micro_batches, without)


def run_recorded(
    text: str,
    cluster: Cluster,
    options: PlanOptions | None = None,
    history: SearchHistory | None = None,
    limits: SearchLimits = SearchLimits(),
) -> tuple[Plan, _RecordingSearch]:
    """The plan of a text, and the search for it."""
    search = _RecordingSearch(text, cluster, options or PlanOptions(), history=history, limits=limits)
    return search.run(), search


def follows(step_plan: Plan) -> bool:
    return any("like an earlier plan" in note for note in step_plan.notes)


def decided(step_plan: Plan) -> tuple[Any, ...]:
    """All that a plan decides."""
    return (
        step_plan.mesh,
        step_plan.instructions,
        step_plan.parameters,
        step_plan.outputs,
        step_plan.collectives,
        step_plan.micro_batches,
    )


#: What `text_of` is asked for, and the devices.
SITUATIONS: dict[str, tuple[dict[str, Any], Cluster]] = {
    "an annotation": ({"pins": {1: None}}, CLUSTER),
    "another annotation": ({"pins": {0: None}, "at": 1}, CLUSTER),
    "twice the batch": ({"batch": 128}, CLUSTER),
    "half the batch": ({"batch": 32}, CLUSTER),
    "fewer devices": ({}, FEWER),
}


@pytest.mark.dear
@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_plan_made_again_is_as_good_and_takes_less_searching(situation: str) -> None:
    asked, cluster = SITUATIONS[situation]
    text = text_of(**asked)
    history = SearchHistory(store_after(text_of()))
    nothing, whole = run_recorded(text, cluster)
    again, restricted = run_recorded(text, cluster, history=history)
    assert follows(again)
    matches = re.findall(r"began with what was known of (\d+) of (\d+) segments", " ".join(again.notes))
    assert len(matches) == (cluster == CLUSTER)  # nothing is known of other devices
    assert all(0 < int(some) <= int(each) for some, each in matches)
    assert len(restricted.meshes) < len(whole.meshes)
    assert again.cost.step_s <= nothing.cost.step_s * (1 + COST_TOLERANCE)
    if again.mesh == nothing.mesh:
        assert decided(again) == decided(nothing)


@pytest.mark.dear
def test_what_is_computed_again_is_followed_where_only_more_is_asked() -> None:
    first, other = step_of(32, layers=1), step_of(28, layers=1)
    unlimited = plan(first, FEWER, PlanOptions(mesh={"data": 4}))
    budget = 3 * unlimited.memory.peak_bytes // 4
    options = PlanOptions(mesh={"data": 4}, memory_budget=budget, micro_batches=1)
    history = SearchHistory(MemoryStore())
    before = plan(first, FEWER, options, history=history, limits=LOOSE)
    assert before.recomputed
    whole = next(each for each in before.parameters if len(each.sharding.dims) == 1 and not each.sharding.axes)
    again, search = run_recorded(first, FEWER, replace(options, force={whole.name: {0: None}}), history, LOOSE)
    assert follows(again)
    assert len(search.variants) == 1
    assert again.recomputed == before.recomputed
    assert again.cost.step_s <= before.cost.step_s * (1 + COST_TOLERANCE)
    smaller = Search(other, FEWER, options, None, history, limits=LOOSE)
    assert smaller.query is not None
    record = history.find_best(smaller.query)
    assert record is not None
    assert record.remat_choice.rung >= 0
    assert replan(smaller, record) is None
    assert any(
        each.best_plan for each in smaller.restricted_results
    )  # which is what a whole search has to be faster than


@pytest.fixture(scope="module")
def bound() -> tuple[PlanOptions, MemoryStore]:
    """What the search for a step left behind that keeps as little as it must; and what it had."""
    options = PlanOptions(mesh={"data": 4})
    unlimited = plan(step_of(28), FEWER, options)
    options = replace(options, memory_budget=3 * unlimited.memory.peak_bytes // 5)
    store = MemoryStore()
    before = plan(step_of(28), FEWER, options, history=SearchHistory(store))
    assert before.recomputed
    return options, store


@cache
def step_of(batch: int, layers: int = 2) -> str:
    return lower(gpt2(layers=layers, batch=batch, length=32))


@pytest.mark.dear
def test_where_memory_binds_twice_the_batch_goes_in_twice_the_parts(bound: tuple[PlanOptions, MemoryStore]) -> None:
    options, store = bound
    again, restricted = run_recorded(step_of(56), FEWER, options, SearchHistory(store))
    assert follows(again)
    nothing, whole = run_recorded(step_of(56), FEWER, options)
    assert 0 < len(restricted.variants) <= len(whole.variants) // 3
    assert again.memory.peak_bytes <= (options.memory_budget or 0)
    assert again.cost.step_s <= nothing.cost.step_s * (1 + COST_TOLERANCE)


@pytest.mark.dear
def test_where_memory_binds_no_longer_nothing_is_computed_again(bound: tuple[PlanOptions, MemoryStore]) -> None:
    options, store = bound
    again, search = run_recorded(step_of(12), FEWER, options, SearchHistory(store))
    assert follows(again)
    assert not search.variants
    assert not again.recomputed


@pytest.mark.dear
def test_what_an_annotation_makes_slower_is_held_against_the_other_meshes() -> None:
    """{1: None} costs 13 %: a mesh that was slower than that before cannot have become faster."""
    before, text = plan_from_nothing(text_of(), CLUSTER), text_of({1: None})
    again, search = run_recorded(text, CLUSTER, history=SearchHistory(store_after(text_of())))
    assert follows(again)
    assert again.cost.step_s > before.cost.step_s * 1.1
    assert set(search.meshes) == {Mesh.of({"data": 4, "model": 2})}
    assert decided(again) == decided(plan_from_nothing(text, CLUSTER))


@pytest.mark.dear
def test_no_plan_depends_on_which_was_asked_for_first() -> None:
    one, other = text_of(), text_of(batch=128)
    orders = []
    for first, second in ((one, other), (other, one)):
        again = plan(second, CLUSTER, history=SearchHistory(store_after(first)))
        orders.append({first: decided(plan_from_nothing(first, CLUSTER)), second: decided(again)})
    assert orders[0] == orders[1]


def test_a_damaged_trail_is_none() -> None:
    question = SearchQuery.of(parse(text_of()), CLUSTER, PlanOptions())
    store = store_after(text_of())
    key = b"history" + question.kind
    whole = store.get(key)
    assert whole is not None
    assert SearchHistory(store).find_best(question) is not None
    for damage in (
        b"",
        whole[:-9],
        b"[{}]",
        whole.replace(b"rungs", b"rings"),
        whole.replace(b"data", b"1a"),
        b"7",
        whole.replace(b'"rung": -1', b'"rung": 1'),
    ):
        store.put(key, damage)
        assert SearchHistory(store).find_best(question) is None
    assert not follows(plan(text_of(batch=128), CLUSTER, history=SearchHistory(store)))


def test_a_trail_that_leads_to_a_slower_plan_is_left() -> None:
    """A record that claims an implausibly fast plan of other sizes explains no real one."""
    history = SearchHistory(store_after(text_of()))
    question = SearchQuery.of(parse(text_of()), CLUSTER, PlanOptions())
    record = history.find_best(question)
    assert record is not None
    cheap = replace(record.cost, compute_s=record.cost.compute_s / 2, communication_s=0.0)
    history.save(replace(record, cost=cheap))
    other = text_of(batch=128)
    step_plan = plan(other, CLUSTER, history=history)
    assert not follows(step_plan)
    assert decided(step_plan) == decided(plan_from_nothing(other, CLUSTER))


def test_trails_with_other_pins_are_not_followed() -> None:
    history = SearchHistory(store_after(text_of({1: None})))
    assert not follows(plan(text_of({0: None}), CLUSTER, history=history))


@pytest.mark.dear
@pytest.mark.parametrize("options", [PlanOptions(effort="best"), PlanOptions(mode="propagate")])
def test_who_asks_for_another_search_gets_it(options: PlanOptions) -> None:
    history = SearchHistory(MemoryStore())
    plan(text_of(), CLUSTER, options, history=history)
    assert not follows(plan(text_of(batch=128), CLUSTER, options, history=history))


# ---- outlines and stores -----------------------------------------------------------


def test_an_outline_tells_steps_from_sizes_from_what_is_asked() -> None:
    plain, sized, asked = (build_outline(parse(text)) for text in (text_of(), text_of(batch=128), text_of({1: None})))
    deeper = build_outline(parse(text_of().replace("tanh(", "sine(", 1)))
    assert plain.steps == sized.steps == asked.steps != deeper.steps
    assert plain.sizes == asked.sizes != sized.sizes
    assert not plain.pins | sized.pins
    assert asked.pins != build_outline(parse(text_of({1: None}, at=1))).pins


def test_pins_in_the_options_are_part_of_the_question() -> None:
    module = parse(text_of())
    plain = SearchQuery.of(module, CLUSTER, PlanOptions())
    pinned = SearchQuery.of(module, CLUSTER, PlanOptions(force={"p*": {0: "data"}}))
    assert plain.kind == pinned.kind
    assert plain.pins < pinned.pins
    assert plain.kind != SearchQuery.of(module, CLUSTER, PlanOptions(memory_budget=10**6)).kind


def test_the_last_trails_are_kept_one_for_each_question() -> None:
    history = SearchHistory(store_after(text_of()))
    question = SearchQuery.of(parse(text_of()), CLUSTER, PlanOptions())
    record = history.find_best(question)
    assert record is not None
    assert record.query == question
    for number in range(MAX_RECORDS):
        history.save(replace(record, query=replace(question, sizes=str(number))))
        history.save(replace(record, query=replace(question, sizes=str(number))))
    values = {
        found.query.sizes
        for number in range(MAX_RECORDS)
        if (found := history.find_best(replace(question, sizes=str(number)))) is not None
    }
    assert values == set(map(str, range(MAX_RECORDS)))
    last = history.find_best(question)
    assert last is not None
    assert last.query.sizes != question.sizes
