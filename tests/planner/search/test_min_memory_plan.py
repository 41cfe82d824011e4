"""Plans that take little, made where nothing else fits, and what is said where not even they do."""

from __future__ import annotations

import math
import re

import pytest

import shardwright as sw
from shardwright.clusters.cluster import Cluster
from shardwright.errors import MemoryBudgetError
from shardwright.options.plan_options import PlanOptions
from shardwright.planner.search.min_memory_plan import find_fallback_plan, find_min_memory_plan
from shardwright.planner.search.search import Search
from shardwright.planner.search.solutions import SearchResult
from shardwright.planner.search.tuning import MAX_MICRO_BATCHES
from tests.planner import programs

CLUSTER = Cluster.local(4)
MLP = programs.lower(programs.mlp(batch=64, width=64, hidden=256))


@pytest.fixture(scope="module")
def gpt2() -> str:
    return programs.lower(programs.gpt2(layers=1, batch=128, length=16))


def search(text: str, budget: int) -> Search:
    return Search(text, CLUSTER, PlanOptions(memory_budget=budget, stages=1))


@pytest.mark.dear
def test_more_parts_than_are_searched_are_taken_where_nothing_else_fits(gpt2: str) -> None:
    alone = find_min_memory_plan(search(gpt2, 1))
    assert isinstance(alone, SearchResult)
    assert alone.search.program.micro_batches > MAX_MICRO_BATCHES
    budget = round(alone.min_needed_bytes)
    result = find_fallback_plan(search(gpt2, budget))
    assert result is not None
    assert result.best_plan is not None
    assert result.search.program.micro_batches > MAX_MICRO_BATCHES
    assert result.search.bytes_needed(result.best_plan) <= budget
    in_fewer = Search(gpt2, CLUSTER, PlanOptions(memory_budget=budget, micro_batches=MAX_MICRO_BATCHES))
    refused = find_fallback_plan(in_fewer)
    assert refused is not None
    assert refused.best_plan is None
    assert budget < refused.min_needed_bytes < math.inf


@pytest.mark.dear
def test_state_that_does_not_fit_is_refused_before_anything_is_searched() -> None:
    whole = search(MLP, 1).program.state_bytes
    said: list[str] = []
    with pytest.raises(MemoryBudgetError, match=r"the state alone takes .* on each of 4") as refused:
        sw.plan(MLP, CLUSTER, memory_budget=whole // 4 - 1, cache=False, progress=lambda it: said.append(it.phase))
    assert set(said) <= {"parse", "rewrite"}
    assert re.search(r"the least that was found needs [0-9.]+ [KM]iB \(", str(refused.value))
    with pytest.raises(MemoryBudgetError, match="no plan over"):
        sw.plan(MLP, CLUSTER, memory_budget=whole // 4 + 1, cache=False)


def test_the_memory_that_a_refusal_names_is_enough() -> None:
    with pytest.raises(MemoryBudgetError) as refused:
        sw.plan(MLP, CLUSTER, memory_budget=1000, stages=1, cache=False)
    allowed = re.search(r"allow ([0-9.]+) KiB", str(refused.value))
    assert allowed
    budget = int(float(allowed[1]) * 2**10)
    assert sw.plan(MLP, CLUSTER, memory_budget=budget, cache=False).memory.peak_bytes <= budget
