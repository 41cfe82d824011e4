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
from shardwright.planner.search.experts import nearly_as_fast
from shardwright.plans import combined_count
from shardwright.shardings import Mesh

if TYPE_CHECKING:
    from shardwright.planner.search.found import Found, Outcome

#: Part of the step time by which a simpler plan may be slower than the fastest one.
NEARLY = 0.01


def simplest(outcome: Outcome) -> Found:
    """The simplest plan within 1 % of an outcome's that fits the memory."""
    search, fastest = outcome.search, outcome.found
    assert fastest is not None, "an outcome with a plan"
    if not search.is_free or search.is_fast or search.is_late():
        return fastest
    plans = [fastest]
    try:
        plans.extend(_others(outcome, fastest, fastest.cost.step_s * (1 + NEARLY)))
    except OutOfTimeError:
        return fastest
    return min(plans, key=_complexity) if len(plans) > 1 else fastest


def _others(outcome: Outcome, fastest: Found, limit_s: float) -> Iterator[Found]:
    """Plans of other meshes with no more axes, and those of experts, that fit and take no longer."""
    search = outcome.search
    for each in outcome.tried:
        if each.mesh == fastest.mesh or each.step_s > limit_s or _axes(each.mesh) > _axes(fastest.mesh):
            continue
        plan = outcome.plan(each)
        if plan.cost.step_s <= limit_s and search.fits(plan):
            yield plan
    yield from nearly_as_fast(search, limit_s)


def _complexity(plan: Found) -> tuple[int, int, float]:
    return _axes(plan.mesh), combined_count(list_collectives(plan.decisions)), plan.cost.step_s


def _axes(mesh: Mesh) -> int:
    return sum(axis.size > 1 for axis in mesh.axes)
