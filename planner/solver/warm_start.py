"""Warm start of message passing: the final messages of a similar problem, translated to other names.

Any costs may be moved from variables onto edges: no assignment's sum changes. A warm start saves rounds of `dual` and
is always valid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Generic, TypeVar

import numpy as np

from shardwright.planner.solver.pbqp import FloatArray, IntArray

Name = TypeVar("Name", bound=Any)
Other = TypeVar("Other", bound=Any)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WarmStart(Generic[Name]):
    """Messages and an assignment.

    moved: per edge (smaller name first), the cost moved onto it from either end, per state; NaN at unknown states.
    states: of a good assignment; may be partial.
    """

    moved: Mapping[tuple[Name, Name], tuple[FloatArray, FloatArray]] = field(default_factory=dict)
    states: Mapping[Name, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class VariableImage(Generic[Other]):
    """The counterpart in another problem of a variable of this one.

    states: per state of the counterpart, its number in this problem, -1 without one.
    count: number of equal variables it stands in place of.
    """

    name: Other
    states: IntArray
    count: int = 1


def translate(
    start: WarmStart[Name],
    places: Mapping[Name, Sequence[VariableImage[Other]]],
    counts: Mapping[Name, int] | None = None,
) -> WarmStart[Other]:
    """A warm start in another problem's names. Variables without an image are dropped; coinciding edges are added.

    counts: multiplicity of each variable in this problem; None: one each.
    """
    counts = counts or {}
    moved: dict[tuple[Other, Other], tuple[FloatArray, FloatArray]] = {}
    for (a, b), (of_a, of_b) in start.moved.items():
        before = min(counts.get(a, 1), counts.get(b, 1))
        for one, other in product(places.get(a, ()), places.get(b, ())):
            part = min(one.count, other.count) / before
            ends = part * _take_known(of_a, one.states), part * _take_known(of_b, other.states)
            edge = one.name, other.name
            if edge[0] > edge[1]:
                edge, ends = edge[::-1], ends[::-1]
            previous = moved.get(edge)
            moved[edge] = ends if previous is None else (previous[0] + ends[0], previous[1] + ends[1])
    states: dict[Other, int] = {}
    for name, state in start.states.items():
        for place in places.get(name, ()):
            positions = np.flatnonzero(place.states == state)
            if len(positions):
                states[place.name] = int(positions[0])
    return WarmStart(moved=moved, states=states)


def positions_in(states: IntArray, count: int) -> IntArray:
    """Position in `states` of each of `count` states; -1 without one."""
    places = np.full(count, -1, np.int64)
    places[states] = np.arange(len(states))
    return places


def _take_known(costs: FloatArray, states: IntArray) -> FloatArray:
    return np.where(states >= 0, costs[states], np.nan)


def fill_unknown(costs: FloatArray) -> FloatArray:
    """`costs`, with the mean of the known ones in place of unknown ones."""
    is_known = np.isfinite(costs)
    if is_known.all():
        return costs
    return np.where(is_known, costs, costs[is_known].mean() if is_known.any() else 0.0)
