"""Common parts of plans' neighbourhoods on one mesh: restrictions of variables, problems of segments.

A descent builds a neighbourhood per axis and round, and a memory-constrained search descends at many multipliers. Most
of a plan is unchanged from one to the next, and most restrictions are, too: identical objects here lead to the
strategies, and the problems of whole segments, of an earlier neighbourhood.
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
    """The cache of a graph, shared with graphs that differ in restrictions alone.

    problems: of kinds of segments, without memory, filled in by chains.
    saved_messages: free axes → the last restrictions with them, and the last messages there (`descent`).
    """

    problems: dict[int, Problem] = field(default_factory=dict)
    saved_messages: dict[frozenset[str], tuple[Mapping[Variable, Restriction], WarmStart[Key]]] = field(
        default_factory=dict
    )
    _restrictions: dict[Hashable, Restriction] = field(default_factory=dict)
    _instances: dict[int, Sequence[SegmentInstance]] = field(default_factory=dict)
    _kinds: dict[Hashable, int] = field(default_factory=dict)

    def restriction(self, strategy: Strategy, free: frozenset[str]) -> Restriction:
        """The restriction to a strategy with some axes free: the same object for equal strategies."""
        key = free, strategy, strategy.choices
        restriction = self._restrictions.get(key)
        if restriction is None:
            restriction = self._restrictions[key] = Restriction(strategy=strategy, free=free)
        return restriction

    def kind(
        self, instances: Sequence[SegmentInstance], instance: SegmentInstance, restrictions: Sequence[Restriction]
    ) -> int:
        """The kind of a segment under its variables' restrictions: equal for equal problems.

        instances: all segments; their kinds distinguish them.
        """
        self._instances.setdefault(id(instances), instances)  # kept alive: its id stays unique
        return self._kinds.setdefault((id(instances), instance.kind, *map(id, restrictions)), len(self._kinds))
