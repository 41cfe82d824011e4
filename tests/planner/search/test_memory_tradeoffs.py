"""What is tried where memory binds: parts of the batch, values computed again, a price of memory."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

import shardwright as sw
from shardwright.clusters.cluster import Cluster
from shardwright.cost import bytes_with_margin, hardware_profile
from shardwright.errors import PlanError
from shardwright.options.plan_options import PlanOptions
from shardwright.planner.memory.lagrangian import LagrangianSearch
from shardwright.planner.memory.recompute import Recomputation
from shardwright.planner.memory.tuning import HOPELESS_RATIO, NEAR_FIT_RATIO
from shardwright.planner.search import memory_tradeoffs
from shardwright.planner.search.search import Search
from shardwright.planner.search.solutions import CandidatePlan, SearchResult
from shardwright.planner.search.tuning import (
    MIN_ENTRY_GAIN,
    MIN_MICRO_BATCH_GAIN,
    MIN_TABLE_GAIN,
    NEAR_FASTEST,
    SIMILAR_MEMORY_RATIO,
)
from shardwright.plans.shardings import Mesh
from tests.planner import programs
from tests.planner.programs import PLAIN_A100
from workloads.collective_steps import gpt2

#: Two heads over eight devices: each computes both, and two parts of the batch take less time than the whole.
OPTIONS = {"force": "tensor", "mesh": "8", "stages": 1, "cache": False}


@pytest.mark.dear
def test_where_parts_of_the_batch_take_less_than_the_whole_more_parts_are_still_searched():
    text = gpt2(heads=2, width=64, layers=1, batch=64, context=128, vocabulary=64)
    whole = sw.plan(text, 8, **OPTIONS)
    budget = round(0.4 * whole.memory.peak_bytes)
    parts = sw.plan(text, 8, memory_budget=budget, **OPTIONS)
    assert parts.micro_batches > 1
    assert parts.memory.peak_bytes <= budget
    assert parts.cost.step_s < whole.cost.step_s, "this step no longer shows what is tested"


class _FindsLate(Search):
    """A search whose plans are over the memory until a plan that takes little is known.

    offers: plans that fit, also of its variants.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.offers: list[CandidatePlan] = []

    def offer(self, candidate: CandidatePlan) -> None:
        self.offers.append(candidate)
        super().offer(candidate)

    def fit_memory(self, outcome: SearchResult, *, at_once: bool = False, below_s: float = math.inf) -> bool:
        return bool(self.offers) and super().fit_memory(outcome, at_once=at_once, below_s=below_s)


@pytest.mark.dear
def test_the_program_of_the_plan_that_takes_little_is_searched_too() -> None:
    text, cluster = programs.lower(programs.gpt2(layers=2, batch=32, length=32)), Cluster.local(4)
    profile, way = hardware_profile(cluster.hardware), {"mesh": {"data": 4}, "micro_batches": 1}
    least = sw.plan(text, cluster, force="fsdp", remat="full", stages=1, cache=False, **way)
    limit = round(1.1 * bytes_with_margin(least.memory, profile))
    search = _FindsLate(text, cluster, PlanOptions(memory_budget=limit, **way))
    result = search.run()
    sparing = search.offers[0]
    assert "takes little memory" in sparing.cost.bound_scope
    assert result.cost.step_s < sparing.cost.step_s
    assert bytes_with_margin(result.memory, profile) <= limit
    assert 0 <= result.cost.gap < 0.05


class _RecordingFit(LagrangianSearch):
    """Records in its search the mesh that it fits a plan on."""

    search: _FitRecorder

    def find_best(self) -> CandidatePlan:
        self.search.asked.append(self.start_plan.mesh)
        return LagrangianSearch.find_best(self)


class _FitRecorder(Search):
    """asked: the meshes on which plans were fitted."""

    lagrangian_search = _RecordingFit

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.asked: list[Mesh] = []


@cache
def _search_four_meshes() -> SearchResult:
    step = programs.gpt2(layers=2, width=256, vocabulary=4096, length=256, batch=64)
    search = _FitRecorder(programs.lower(step), replace(Cluster.local(8), hardware=PLAIN_A100), PlanOptions())
    return search.search_meshes()


def four_meshes() -> tuple[_FitRecorder, SearchResult]:
    """A search of the caller's own, and its plans on meshes of one and two axes, memory aside."""
    shared = _search_four_meshes()
    search = copy.copy(shared.search)
    outcome = SearchResult(search=search, solutions=[*shared.solutions], mesh_errors=dict(shared.mesh_errors))
    assert isinstance(search, _FitRecorder)
    search.asked = []
    return search, outcome


