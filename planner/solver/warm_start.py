"""Where message passing begins: what another problem much like this one ended with, said in other names.

Whatever was moved from variables onto the edges of one problem may be moved in another: no assignment's sum changes. So
a start can save rounds of `dual`, and is never wrong.
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
    """moved: per edge (the smaller name first), what of the costs of either end's states was moved onto it, NaN for
    states of which nothing is known. states: of a good assignment, as far as one is known."""

    moved: Mapping[tuple[Name, Name], tuple[FloatArray, FloatArray]] = field(default_factory=dict)
    states: Mapping[Name, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class VariableImage(Generic[Other]):
    """A variable in another problem, which stands for the same one as a variable in this problem.

    states: what each of its states is in this problem, -1 for none of them. count: of how many equal variables that
    is so.
    """

    name: Other
    states: IntArray
    count: int = 1


def translate(
    start: WarmStart[Name],
    places: Mapping[Name, Sequence[VariableImage[Other]]],
    counts: Mapping[Name, int] | None = None,
) -> WarmStart[Other]:
    """A start in the names of another problem; what has no place there is left out, what falls together is added.

    counts: how many equal variables each stands for in this problem; None for one.
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
            known = moved.get(edge)
            moved[edge] = ends if known is None else (known[0] + ends[0], known[1] + ends[1])
    states: dict[Other, int] = {}
    for name, state in start.states.items():
        for place in places.get(name, ()):
            found = np.flatnonzero(place.states == state)
            if len(found):
                states[place.name] = int(found[0])
    return WarmStart(moved=moved, states=states)


def positions_in(states: IntArray, count: int) -> IntArray:
    """Of `count` states the place of each in `states`; -1 where it has none."""
    places = np.full(count, -1, np.int64)
    places[states] = np.arange(len(states))
    return places


def _take_known(costs: FloatArray, states: IntArray) -> FloatArray:
    return np.where(states >= 0, costs[states], np.nan)


def fill_unknown(costs: FloatArray) -> FloatArray:
    """`costs`; their mean where nothing is known."""
    known = np.isfinite(costs)
    if known.all():
        return costs
    return np.where(known, costs, costs[known].mean() if known.any() else 0.0)
