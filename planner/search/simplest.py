"""Among plans that the cost model can hardly tell apart, the one that a person understands best.

The model's prices lie some per cent from what devices take. Of the plans within 1 % of the fastest, the one on a mesh
with the fewest axes is taken, of those the one with the fewest collectives once the compiler has combined them, then
the fastest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardwright.planner.clock import OutOfTimeError
from shardwright.planner.plans.collectives import list_collectives
from shardwright.planner.search.experts import similarly_fast_experts
from shardwright.plans import count_combined
from shardwright.shardings import Mesh

if TYPE_CHECKING:
    from shardwright.planner.search.solutions import CandidatePlan, SearchResult

#: Part of the step time by which a simpler plan may be slower than the fastest one.
SIMPLICITY_TOLERANCE = 0.01


def choose_simplest(outcome: SearchResult) -> CandidatePlan:
    """The simplest plan within 1 % of an outcome's that fits the memory."""
    search, fastest = outcome.search, outcome.best_plan
    assert fastest is not None, "an outcome with a plan"
    if not search.is_unforced or search.is_fast or search.must_stop():
        return fastest
    plans = [fastest]
    try:
        plans.extend(_comparable_plans(outcome, fastest, fastest.cost.step_s * (1 + SIMPLICITY_TOLERANCE)))
    except OutOfTimeError:
        return fastest
    return min(plans, key=_complexity) if len(plans) > 1 else fastest


def _comparable_plans(outcome: SearchResult, fastest: CandidatePlan, limit_s: float) -> Iterator[CandidatePlan]:
    """Plans of other meshes with no more axes, and those of experts, that fit and take no longer."""
    search = outcome.search
    for each in outcome.solutions:
        if each.mesh == fastest.mesh or each.step_s > limit_s or _axis_count(each.mesh) > _axis_count(fastest.mesh):
            continue
        plan = outcome.evaluate(each)
        if plan.cost.step_s <= limit_s and search.fits(plan):
            yield plan
    yield from similarly_fast_experts(search, limit_s)


def _complexity(plan: CandidatePlan) -> tuple[int, int, float]:
    return _axis_count(plan.mesh), count_combined(list_collectives(plan.decisions)), plan.cost.step_s


def _axis_count(mesh: Mesh) -> int:
    return sum(axis.size > 1 for axis in mesh.axes)
