"""From a plan on three axes to a faster one near it, two axes at a time where one does not get further.

The search descends along one axis in large programs, and leaves it there: what it finds is mostly within a percent of
the bound. Where it is not, the other axes come next, then pairs of them. With two of three axes free, a neighbourhood
has most of what can be changed at all (a value that is split over one axis may be split over another instead), and the
plan known leaves so little open in it that it is solved in seconds. Block coordinate descent ends at better plans with
larger blocks (Tseng, "Convergence of a block coordinate descent method for nondifferentiable minimization", 2001, on
what single coordinates end at).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

from shardwright.planner.search.mesh_search import MeshSearch
from shardwright.planner.search.solutions import CandidatePlan
from shardwright.planner.segments.descent import descend

#: Part of the step time that a round must save to count as one that did.
_MIN_GAIN = 1e-4

#: The relative gap at which a round counts as solved.
_GAP_TOLERANCE = 2e-3

#: How often each block of axes is free at most.
_MAX_ROUNDS = 3


def block_coordinate_descent(
    search: MeshSearch, found: CandidatePlan, most_open: float, *, together: int
) -> CandidatePlan:
    """A plan that was descended to, or a faster one that fits near it, with the bound of the one given.

    most_open: the gap at which it is good enough. together: axes that are free at a time. Ends too where none of these
    gains, and when it is late.
    """
    blocks, idle = list(combinations([axis.name for axis in found.mesh.axes], together)), 0
    for number in range(_MAX_ROUNDS * len(blocks)):
        if found.cost.gap <= most_open or search.must_stop() or idle == len(blocks):
            break
        made = _descend_along(search, found, blocks[number % len(blocks)])
        idle = 1 if made is not found else idle + 1  # what was just free has no more to gain
        found = made
    return found


def _descend_along(search: MeshSearch, found: CandidatePlan, axes: tuple[str, ...]) -> CandidatePlan:
    """The fastest plan that differs along some axes, if it fits and is faster."""
    chain, together = found.chain, len(axes)
    at = chain.strategies(found.solution.states)
    limit_s = search.time_limit_s()
    near, solved = descend(
        chain, at, chain.graph, axes, time_limit_s=limit_s, most_rounds=1, together=together, close=_GAP_TOLERANCE
    )
    other = search.evaluate(near, solved, found.notes)
    is_faster = other.cost.step_s < found.cost.step_s * (1 - _MIN_GAIN)
    if not is_faster or not search.fits(other):
        return found
    cost = replace(
        other.cost,
        lower_bound_s=min(found.cost.lower_bound_s, other.cost.step_s),
        bound_scope=found.cost.bound_scope,
    )
    made = replace(other, coarse_solution=found.coarse_solution, multipliers=found.multipliers, cost=cost)
    search.report_plan(made)
    return made
