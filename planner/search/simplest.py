"""Tie-breaking by simplicity among plans the cost model cannot distinguish.

The model's costs are some percent off the devices' times. Plans within 1 % of the fastest are ordered by number of mesh
axes, then number of combined collectives, then step time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardwright.planner.clock import OutOfTimeError
from shardwright.planner.plans.collectives import list_collectives
from shardwright.planner.search.experts import similarly_fast_experts
from shardwright.plans.plan import count_combined
from shardwright.plans.shardings import Mesh

if TYPE_CHECKING:
    from shardwright.planner.search.solutions import CandidatePlan, SearchResult


def choose_simplest(outcome: SearchResult) -> CandidatePlan:
    """The simplest plan that fits the memory within 1 % of the result's."""
    search, fastest = outcome.search, outcome.best_plan
    assert fastest is not None, "an outcome with a plan"
    if not search.is_unforced or search.is_fast or search.clock.takes_first or search.must_stop():
        return fastest
    plans = [fastest]
    try:
        limit_s = fastest.cost.step_s * (1 + search.limits.simplicity_tolerance)
        plans.extend(_comparable_plans(outcome, fastest, limit_s))
    except OutOfTimeError:
        return fastest
    return min(plans, key=_complexity) if len(plans) > 1 else fastest


def _comparable_plans(outcome: SearchResult, fastest: CandidatePlan, limit_s: float) -> Iterator[CandidatePlan]:
    """Feasible plans within the time limit: experts' plans, and plans of other meshes with no more axes."""
    search = outcome.search
    for solution in outcome.solutions:
        if (
            solution.mesh == fastest.mesh
            or solution.step_s > limit_s
            or _axis_count(solution.mesh) > _axis_count(fastest.mesh)
        ):
            continue
        plan = outcome.evaluate(solution)
        if plan.cost.step_s <= limit_s and search.fits(plan):
            yield plan
    yield from similarly_fast_experts(search, limit_s)


def _complexity(plan: CandidatePlan) -> tuple[int, int, float]:
    return _axis_count(plan.mesh), count_combined(list_collectives(plan.decisions)), plan.cost.step_s


def _axis_count(mesh: Mesh) -> int:
    return sum(axis.size > 1 for axis in mesh.axes)