@pytest.mark.dear
def test_a_plan_of_a_slow_mesh_that_fits_is_not_the_end() -> None:
    """The plan of the fastest mesh needs more than there is, one of a mesh that is slower by 10 % fits."""
    search, outcome = four_meshes()
    needed = {id(each): search.bytes_needed(outcome.evaluate(each)) for each in outcome.solutions}
    slow = min(outcome.solutions, key=lambda solution: needed[id(solution)])
    assert slow.step_s > outcome.fastest.step_s * (1 + NEAR_FASTEST)
    search.limit_bytes = needed[id(slow)]
    result = memory_tradeoffs.fit_with_remat(outcome)
    assert result.best_plan is not None
    assert result.search.bytes_needed(result.best_plan) <= search.limit_bytes
    assert result.step_s < slow.step_s * (1 - MIN_ENTRY_GAIN)


class _RecordingSearch(Search):
    """Fits and searches variants as `verdict` says, and records which.

    verdict: (a result, whether its fastest plan alone is tried) → whether a plan fits; None: as it does.
    done: what was done, with the number of micro-batches, also by its variants.
    """

    verdict: Callable[[SearchResult, bool], bool | None] = staticmethod(lambda outcome, at_once: None)

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.done: list[tuple[str, int]] = []
        self.fitted: list[SearchResult] = []

    def fit_memory(self, outcome: SearchResult, *, at_once: bool = False, below_s: float = math.inf) -> bool:
        fits = self.verdict(outcome, at_once)
        if not at_once and (fits is None or fits):
            self.done.append(("fitted", self.program.micro_batches))
        if not at_once:
            self.fitted.append(outcome)
        return super().fit_memory(outcome, at_once=at_once, below_s=below_s) if fits is None else fits

    def search_variant(
        self, again: Recomputation | None, micro_batches: int, without: frozenset[Mesh] = frozenset()
    ) -> SearchResult:
        self.done.append(("searched", micro_batches))
        return super().search_variant(again, micro_batches, without)

    @property
    def searched(self) -> list[int]:
        """Micro-batches of the variants that were searched."""
        return [parts for what, parts in self.done if what == "searched"]


class _WholeBatchOnly(_RecordingSearch):
    """No variant of more parts is planned."""

    def search_variant(
        self, again: Recomputation | None, micro_batches: int, without: frozenset[Mesh] = frozenset()
    ) -> SearchResult:
        if micro_batches > 1:
            self.done.append(("searched", micro_batches))
            raise PlanError("as far as this test goes")
        return super().search_variant(again, micro_batches, without)


@pytest.mark.dear
@pytest.mark.parametrize("excess", [(NEAR_FIT_RATIO + HOPELESS_RATIO) / 2, 2 * HOPELESS_RATIO])
def test_memory_has_a_price_before_more_parts_are_searched(excess: float) -> None:
    """What fits tells how many parts need not be planned at all; what the fastest plan needs does not tell whether any
    fits."""
    outcome = _outcome(_WholeBatchOnly)
    search = outcome.search
    assert isinstance(search, _WholeBatchOnly)
    top = memory_tradeoffs._remat_levels(outcome)[-1]
    least = search.search_variant(top, 1)
    search.limit_bytes = round(least.search.bytes_needed(least.evaluate(least.fastest)) / excess)
    search.done.clear()
    search.verdict = lambda result, at_once: False if result.search.recomputation is None else None
    memory_tradeoffs.fit_with_remat(outcome)
    assert ("fitted", 1) in search.done
    assert ("searched", 2) not in search.done[: search.done.index(("fitted", 1))]


@pytest.mark.dear
@pytest.mark.parametrize(("slower", "count"), [(0.05, 0), (0.5, 1)])
def test_parts_that_promise_much_have_a_price_though_something_fits(slower: float, count: int) -> None:
    """What fits is of the whole batch; no fastest plan of two parts fits, but one takes far less."""
    outcome = _outcome()
    search, ladder = outcome.search, memory_tradeoffs._remat_levels(outcome)[-1:]
    assert isinstance(search, _RecordingSearch)
    search.limit_bytes = 1
    search.verdict = lambda result, at_once: False
    parts = {
        (2, rung): search.search_variant(again, 2)
        for rung, again in ((memory_tradeoffs.NO_REMAT, None), (0, ladder[0]))
    }
    plan = outcome.evaluate(outcome.fastest)
    step_s = parts[2, 0].fastest.step_s * (1 + slower) / (1 - MIN_MICRO_BATCH_GAIN)
    outcome.best_plan = replace(plan, cost=replace(plan.cost, compute_s=step_s, communication_s=0.0, hidden_s=0.0))
    table = memory_tradeoffs._TradeoffTable(search, ladder, {(1, memory_tradeoffs.NO_REMAT): outcome, **parts})
    table.best_result = outcome
    table._bisect_levels(2)
    assert search.fitted == [parts[2, 0]][:count]


