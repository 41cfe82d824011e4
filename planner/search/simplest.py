"""Tie-breaking by simplicity among plans the cost model cannot distinguish.

The model's costs are some percent off the devices' times. Plans within 1 % of the fastest are ordered by number of mesh
axes, then number of combined collectives, then step time.

Solutions are found by costs that combine no collectives; combined, another mesh's plan may be the fastest. The solution
that was the fastest before is then still worth finishing, when it was refined from a coarser mesh: closing its gap may
gain several percent.
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
    is_free = search.is_unforced and not search.is_fast and not search.clock.takes_first
    if not search.simplicity_tolerance or not is_free or search.must_stop():
        return fastest
    plans = [fastest]
    try:
        limit_s = fastest.cost.step_s * (1 + search.simplicity_tolerance)
        plans.extend(_comparable_plans(outcome, fastest, limit_s))
    except OutOfTimeError:
        return fastest
    return min(plans, key=_complexity) if len(plans) > 1 else fastest


def find_promising_plan(outcome: SearchResult) -> CandidatePlan | None:
    """A refined plan that fits and that finishing may make faster than the result's; None without one.

    None, too, where the result's plan was within 1 % of it before collectives were combined.
    """
    search, chosen, start = outcome.search, outcome.best_plan, outcome.fastest if outcome.solutions else None
    assert chosen is not None, "an outcome with a plan"
    if start is None or start.coarse_solution is None or start.mesh == chosen.mesh or search.clock.is_expired:
        return None
    own = next((solution for solution in outcome.solutions if solution.mesh == chosen.mesh), None)
    if own is None or chosen.cost.bound_scope:  # an expert's plan
        return None
    plan = outcome.evaluate(start)
    is_apart = own.step_s > plan.cost.step_s * (1 + search.simplicity_tolerance)
    return plan if is_apart and search.fits(plan) else None


def is_preferable(plan: CandidatePlan, other: CandidatePlan, tolerance: float) -> bool:
    """Whether a plan is faster than another, and by more than `tolerance` (relative) if it is less simple."""
    is_simple = _complexity(plan)[:2] <= _complexity(other)[:2]
    return plan.cost.step_s * (1 if is_simple else 1 + tolerance) < other.cost.step_s


def _comparable_plans(outcome: SearchResult, fastest: CandidatePlan, limit_s: float) -> Iterator[CandidatePlan]:
    """Feasible plans within the time limit: experts' plans, and plans of other meshes with no more axes."""
    search = outcome.search
    for solution in outcome.solutions:
        if (
            solution.mesh == fastest.mesh
            or outcome.predict_step_s(solution) > limit_s
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
