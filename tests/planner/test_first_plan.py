"""The first plan that fits: whole, checked, soon, and no other plan for those who ask for the best."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwright.clusters.cluster import Cluster
from shardwright.cost import bytes_with_margin, hardware_profile
from shardwright.errors import MemoryBudgetError
from shardwright.options.plan_options import PlanOptions
from shardwright.planner.cache.plan_cache import plan_with_cache
from shardwright.planner.cache.store import FileStore
from shardwright.planner.clock import Clock
from shardwright.planner.planning import plan_step
from shardwright.plans.pipeline_plan import PipelinePlan
from shardwright.plans.plan import Plan
from tests.planner.programs import gpt2, lower, mlp

CLUSTER = Cluster.local(8)
STEP = lower(gpt2(layers=1, batch=16, length=16))


def first(text: str, options: PlanOptions | None = None, **rest: Any) -> Plan | PipelinePlan:
    options = options or PlanOptions()
    return plan_step(text, CLUSTER, options, clock=Clock(options.deadline_s, takes_first=True), **rest)


@pytest.mark.parametrize(
    "options",
    [
        PlanOptions(),
        PlanOptions(mesh={"data": 2, "model": 4}),
        PlanOptions(force="tensor"),
        PlanOptions(mode="propagate"),
        pytest.param(PlanOptions(remat="full"), marks=pytest.mark.dear),
        PlanOptions(effort="fast"),
        PlanOptions(micro_batches=2),
        PlanOptions(deadline_s=60.0),
    ],
    ids=["free", "mesh", "force", "propagate", "remat", "fast", "micro-batches", "deadline"],
)
def test_it_comes_under_every_option(options: PlanOptions) -> None:
    plan = first(STEP, options)  # `plan_step` checks every plan
    assert isinstance(plan, Plan)
    assert "the first plan that fits" in plan.notes[-1]
    if options.mesh is not None:
        assert plan.mesh.sizes == dict(options.mesh)


@pytest.mark.dear
def test_it_fits_the_memory() -> None:
    profile = hardware_profile(CLUSTER.hardware)
    plan = first(STEP)
    assert isinstance(plan, Plan)
    limit = round(0.8 * bytes_with_margin(plan.memory, profile))
    smaller = first(STEP, PlanOptions(memory_budget=limit))
    assert isinstance(smaller, Plan)
    assert bytes_with_margin(smaller.memory, profile) <= limit
    with pytest.raises(MemoryBudgetError):
        first(STEP, PlanOptions(memory_budget=1000))


def test_a_pipeline_comes_with_its_first_candidate() -> None:
    told: list[str] = []
    plan = first(lower(mlp()), PlanOptions(stages=2), progress=lambda report: told.append(report.phase))
    assert isinstance(plan, PipelinePlan)
    assert len(plan.stages) == 2
    all_told: list[str] = []
    plan_step(lower(mlp()), CLUSTER, PlanOptions(stages=2), progress=lambda report: all_told.append(report.phase))
    assert told.count("stages") <= all_told.count("stages")


@pytest.mark.dear
def test_it_is_looked_for_less_than_the_best_and_not_kept_as_the_answer(tmp_path: Path) -> None:
    """Meshes told of are meshes searched."""
    told: list[set[str]] = [set(), set()]
    quick = first(STEP, progress=lambda report: told[0].add(report.detail))
    searched = plan_step(STEP, CLUSTER, progress=lambda report: told[1].add(report.detail))
    assert isinstance(quick, Plan)
    assert isinstance(searched, Plan)
    assert len(told[0] - {""}) == 1 < len(told[1] - {""})
    assert searched.cost.step_s <= quick.cost.step_s

    def plan(*, takes_first: bool) -> Plan | PipelinePlan:
        clock = Clock(takes_first=takes_first)
        planned = plan_with_cache(STEP, CLUSTER, store=FileStore(tmp_path), clock=clock)
        return replace(planned, planning_s=0.0, program_sha256="")

    first_one, best = plan(takes_first=True), plan(takes_first=False)
    assert best == replace(searched, planning_s=0.0)
    assert first_one != best
    assert plan(takes_first=True) == best, "what is known already comes first"
