"""What neighbourhoods of plans on one mesh have in common: what is left to a variable, and what a segment poses there.

A descent takes a neighbourhood per axis and round, and a search for a plan that fits the memory descends at many
prices. Most of a plan is the same from one to the next, so what is left to most variables is, too: said by the same
objects here, it finds the strategies, and the problems of whole segments, that an earlier neighbourhood made.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardwright.planner.segments.dominator_cut import SegmentInstance
from shardwright.planner.segments.variables import Variable
from shardwright.planner.solver.pbqp import Problem
from shardwright.planner.solver.warm_start import WarmStart
from shardwright.planner.strategies.expansion import Restriction, Strategy

if TYPE_CHECKING:
    from shardwright.planner.segments.segment_chain import Key


@dataclass(slots=True, eq=False)
class NeighborhoodCache:
    """Of a graph, and of those that differ from it in nothing but what is left to the variables.

    problems: of kinds of segments, memory aside, as chains fill them in. ends: by the axes that are free, what was left
    to each variable in the last of them, and where message passing ended there (`descent`).
    """

    problems: dict[int, Problem] = field(default_factory=dict)
    saved_messages: dict[frozenset[str], tuple[Mapping[Variable, Restriction], WarmStart[Key]]] = field(
        default_factory=dict
    )
    _restrictions: dict[Hashable, Restriction] = field(default_factory=dict)
    _instances: dict[int, Sequence[SegmentInstance]] = field(default_factory=dict)
    _kinds: dict[Hashable, int] = field(default_factory=dict)

    def restriction(self, strategy: Strategy, free: frozenset[str]) -> Restriction:
        """What is left where some axes are free: the same object for strategies that do the same."""
        key = free, strategy, strategy.choices
        found = self._restrictions.get(key)
        if found is None:
            found = self._restrictions[key] = Restriction(strategy=strategy, free=free)
        return found

    def kind(self, instances: Sequence[SegmentInstance], instance: SegmentInstance, left: Sequence[Restriction]) -> int:
        """The kind of a segment by what is left to its variables: equal for those that pose the same problem there.

        instances: all segments, whose kinds tell them apart.
        """
        self._instances.setdefault(id(instances), instances)  # kept, so that its number stays its own
        return self._kinds.setdefault((id(instances), instance.kind, *map(id, left)), len(self._kinds))
