"""What is tried where memory binds: parts of the batch, values computed again, a price of memory."""

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest

import shardwright as sw
from shardwright.clusters.cluster import Cluster
from shardwright.cost import bytes_with_margin, hardware_profile
from shardwright.errors import PlanError
from shardwright.options.plan_options import PlanOptions
from shardwright.planner.memory.lagrangian import HOPELESS_RATIO, NEAR_FIT_RATIO, LagrangianSearch
from shardwright.planner.memory.recompute import Recomputation
from shardwright.planner.search import memory_tradeoffs
from shardwright.planner.search.min_memory_plan import find_fallback_plan
from shardwright.planner.search.search import Search
from shardwright.planner.search.solutions import CandidatePlan, SearchResult
from shardwright.plans.shardings import Mesh
from tests.planner import programs
from tests.planner.programs import PLAIN_A100
from workloads.collective_steps import gpt2

#: Two heads over eight devices: each computes both, and two parts of the batch take less time than the whole.
OPTIONS = {"force": "tensor", "mesh": "8", "stages": 1, "cache": False}


@pytest.mark.slow
def test_where_parts_of_the_batch_take_less_than_the_whole_more_parts_are_still_searched():
    text = gpt2(heads=2, width=64, layers=1, batch=64, context=128, vocabulary=64)
    whole = sw.plan(text, 8, **OPTIONS)
    budget = round(0.4 * whole.memory.peak_bytes)
    parts = sw.plan(text, 8, memory_budget=budget, **OPTIONS)
    assert parts.micro_batches > 1
    assert parts.memory.peak_bytes <= budget
    assert parts.cost.step_s < whole.cost.step_s, "this step no longer shows what is tested"


class FindsLate(Search):
    """A search whose plans are over the memory until a plan that takes little is known."""

    sparing: SearchResult | None = None

    def fit_memory(self, outcome: SearchResult, *, at_once: bool = False, below_s: float = math.inf) -> bool:
        return FindsLate.sparing is not None and super().fit_memory(outcome, at_once=at_once, below_s=below_s)


@pytest.mark.slow
def test_the_program_of_the_plan_that_takes_little_is_searched_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def sparing(search: Search) -> SearchResult | None:
        monkeypatch.setattr(FindsLate, "sparing", find_fallback_plan(search))
        return FindsLate.sparing

    monkeypatch.setattr(memory_tradeoffs, "find_fallback_plan", sparing)
    text, cluster = programs.lower(programs.gpt2(layers=2, batch=32, length=32)), Cluster.local(4)
    profile, way = hardware_profile(cluster.hardware), {"mesh": {"data": 4}, "micro_batches": 1}
    least = sw.plan(text, cluster, force="fsdp", remat="full", stages=1, cache=False, **way)
    limit = round(1.1 * bytes_with_margin(least.memory, profile))
    found = FindsLate(text, cluster, PlanOptions(memory_budget=limit, **way)).run()
    assert FindsLate.sparing is not None
    assert found.cost.step_s < FindsLate.sparing.step_s
    assert bytes_with_margin(found.memory, profile) <= limit
    assert 0 <= found.cost.gap < 0.05


@pytest.mark.slow
def test_a_plan_of_a_slow_mesh_that_fits_is_not_the_end() -> None:
    """The plan of the fastest mesh needs more than there is, one of a mesh that is slower by 10 % fits."""
    step = programs.gpt2(layers=2, width=256, vocabulary=4096, length=256, batch=64)
    search = Search(programs.lower(step), replace(Cluster.local(8), hardware=PLAIN_A100), PlanOptions())
    outcome = search.search_meshes()
    needed = {id(each): search.bytes_needed(outcome.evaluate(each)) for each in outcome.solutions}
    slow = min(outcome.solutions, key=lambda each: needed[id(each)])
    assert slow.step_s > outcome.fastest.step_s * (1 + memory_tradeoffs.NEAR_FASTEST)
    search.limit_bytes = needed[id(slow)]
    made = memory_tradeoffs.fit_with_remat(outcome)
    assert made.best_plan is not None
    assert made.search.bytes_needed(made.best_plan) <= search.limit_bytes
    assert made.step_s < slow.step_s * (1 - memory_tradeoffs.MIN_GAIN)


