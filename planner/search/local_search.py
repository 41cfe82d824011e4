"""Block coordinate descent from a three-axis plan: one axis at a time, then two.

In large programs the search descends along one axis and stops, mostly within a percent of the bound. When it is not,
the other axes follow, then pairs. With two of three axes free, a neighborhood covers most possible changes (a value
split over one axis may be split over another), and the incumbent leaves little gap in it: it is solved in seconds.
Larger blocks end at better plans (Tseng, "Convergence of a block coordinate descent method for nondifferentiable
minimization", 2001, on the limits of single coordinates).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

from shardwright.planner.search.mesh_search import MeshSearch
from shardwright.planner.search.solutions import CandidatePlan
from shardwright.planner.search.tuning import BLOCK_GAP, MAX_BLOCK_ROUNDS, MIN_BLOCK_GAIN
from shardwright.planner.segments.descent import descend


def block_coordinate_descent(
    search: MeshSearch, incumbent: CandidatePlan, most_open: float, *, together: int
) -> CandidatePlan:
    """A descended plan, or a faster feasible one near it, with the given plan's bound.

    most_open: sufficient optimality gap.
    together: number of axes free at a time.

    Also ends when no block improves, or at the deadline.
    """
    blocks, idle = list(combinations([axis.name for axis in incumbent.mesh.axes], together)), 0
    for number in range(MAX_BLOCK_ROUNDS * len(blocks)):
        if incumbent.cost.gap <= most_open or search.must_stop() or idle == len(blocks):
            break
        neighbor = _descend_along(search, incumbent, blocks[number % len(blocks)])
        idle = 1 if neighbor is not incumbent else idle + 1  # the block just freed has no more gain
        incumbent = neighbor
    return incumbent


def _descend_along(search: MeshSearch, incumbent: CandidatePlan, axes: tuple[str, ...]) -> CandidatePlan:
    """The fastest plan differing along some axes, when it fits and is faster."""
    chain, together = incumbent.chain, len(axes)
    at = chain.strategies(incumbent.solution.states)
    limit_s = search.time_limit_s()
    near, solved = descend(
        chain, at, chain.graph, axes, time_limit_s=limit_s, most_rounds=1, together=together, close=BLOCK_GAP
    )
    other = search.evaluate(near, solved, incumbent.notes)
    is_faster = other.cost.step_s < incumbent.cost.step_s * (1 - MIN_BLOCK_GAIN)
    if not is_faster or not search.fits(other):
        return incumbent
    cost = replace(
        other.cost,
        lower_bound_s=min(incumbent.cost.lower_bound_s, other.cost.step_s),
        bound_scope=incumbent.cost.bound_scope,
    )
    faster_plan = replace(
        other, coarse_solution=incumbent.coarse_solution, multipliers=incumbent.multipliers, cost=cost
    )
    search.report_plan(faster_plan)
    return faster_plan
