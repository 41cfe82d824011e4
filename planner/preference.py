"""What to choose where costs are equal: the simpler layout, and the same one in every layer.

Equal layers leave the search ties that it would break by chance, differently in each of them. So every state of a
cluster costs a little more the less simple its strategy is: far too little to outweigh a price that means anything,
enough to decide between prices that are equal or differ by rounding. What a cluster adds depends on its strategies
only, so it is the same for all layers; a factor of its own for each kind of instruction keeps sums from being equal.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwright.planner.graph import Graph
from shardwright.planner.pbqp import FloatArray, Problem
from shardwright.planner.strategies import Strategy

#: What one split axis adds, as a part of the least that the program can cost.
UNIT = 5e-8

#: Points of a split axis, and of each dimension that it passes over (half as much again for the mesh's first axis,
#: so that axes stand in mesh order).
_SPLIT, _PER_DIM, _FIRST_AXIS = 1.0, 0.25, 1.5

#: Points of a sum that every device receives whole: more than scattering it, where only a part is read, and less than
#: scattering it to gather the update.
_WHOLE_SUM = 1.5

#: Spreads whole numbers evenly over [0, 1) (Weyl's sequence of the golden ratio).
_SPREAD = (5**0.5 - 1) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Preferred:
    """A problem with preferences added; `most` is the most that they can add to an assignment."""

    problem: Problem
    most: float


def prefer_simple(graph: Graph, problem: Problem) -> Preferred:
    """`problem`, the graph's, with preferences."""
    unit = UNIT * sum(least for cost in problem.costs if np.isfinite(least := float(cost.min())))
    added_by: dict[int, FloatArray] = {}
    costs, most = [], 0.0
    first = graph.prices.mesh.axes[0].name
    for leader, cost in zip(graph.leaders, problem.costs, strict=True):
        found = graph.sets[leader]
        added = added_by.get(id(found))
        if added is None:
            points = np.array([_points(strategy, first) for strategy in found.strategies])
            added = added_by[id(found)] = unit * (1 + len(added_by) * _SPREAD % 1) * points
        costs.append(cost + added)
        most += float(added.max(initial=0.0))
    return Preferred(problem=Problem(costs=costs, edges=problem.edges), most=most)


def _points(strategy: Strategy, first_axis: str) -> float:
    """0 for replicated, more for each split axis."""
    points = 0.0
    for sharding in (*strategy.operands, *strategy.results):
        for dim, axes in enumerate(sharding.dims):
            points += len(axes) * (_SPLIT + _PER_DIM * dim)
            points += (_FIRST_AXIS - 1) * _PER_DIM * dim * (first_axis in axes)
    whole = set(strategy.partial).difference(*(sharding.axes for sharding in strategy.results))
    return points + _WHOLE_SUM * len(whole)