@pytest.mark.parametrize(("part", "times"), [(0.5, 0), (2.0, 1)])
def test_where_what_fits_is_nearly_the_fastest_nothing_else_is_searched(part: float, times: int) -> None:
    """Computing again, even what costs nothing, could not save what a search of its own is worth."""
    outcome = _outcome()
    assert isinstance(outcome.search, _RecordingSearch)

    def fits_slowly(result: SearchResult, at_once: bool) -> bool:
        if result.search.recomputation is not None:
            return False
        plan, slower = result.evaluate(result.fastest), part * MIN_TABLE_GAIN
        cost = replace(plan.cost, compute_s=plan.cost.compute_s + slower * plan.cost.step_s)
        result.best_plan = replace(plan, cost=cost)
        return True

    outcome.search.verdict = fits_slowly
    ladder = [Recomputation(instructions=frozenset(), segments=(), stages={})]
    memory_tradeoffs._TradeoffTable(outcome.search, ladder, {(1, memory_tradeoffs.NO_REMAT): outcome}).find_best()
    assert len(outcome.search.searched) == times


@pytest.mark.dear
def test_what_is_computed_again_is_not_searched_on_a_mesh_that_is_slower_and_saves_nothing() -> None:
    """Four meshes of one and two axes: of those, one that is slower than another needs less than that."""
    search, outcome = four_meshes()
    plans = [outcome.evaluate(each) for each in outcome.solutions if each.coarse_solution is None]
    table = memory_tradeoffs._TradeoffTable(
        search, memory_tradeoffs._remat_levels(outcome), {(1, memory_tradeoffs.NO_REMAT): outcome}
    )
    tried = {each.mesh for each in table._result_at(1, 0).solutions if each.coarse_solution is None}
    left_out = [found for found in plans if found.mesh not in tried]
    assert left_out
    assert min(plans, key=lambda candidate: candidate.cost.step_s).mesh in tried
    results = [(found.cost.step_s, search.bytes_needed(found)) for found in plans if found.mesh in tried]
    for found in left_out:
        step_s, needed = found.cost.step_s, search.bytes_needed(found)
        assert any(less_s < step_s and less <= SIMILAR_MEMORY_RATIO * needed for less_s, less in results)


@pytest.mark.dear
def test_where_nothing_fits_by_far_other_meshes_are_tried_only_if_they_need_far_less() -> None:
    search, outcome = four_meshes()
    plans = {each.mesh: outcome.evaluate(each) for each in outcome.solutions}
    first, least = outcome.fastest.mesh, min(plans, key=lambda mesh: search.bytes_needed(plans[mesh]))
    ratio = search.bytes_needed(plans[first]) / search.bytes_needed(plans[least])
    search.limit_bytes = 1
    assert not search.fit_memory(outcome)
    assert search.asked[0] == first
    assert (least in search.asked) == (ratio > HOPELESS_RATIO)
    assert len(search.asked) < len(plans)


def test_parts_that_cannot_be_enough_are_not_searched() -> None:
    """Two parts need half of what one does, or more."""
    outcome = _outcome(_WholeBatchOnly)
    search, ladder = outcome.search, memory_tradeoffs._remat_levels(outcome)
    assert isinstance(search, _WholeBatchOnly)
    least = search.search_variant(ladder[-1], 1)
    search.limit_bytes = round(least.search.bytes_needed(least.evaluate(least.fastest)) / (2.2 * HOPELESS_RATIO))
    search.done.clear()
    search.verdict = lambda result, at_once: False
    list(_bisect(memory_tradeoffs._TradeoffTable(search, ladder, {(1, memory_tradeoffs.NO_REMAT): outcome})))
    assert 1 in search.searched
    assert [parts for parts in search.searched if parts > 1] == [4]


def _bisect(table: memory_tradeoffs._TradeoffTable) -> Iterator[int]:
    for number in table._micro_batch_counts():
        table._bisect_levels(number)
        yield number


def _outcome(kind: type[Search] = _RecordingSearch) -> SearchResult:
    """A small step on four devices, memory aside."""
    text, way = programs.lower(programs.gpt2(layers=2, batch=32, length=32)), {"mesh": {"data": 4}}
    return kind(text, replace(Cluster.local(4), hardware=PLAIN_A100), PlanOptions(**way)).search_meshes()
