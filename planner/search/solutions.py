"""What the search finds: plans on single meshes, and what all meshes gave."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from shardwright.cost.peak.memory import LiveBuffer
from shardwright.errors import AnnotationError, MemoryBudgetError, PlanError
from shardwright.planner.memory.constraint import Multipliers
from shardwright.planner.memory.messages import TooLargeError
from shardwright.planner.plans.assemble import Decisions
from shardwright.planner.segments.segment_chain import Chain, ChainSolution
from shardwright.planner.warm_start.search_records import RematChoice
from shardwright.plans import Candidate, CostSummary, InstructionPlan, MemorySummary, VariablePlan
from shardwright.shardings import Mesh

if TYPE_CHECKING:
    from shardwright.planner.search.search import Search

#: Part of the step time that a mesh must save over one tried before it, which has fewer axes or more data
#: parallelism: less is no difference that the cost model could tell.
MIN_GAIN = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSolution:
    """The fastest plan on one mesh: its states, and what it costs but for what is made anew for readers.

    start: the plan on a coarser mesh from which it was descended, if it was.
    """

    mesh: Mesh
    step_s: float
    chain: Chain
    solution: ChainSolution
    notes: tuple[str, ...]
    coarse_solution: MeshSolution | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidatePlan:
    """A plan on one mesh, before it is bounded and written down.

    promised_s: seconds a step that the search took to run beside compute, for which there is none.
    start: the plan on a coarser mesh from which it was descended, if it was. relaxed: other searches on its mesh,
    whose bounds hold too. held: buffers that are live where it takes most. price_bound_s: no plan of the chain that
    fits the memory takes less; price: of memory, that bounds those; fastest: the chain's plan that does not fit.
    was_open: whether its first bound left too much open (`closing`). stored: the instruction and array leaf of all that
    is in memory at some time.
    """

    mesh: Mesh
    chain: Chain
    solution: ChainSolution
    decisions: Decisions
    cost: CostSummary
    notes: tuple[str, ...]
    instructions: tuple[InstructionPlan, ...]
    parameters: tuple[VariablePlan, ...]
    outputs: tuple[VariablePlan, ...]
    memory: MemorySummary
    live_buffers: tuple[LiveBuffer, ...] = ()
    dual_bound_s: float = 0.0
    multipliers: Multipliers | None = None
    unconstrained_solution: ChainSolution | None = None
    overlap_excess_s: float = 0.0
    coarse_solution: MeshSolution | None = None
    relaxed_solutions: tuple[MeshSolution, ...] = ()
    missed_target_gap: bool = False
    stored_leaves: frozenset[tuple[str, int]] = frozenset()

    @property
    def is_refined(self) -> bool:
        """Whether only what is near other plans was searched: then it is bounded by all strategies on its mesh. A
        mixture of two such plans is near none."""
        return bool(self.chain.graph.restrictions) or self.is_from_coarser_mesh

    @property
    def is_from_coarser_mesh(self) -> bool:
        """Whether it was descended to from a plan on another mesh."""
        return self.coarse_solution is not None and self.coarse_solution.mesh != self.mesh


@dataclass(slots=True, kw_only=True)
class SearchResult:
    """What planning one program on every mesh gave; a plan that fits, or why there is none.

    others: what planning the same program otherwise gave. notes: what else is to be said of that.
    plain: the outcome of the program as it is. entry: what of it this one computes otherwise.
    is_priced: whether all that was tried was fitted by a price of memory.
    """

    search: Search
    solutions: list[MeshSolution]
    mesh_errors: dict[Mesh, PlanError | AnnotationError]
    best_plan: CandidatePlan | None = None
    memory_error: MemoryBudgetError | None = None
    other_candidates: list[Candidate] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    base_result: SearchResult | None = None
    remat_choice: RematChoice | None = None
    used_multipliers: bool = False
    _plans: dict[int, CandidatePlan] = field(default_factory=dict)

    def evaluate(self, tried: MeshSolution) -> CandidatePlan:
        """The plan that was found on one of the meshes, memory aside; worked out once."""
        found = self._plans.get(id(tried))
        if found is None:
            made = self.search.evaluate(tried.chain, tried.solution, tried.notes)
            found = self._plans[id(tried)] = replace(made, coarse_solution=tried.coarse_solution)
        return found

    def add_memory_error(self, error: MemoryBudgetError) -> None:
        """Nothing fits that led to this error: of several the one is kept that needs least."""
        if self.memory_error is None or (
            isinstance(error, TooLargeError) and error.needed_bytes < self.min_needed_bytes
        ):
            self.memory_error = error

    @property
    def min_needed_bytes(self) -> float:
        """What a device must have for the refused plan that needs least; infinite where that is not known."""
        return self.memory_error.needed_bytes if isinstance(self.memory_error, TooLargeError) else math.inf

    def add_remaining_meshes(self, without: frozenset[Mesh]) -> SearchResult:
        """The outcome of a part of the meshes with what all others but those of `without` give."""
        search = self.search.without_restriction(
            without | {(each.coarse_solution or each).mesh for each in self.solutions}
        )
        try:
            others = search.search_meshes()
        except (PlanError, AnnotationError):  # there are none, or none gives anything
            return self
        tried, refusals = [*self.solutions, *others.solutions], {**self.mesh_errors, **others.mesh_errors}
        return replace(self, search=search, solutions=tried, mesh_errors=refusals, used_multipliers=False)

    @property
    def fastest(self) -> MeshSolution:
        """The fastest plan, memory aside."""
        return min(self.solutions, key=lambda each: each.step_s)

    @property
    def step_s(self) -> float:
        """Seconds a step of the plan that fits."""
        return math.inf if self.best_plan is None else self.best_plan.cost.step_s


@dataclass(slots=True)
class Incumbent:
    """The fastest plan so far that fits, of whatever variant of the program: what a deadline leaves.

    least: of the plans that do not fit the one that needs least, and the search that it is of.
    """

    search: Search | None = None
    best_plan: CandidatePlan | None = None
    smallest_infeasible: tuple[Search, CandidatePlan] | None = None

    def offer(self, search: Search, found: CandidatePlan) -> None:
        if self.best_plan is None or found.cost.step_s < self.best_plan.cost.step_s:
            self.search, self.best_plan = search, found

    def record_infeasible(self, search: Search, found: CandidatePlan) -> None:
        """A plan does not fit."""
        if self.smallest_infeasible is None or search.bytes_needed(found) < self.smallest_infeasible[0].bytes_needed(
            self.smallest_infeasible[1]
        ):
            self.smallest_infeasible = search, found

    def clear(self) -> None:
        """Let go of what is known: the search that it is of knows it in turn, and such a cycle would be left to the
        garbage collector."""
        self.search = self.best_plan = self.smallest_infeasible = None

    def is_faster_than(self, outcome: SearchResult) -> bool:
        return self.best_plan is not None and (
            outcome.best_plan is None or self.best_plan.cost.step_s < outcome.best_plan.cost.step_s * (1 - MIN_GAIN)
        )

    def to_result(self) -> SearchResult:
        assert self.search is not None
        return SearchResult(search=self.search, solutions=[], mesh_errors={}, best_plan=self.best_plan)