@pytest.mark.slow
@pytest.mark.parametrize("excess", [(NEAR_FIT_RATIO + HOPELESS_RATIO) / 2, 2 * HOPELESS_RATIO])
def test_memory_has_a_price_before_more_parts_are_searched(excess: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fits tells how many parts need not be planned at all; what the fastest plan needs does not tell whether any
    fits."""
    text, way = programs.lower(programs.gpt2(layers=2, batch=32, length=32)), {"mesh": {"data": 4}}
    search = Search(text, replace(Cluster.local(4), hardware=PLAIN_A100), PlanOptions(**way))
    outcome = search.search_meshes()
    top = memory_tradeoffs._remat_levels(outcome)[-1]
    least = search.search_variant(top, 1)
    search.limit_bytes = round(least.search.bytes_needed(least.evaluate(least.fastest)) / excess)
    done: list[tuple[str, int]] = []
    fit, variant = Search.fit_memory, Search.search_variant

    def fitting(made: Search, outcome: SearchResult, *, at_once: bool = False, below_s: float = math.inf) -> bool:
        if made.recomputation is None:
            return False
        if not at_once:
            done.append(("fitted", made.program.micro_batches))
        return fit(made, outcome, at_once=at_once, below_s=below_s)

    def searching(made: Search, again: Recomputation | None, parts: int, *without: frozenset[Mesh]) -> SearchResult:
        done.append(("searched", parts))
        return variant(made, again, parts, *without)

    monkeypatch.setattr(Search, "fit_memory", fitting)
    monkeypatch.setattr(Search, "search_variant", searching)
    memory_tradeoffs.fit_with_remat(outcome)
    assert ("fitted", 1) in done
    assert ("searched", 2) not in done[: done.index(("fitted", 1))]


@pytest.mark.parametrize(("slower", "count"), [(0.05, 0), (0.5, 1)])
def test_parts_that_promise_much_have_a_price_though_something_fits(
    slower: float, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fits is of the whole batch; no fastest plan of two parts fits, but one takes far less."""
    outcome = _outcome()
    search, ladder = outcome.search, memory_tradeoffs._remat_levels(outcome)[-1:]
    search.limit_bytes = 1
    parts = {
        (2, rung): search.search_variant(again, 2)
        for rung, again in ((memory_tradeoffs.NO_REMAT, None), (0, ladder[0]))
    }
    plan = outcome.evaluate(outcome.fastest)
    step_s = parts[2, 0].fastest.step_s * (1 + slower) / (1 - memory_tradeoffs.MIN_MICRO_BATCH_GAIN)
    outcome.best_plan = replace(plan, cost=replace(plan.cost, compute_s=step_s, communication_s=0.0, hidden_s=0.0))
    priced: list[SearchResult] = []

    def fitting(made: Search, outcome: SearchResult, *, at_once: bool = False, below_s: float = math.inf) -> bool:
        if not at_once:
            priced.append(outcome)
        return False

    monkeypatch.setattr(Search, "fit_memory", fitting)
    table = memory_tradeoffs._TradeoffTable(search, ladder, {(1, memory_tradeoffs.NO_REMAT): outcome, **parts})
    table.best_result = outcome
    table._bisect_levels(2)
    assert priced == [parts[2, 0]][:count]


def test_where_what_fits_is_nearly_the_fastest_nothing_else_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computing again, even what costs nothing, could not save what a search of its own is worth."""
    outcome = _outcome()
    searched: list[int] = []

    def fitting(made: Search, outcome: SearchResult, *, at_once: bool = False, below_s: float = math.inf) -> bool:
        if made.recomputation is not None:
            return False
        plan = outcome.evaluate(outcome.fastest)
        cost = replace(plan.cost, compute_s=plan.cost.compute_s + slower * plan.cost.step_s)
        outcome.best_plan = replace(plan, cost=cost)
        return True

    def searching(made: Search, again: Recomputation | None, parts: int, *without: frozenset[Mesh]) -> SearchResult:
        searched.append(parts)
        return variant(made, again, parts, *without)

    variant = Search.search_variant
    monkeypatch.setattr(Search, "fit_memory", fitting)
    monkeypatch.setattr(Search, "search_variant", searching)
    for part, times in ((0.5, 0), (2.0, 1)):
        slower = part * memory_tradeoffs.MIN_TABLE_GAIN
        ladder = [Recomputation(instructions=frozenset(), segments=(), stages={})]
        memory_tradeoffs._TradeoffTable(outcome.search, ladder, {(1, memory_tradeoffs.NO_REMAT): outcome}).find_best()
        assert len(searched) == times


@pytest.mark.slow
def test_what_is_computed_again_is_not_searched_on_a_mesh_that_is_slower_and_saves_nothing() -> None:
    """Four meshes of one and two axes: of those, one that is slower than another needs less than that."""
    step = programs.gpt2(layers=2, width=256, vocabulary=4096, length=256, batch=64)
    search = Search(programs.lower(step), replace(Cluster.local(8), hardware=PLAIN_A100), PlanOptions())
    outcome = search.search_meshes()
    plans = [outcome.evaluate(each) for each in outcome.solutions if each.coarse_solution is None]
    table = memory_tradeoffs._TradeoffTable(
        search, memory_tradeoffs._remat_levels(outcome), {(1, memory_tradeoffs.NO_REMAT): outcome}
    )
    tried = {each.mesh for each in table._result_at(1, 0).solutions if each.coarse_solution is None}
    left_out = [found for found in plans if found.mesh not in tried]
    assert left_out
    assert min(plans, key=lambda found: found.cost.step_s).mesh in tried
    kept = [(found.cost.step_s, search.bytes_needed(found)) for found in plans if found.mesh in tried]
    for found in left_out:
        step_s, needed = found.cost.step_s, search.bytes_needed(found)
        assert any(less_s < step_s and less <= memory_tradeoffs.SIMILAR_MEMORY_RATIO * needed for less_s, less in kept)


@pytest.mark.slow
def test_where_nothing_fits_by_far_other_meshes_are_tried_only_if_they_need_far_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = programs.gpt2(layers=2, width=256, vocabulary=4096, length=256, batch=64)
    search = Search(programs.lower(step), replace(Cluster.local(8), hardware=PLAIN_A100), PlanOptions())
    outcome = search.search_meshes()
    plans = {each.mesh: outcome.evaluate(each) for each in outcome.solutions}
    first, least = outcome.fastest.mesh, min(plans, key=lambda mesh: search.bytes_needed(plans[mesh]))
    ratio = search.bytes_needed(plans[first]) / search.bytes_needed(plans[least])
    search.limit_bytes = 1
    asked: list[Mesh] = []
    best = LagrangianSearch.find_best

    def noted(fitting: LagrangianSearch) -> CandidatePlan:
        asked.append(fitting.start_plan.mesh)
        return best(fitting)

    monkeypatch.setattr(LagrangianSearch, "find_best", noted)
    assert not search.fit_memory(outcome)
    assert asked[0] == first
    assert (least in asked) == (ratio > HOPELESS_RATIO)
    assert len(asked) < len(plans)


def test_parts_that_cannot_be_enough_are_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two parts need half of what one does, or more."""
    outcome = _outcome()
    search, ladder = outcome.search, memory_tradeoffs._remat_levels(outcome)
    least = search.search_variant(ladder[-1], 1)
    search.limit_bytes = round(least.search.bytes_needed(least.evaluate(least.fastest)) / (2.2 * HOPELESS_RATIO))
    searched: list[int] = []
    variant = Search.search_variant

    def searching(made: Search, again: Recomputation | None, parts: int, *without: frozenset[Mesh]) -> SearchResult:
        searched.append(parts)
        if parts > 1:
            raise PlanError("as far as this test goes")
        return variant(made, again, parts, *without)

    monkeypatch.setattr(Search, "fit_memory", lambda *_, **__: False)
    monkeypatch.setattr(Search, "search_variant", searching)
    list(_bisected(memory_tradeoffs._TradeoffTable(search, ladder, {(1, memory_tradeoffs.NO_REMAT): outcome})))
    assert 1 in searched
    assert [parts for parts in searched if parts > 1] == [4]


def _bisected(table: memory_tradeoffs._TradeoffTable) -> Iterator[int]:
    for number in table._micro_batch_counts():
        table._bisect_levels(number)
        yield number


def _outcome() -> SearchResult:
    """A small step on four devices, memory aside."""
    text, way = programs.lower(programs.gpt2(layers=2, batch=32, length=32)), {"mesh": {"data": 4}}
    return Search(text, replace(Cluster.local(4), hardware=PLAIN_A100), PlanOptions(**way)).search_meshes()
