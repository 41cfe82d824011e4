"""The whole search with one of its mechanisms switched off.

The planner has no switches: `AblatedSearch` overrides the methods of a mechanism.

exact fit       one integer program over a small program, bytes as rows (`memory/ilp_with_memory_rows`)
merging         plans merged into one by an integer program over their strategies (`memory/restricted_master`)
multipliers     a multiplier for each memory peak; off: all peaks share one (`memory/cutting_planes`)
branching       branch and bound on the bytes of one value (`search/branching`)
neighborhoods   descents to three axes, and by blocks of them; off: meshes of two axes (`segments/descent`,
                `search/local_search`)
closing         a better bound and plan on three axes until the gap is 1 %, branching included (`search/gap_closing`)
experts         hand-written layouts, compared with the search's plan (`search/experts`)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from shardwright.clusters.cluster import Cluster
from shardwright.options.plan_options import PlanOptions
from shardwright.planner.clock import Clock
from shardwright.planner.memory.lagrangian import LagrangianSearch
from shardwright.planner.search.branching import Branch
from shardwright.planner.search.search import Search
from shardwright.planner.search.solutions import CandidatePlan, MeshSolution, SearchResult
from shardwright.planner.segments.segment_chain import Chain
from shardwright.planner.solver.tuning import MAX_CPU_S
from shardwright.planner.warm_start.search_records import SearchHistory
from shardwright.plans.plan import Plan

T = TypeVar("T")

MECHANISMS = ("exact fit", "merging", "multipliers", "branching", "neighborhoods", "closing", "experts")


@dataclass(slots=True)
class CpuClock(Clock):
    """A deadline in CPU seconds: other work on the machine does not shorten the search."""

    _start_s: float = field(default_factory=time.process_time)

    @property
    def elapsed_s(self) -> float:
        return time.process_time() - self._start_s


class _AblatedFit(LagrangianSearch):
    """A Lagrangian search of an `AblatedSearch`."""

    search: AblatedSearch

    def solve_exactly(self) -> CandidatePlan | None:
        return self.search.take("exact fit", None, super().solve_exactly)

    def iterate_merges(
        self, plans: Sequence[CandidatePlan], best: CandidatePlan, most_of_all: int = 1, most_cpu_s: float = MAX_CPU_S
    ) -> Iterator[CandidatePlan]:
        merges = super().iterate_merges(plans, best, most_of_all, most_cpu_s)
        while (merged := self.search.take("merging", None, partial(next, merges, None))) is not None:
            yield merged


class AblatedSearch(Search):
    """A search without one mechanism.

    off: the mechanism; "" for none.
    spent_s: CPU seconds of each used mechanism, nested ones included.
    """

    lagrangian_search = _AblatedFit

    def __init__(
        self,
        off: str,
        hlo: str,
        cluster: Cluster,
        options: PlanOptions,
        *,
        history: SearchHistory | None = None,
    ) -> None:
        super().__init__(hlo, cluster, options, None, history, CpuClock(options.deadline_s))
        self.off = off
        self.spent_s: dict[str, float] = {}

    def run(self) -> Plan:
        try:
            return super().run()
        finally:
            self.background_bound.cancel()

    def take(self, mechanism: str, otherwise: T, work: Callable[[], T]) -> T:
        """Time a mechanism's work and return its result; `otherwise` without work if it is off."""
        if mechanism == self.off:
            return otherwise
        start_s = time.process_time()
        try:
            return work()
        finally:
            self.spent_s[mechanism] = self.spent_s.get(mechanism, 0.0) + time.process_time() - start_s

    def refine_multipliers(self, plan: CandidatePlan) -> CandidatePlan:
        return self.take("multipliers", plan, partial(super().refine_multipliers, plan))

    def refine_over_all_strategies(self, plan: CandidatePlan, chain: Chain) -> CandidatePlan:
        return self.take("multipliers", plan, partial(super().refine_over_all_strategies, plan, chain))

    def branch_and_bound(self, incumbent: CandidatePlan, root: Branch, most_open: float) -> CandidatePlan:
        return self.take("branching", incumbent, partial(super().branch_and_bound, incumbent, root, most_open))

    def block_coordinate_descent(self, incumbent: CandidatePlan, most_open: float, *, together: int) -> CandidatePlan:
        work = partial(super().block_coordinate_descent, incumbent, most_open, together=together)
        return self.take("neighborhoods", incumbent, work)

    def _refine_solutions(self, solutions: Sequence[MeshSolution]) -> list[MeshSolution]:
        return self.take("neighborhoods", [], partial(super()._refine_solutions, solutions))

    def close_gap(self, incumbent: CandidatePlan, bounding: Chain) -> CandidatePlan:
        return self.take("closing", incumbent, partial(super().close_gap, incumbent, bounding))

    def _start_pricing_experts(self) -> None:
        self.take("experts", None, super()._start_pricing_experts)

    def _compare_with_experts(self, outcome: SearchResult) -> None:
        self.take("experts", None, partial(super()._compare_with_experts, outcome))
