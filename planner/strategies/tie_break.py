"""Breaks ties between strategies of equal cost: the simpler layout wins.

The search would break ties by chance. Every strategy therefore costs slightly more, the less simple its layout: far too
little to outweigh a real difference in price, but enough to decide between equal prices. The penalty depends on the
strategy only, and is the same for all layers. A separate factor for each kind of instruction keeps sums from being
equal.
"""

from __future__ import annotations

import numpy as np

from shardwright.planner.costs.prices import FloatArray
from shardwright.planner.strategies.expansion import Strategy
from shardwright.planner.strategies.strategy_set import StrategySet
from shardwright.planner.tuning import MAX_TIE_SHARE

#: Points of a split axis, and of each dimension that it passes over (half as much again for the mesh's first axis,
#: so that axes stand in mesh order).
_SPLIT, _PER_DIM, _FIRST_AXIS = 1.0, 0.25, 1.5

#: Points of a dimension with axes out of mesh order: mesh order wins ties.
_TURNED = 0.5

#: Points of an axis over which a sum stays partial: reduction wins ties.
_PARTIAL = 1.5

#: Spreads whole numbers evenly over [0, 1) (Weyl's sequence of the golden ratio).
_SPREAD = (5**0.5 - 1) / 2

#: No strategy counts more points than half of these.
_LARGEST = 100.0


class TieBreak:
    """The penalty of each strategy of each set, in seconds.

    least_s: lower bound of the program's cost, a step. nodes: number of nodes with a choice.
    """

    def __init__(self, first_axis: str, least_s: float, nodes: int) -> None:
        self._first_axis = first_axis
        self._unit = MAX_TIE_SHARE * least_s / max(nodes, 1) / _LARGEST
        self._added: dict[int, FloatArray] = {}
        self._kept: list[StrategySet] = []  # an id is only good while its object lives

    def penalty_s(self, strategy_set: StrategySet) -> FloatArray:
        """Seconds per strategy of a set."""
        added = self._added.get(id(strategy_set))
        if added is None:
            points = np.array([_points(strategy, self._first_axis) for strategy in strategy_set.strategies])
            spread = 1 + len(self._added) * _SPREAD % 1
            added = self._added[id(strategy_set)] = self._unit * spread * np.minimum(points, _LARGEST / 2)
            self._kept.append(strategy_set)
        return added


def _points(strategy: Strategy, first_axis: str) -> float:
    """0 for replicated, more for each split axis."""
    points = 0.0
    for sharding in (*strategy.operands, *strategy.results):
        for dim, axes in enumerate(sharding.dims):
            points += len(axes) * (_SPLIT + _PER_DIM * dim)
            points += (_FIRST_AXIS - 1) * _PER_DIM * dim * (first_axis in axes) + _TURNED * (first_axis in axes[1:])
    unreduced = {axis for sharding in (*strategy.operands, *strategy.results) for axis in sharding.unreduced}
    return points + _PARTIAL * len(unreduced)
