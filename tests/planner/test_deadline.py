"""Deadlines: a first plan at once, better ones until the time is over, in the middle of a mesh too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from shardwright.clusters.cluster import Cluster
from shardwright.cost import bytes_with_margin, hardware_profile
from shardwright.errors import MemoryBudgetError, PlanError
from shardwright.options.plan_options import PlanOptions
from shardwright.planner import plan
from shardwright.planner.clock import OutOfTimeError
from shardwright.planner.memory.messages import TooLargeError
from shardwright.planner.planning import plan_step
from shardwright.planner.search.min_memory_plan import _next_micro_batches
from shardwright.planner.search.search import Search
from shardwright.planner.search.solutions import SearchResult
from shardwright.plans.pipeline_plan import PipelinePlan
from shardwright.plans.plan import Plan
from shardwright.progress import PlanProgress
from shardwright.report.text import explain_plan
from tests.planner.clocks import FrozenClock, LookCountingClock, just_late
from tests.planner.programs import gpt2, lower, mlp

CLUSTER = Cluster.local(8)
PROFILE = hardware_profile(CLUSTER.hardware)
STEP = lower(gpt2(layers=1, batch=16, length=16))


def late_after(looks: int) -> LookCountingClock:
    """A deadline of a second that passes after so many looks at the clock; its grace does not."""
    return LookCountingClock(deadline_s=1.0, early_looks=looks)


def over_after(looks: int) -> LookCountingClock:
    """The same, of a clock by which even the grace is over then."""
    return LookCountingClock(deadline_s=1.0, early_looks=looks, late_s=100.0)


@pytest.fixture(scope="module")
def data_parallel() -> Plan:
    return plan(STEP, CLUSTER, PlanOptions(force="data"))


@pytest.fixture(scope="module")
def fully_sharded() -> Plan:
    return plan(STEP, CLUSTER, PlanOptions(force="fsdp"))


@pytest.fixture(scope="module")
def unhurried() -> Plan:
    return plan(STEP, CLUSTER)


def test_no_time_at_all_gives_the_plan_that_is_known_at_once(data_parallel: Plan) -> None:
    reports: list[PlanProgress] = []
    step_plan = plan(STEP, CLUSTER, PlanOptions(deadline_s=1e-9), progress=reports.append, clock=just_late())
    assert "rules" not in [each.phase for each in reports], "no mesh was searched: there is no time for that"
    assert step_plan.cost.step_s <= data_parallel.cost.step_s * (1 + 1e-9)
    assert step_plan.mesh == data_parallel.mesh
    assert step_plan.cost.lower_bound_s == 0
    assert "'data parallel'" in step_plan.cost.bound_scope
    assert "the search, as far as it came, found none faster" in " ".join(explain_plan(step_plan).split())


@pytest.mark.dear
@pytest.mark.parametrize("count", [20, 500, 2000, 5000])
def test_whenever_it_ends_the_plan_is_no_worse_than_the_first(data_parallel: Plan, unhurried: Plan, count: int) -> None:
    step_plan = plan(STEP, CLUSTER, PlanOptions(deadline_s=1.0), clock=late_after(count))
    assert step_plan.cost.step_s <= data_parallel.cost.step_s * (1 + 1e-9)
    assert step_plan.cost.step_s >= unhurried.cost.lower_bound_s * (1 - 1e-9)
    assert step_plan.cost.lower_bound_s <= step_plan.cost.step_s


def test_it_ends_in_the_middle_of_the_only_mesh(data_parallel: Plan) -> None:
    reports: list[PlanProgress] = []
    options = PlanOptions(mesh={"data": 8}, deadline_s=1.0)
    step_plan = plan(STEP, CLUSTER, options, progress=reports.append, clock=late_after(1500))
    assert "rules" in [each.phase for each in reports], "the search of the mesh began"
    assert "'data parallel'" in step_plan.cost.bound_scope, "and did not end"
    assert step_plan.cost.step_s <= data_parallel.cost.step_s * (1 + 1e-9)


@pytest.mark.dear
@pytest.mark.parametrize("deadline_s", [None, 60.0])
def test_the_first_plan_is_told_before_any_mesh_is_searched(deadline_s: float | None, data_parallel: Plan) -> None:
    reports: list[PlanProgress] = []
    step_plan = plan(STEP, CLUSTER, PlanOptions(deadline_s=deadline_s), progress=reports.append)
    told = [each.incumbent_s for each in reports]
    first = next(n for n, incumbent_s in enumerate(told) if incumbent_s)
    assert "rules" not in [each.phase for each in reports[:first]]
    assert told[first] == pytest.approx(data_parallel.cost.step_s)
    assert told[first:-1] == sorted(told[first:-1], reverse=True), "then only better ones"
    assert step_plan.cost.step_s < told[first]


def test_the_first_plan_fits_the_memory() -> None:
    wide, profile = lower(mlp(batch=8, width=128, hidden=512)), hardware_profile(CLUSTER.hardware)
    limit = bytes_with_margin(plan(wide, CLUSTER, PlanOptions(force="fsdp")).memory, profile)
    step_plan = plan(wide, CLUSTER, PlanOptions(deadline_s=1e-9, memory_budget=limit), clock=just_late())
    assert bytes_with_margin(step_plan.memory, profile) <= limit
    assert "'fully sharded (ZeRO-3)'" in step_plan.cost.bound_scope


def test_where_no_expert_fits_the_first_plan_takes_little_whatever_else_it_takes() -> None:
    step, few, profile = (
        lower(gpt2(layers=2, batch=32, length=32)),
        Cluster.local(4),
        hardware_profile(CLUSTER.hardware),
    )
    limit = bytes_with_margin(plan(step, few, PlanOptions(force="fsdp")).memory, profile) * 2 // 3
    reports: list[PlanProgress] = []
    options = PlanOptions(deadline_s=1e-9, memory_budget=limit)
    step_plan = plan(step, few, options, progress=reports.append, clock=just_late())
    assert bytes_with_margin(step_plan.memory, profile) <= limit
    assert step_plan.recomputed
    assert "fully sharded" in step_plan.cost.bound_scope
    told = [each for each in reports if each.incumbent_s]
    assert told[0].incumbent_s == pytest.approx(step_plan.cost.step_s), "what is known at once"


@pytest.mark.parametrize("count", [50, 1000, 4000])
def test_it_is_no_worse_than_the_first_plan_where_memory_binds(
    data_parallel: Plan, fully_sharded: Plan, count: int
) -> None:
    limit = bytes_with_margin(data_parallel.memory, hardware_profile(CLUSTER.hardware))
    step_plan = plan(STEP, CLUSTER, PlanOptions(deadline_s=1.0, memory_budget=limit), clock=late_after(count))
    assert step_plan.cost.step_s <= fully_sharded.cost.step_s * (1 + 1e-3)


@pytest.mark.parametrize(("spare", "name"), [(1.0, "fully sharded (ZeRO-3)"), (1.5, "data parallel")])
def test_where_data_parallelism_hardly_fits_the_fully_sharded_plan_comes_first(
    data_parallel: Plan, spare: float, name: str
) -> None:
    limit = round(spare * bytes_with_margin(data_parallel.memory, hardware_profile(CLUSTER.hardware)))
    step_plan = plan(STEP, CLUSTER, PlanOptions(deadline_s=1e-9, memory_budget=limit), clock=just_late())
    assert repr(name) in step_plan.cost.bound_scope


@pytest.mark.parametrize(
    ("stored", "limit", "expected"),
    [(0, 50, 2), (0, 49, 4), (0, 24, 8), (20, 60, 2), (20, 40, 4), (20, 10, 16)],
)
def test_no_parts_of_the_batch_are_tried_that_cannot_be_enough(stored: int, limit: int, expected: int) -> None:
    refusal = TooLargeError("needs 100")
    refusal.needed_bytes, refusal.stored_bytes = 100, stored
    search = cast(Search, SimpleNamespace(limit_bytes=limit))
    search_result = SearchResult(search=search, solutions=[], mesh_errors={}, memory_error=refusal)
    assert _next_micro_batches(search, search_result, 1, most=16) == expected


@pytest.mark.parametrize(("deadline_s", "last_s"), [(1.0, 3.0), (10.0, 12.0), (20.0, 24.0)])
def test_without_a_plan_it_ends_a_fifth_after_the_deadline_or_two_seconds(deadline_s: float, last_s: float) -> None:
    clock = FrozenClock(deadline_s=deadline_s, shown_s=last_s - 0.1)
    clock.check()
    clock.shown_s = last_s + 0.1
    with pytest.raises(OutOfTimeError):
        clock.check()
    clock.is_final = True
    clock.check()  # what is written down is written to its end


def test_with_a_plan_it_ends_at_the_deadline_or_in_time_to_write_that_down() -> None:
    clock = FrozenClock(deadline_s=5.0, may_stop=True, shown_s=4.9)
    clock.check()
    clock.record_build_time(1.0)  # the grace has room for that
    clock.check()
    with pytest.raises(OutOfTimeError):
        clock.check(0.2)  # what takes longer than is left is not begun
    clock.record_build_time(4.0)
    with pytest.raises(OutOfTimeError):
        clock.check()
    assert not clock.renew().must_stop, "another search in the same time"


def answer(clock: LookCountingClock, **asked: Any) -> Plan | PipelinePlan | PlanError:
    options = PlanOptions(deadline_s=1.0, stages=asked.pop("stages", 1), **asked)
    try:
        return plan_step(STEP, CLUSTER, options, clock=clock)
    except (MemoryBudgetError, OutOfTimeError) as error:
        return error


@pytest.fixture(scope="module")
def sharded_bytes(fully_sharded: Plan) -> int:
    return bytes_with_margin(fully_sharded.memory, PROFILE)


@pytest.mark.parametrize("part", [0.2, 0.6])
@pytest.mark.parametrize("count", [1500, pytest.param(6000, marks=pytest.mark.dear)])
def test_whenever_it_ends_before_something_fits_it_says_the_least_that_was_needed(
    sharded_bytes: int, count: int, part: float
) -> None:
    limit = round(part * sharded_bytes)
    result = answer(over_after(count), memory_budget=limit)
    if isinstance(result, Plan):
        assert bytes_with_margin(result.memory, PROFILE) <= limit
    else:
        assert isinstance(result, MemoryBudgetError)
        assert "the least that was found needs" in result.message
        assert "the deadline of 1 s came before a plan that fits" in result.message
        assert result.remedy.startswith("allow ")
        assert "give a longer deadline" in result.remedy


def test_before_any_plan_it_says_that_the_deadline_is_too_short() -> None:
    for count in (1, 600):
        result = answer(over_after(count))
        assert isinstance(result, OutOfTimeError)
        assert "came before any plan" in result.message
        assert "longer deadline" in result.remedy


@pytest.mark.parametrize(
    "asked",
    [
        {"force": "fsdp"}, {"mode": "propagate"}, {"micro_batches": 2}, {"remat": "full"}, {"effort": "best"},
        {"stages": 2, "micro_batches": 2}, {"mesh": {"data": 2, "model": 4}},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("count", [5, pytest.param(2000, marks=pytest.mark.dear)])
def test_whatever_is_asked_for_it_ends(asked: dict[str, Any], count: int) -> None:
    clock = over_after(count)
    result = answer(clock, memory_budget=300_000, **asked)
    if isinstance(result, Plan):
        assert bytes_with_margin(result.memory, PROFILE) <= 300_000
    assert next(clock.looks) <= count + 1000, "hardly looked at any more"


def test_what_is_forced_is_searched_to_the_end_however_late_it_is() -> None:
    step_plan = plan(STEP, CLUSTER, PlanOptions(force="tensor", deadline_s=1e-9), clock=just_late())
    assert step_plan.origin == "forced: tensor"
