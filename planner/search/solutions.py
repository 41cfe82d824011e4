"""Search results: plans on single meshes, and the outcome over all meshes."""

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
from shardwright.plans.plan import Candidate, CostSummary, InstructionPlan, MemorySummary, VariablePlan
from shardwright.plans.shardings import Mesh

if TYPE_CHECKING:
    from shardwright.planner.search.search import Search


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSolution:
    """The fastest plan on one mesh.

    step_s: cost including the minimum of values recomputed per consumer, seconds.
    solution: its states.
    coarse_solution: the plan on a coarser mesh it was refined from, if any.
    """

    mesh: Mesh
    step_s: float
    chain: Chain
    solution: ChainSolution
    notes: tuple[str, ...]
    coarse_solution: MeshSolution | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidatePlan:
    """A plan on one mesh, before certification and assembly.

    dual_bound_s: lower bound on the chain's feasible plans, seconds.
    multipliers: memory multipliers of that bound.
    unconstrained_solution: the chain's fastest plan, over the budget.
    overlap_excess_s: assumed overlap beyond the available compute, seconds a step.
    coarse_solution: the plan on a coarser mesh it was refined from, if any.
    relaxed_solutions: other searches on its mesh with valid bounds.
    live_buffers: live at the memory peak.
    missed_target_gap: whether its first bound left too large a gap (`gap_closing`).
    stored_leaves: instruction and array leaf of every value in memory at some time.
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
        """Whether only the neighborhood of other plans was searched: its bound is over all strategies of the mesh. A
        mixture of two such plans is near neither."""
        return bool(self.chain.graph.restrictions) or self.is_from_coarser_mesh

    @property
    def is_from_coarser_mesh(self) -> bool:
        """Whether it was refined from a plan on another mesh."""
        return self.coarse_solution is not None and self.coarse_solution.mesh != self.mesh


@dataclass(slots=True, kw_only=True)
class SearchResult:
    """Result of planning one program on every mesh: a feasible plan, or the reason of its absence.

    memory_error: the refusal needing least memory.
    other_candidates: results of variants of the program.
    notes: remarks on these.
    base_result: result of the unchanged program.
    remat_choice: the variant planned here.
    used_multipliers: whether all solutions were fitted with a memory multiplier.
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
    _steps_s: dict[int, float] = field(default_factory=dict)

    def evaluate(self, solution: MeshSolution) -> CandidatePlan:
        """The evaluated plan of a solution, memory aside; cached."""
        plan = self._plans.get(id(solution))
        if plan is None:
            candidate = self.search.evaluate(solution.chain, solution.solution, solution.notes)
            plan = self._plans[id(solution)] = replace(candidate, coarse_solution=solution.coarse_solution)
        return plan

    def improve(self, solution: MeshSolution, plan: CandidatePlan) -> None:
        """Take a better plan for a solution's: its gap was closed."""
        self._plans[id(solution)] = plan

    def predict_step_s(self, solution: MeshSolution) -> float:
        """Seconds a step of a solution's plan: what `evaluate` gives, without the memory; cached."""
        plan = self._plans.get(id(solution))
        if plan is not None:
            return plan.cost.step_s
        if id(solution) not in self._steps_s:
            self._steps_s[id(solution)] = self.search.predict_step_s(solution)
        return self._steps_s[id(solution)]

    def add_memory_error(self, error: MemoryBudgetError) -> None:
        """Record a memory error; the one needing least memory is kept."""
        if self.memory_error is None or (
            isinstance(error, TooLargeError) and error.needed_bytes < self.min_needed_bytes
        ):
            self.memory_error = error

    @property
    def min_needed_bytes(self) -> float:
        """Device memory of the least refused plan, bytes; infinite when unknown."""
        return self.memory_error.needed_bytes if isinstance(self.memory_error, TooLargeError) else math.inf

    def add_remaining_meshes(self, without: frozenset[Mesh]) -> SearchResult:
        """The result extended to all other meshes outside `without`."""
        search = self.search.without_restriction(
            without | {(solution.coarse_solution or solution).mesh for solution in self.solutions}
        )
        try:
            others = search.search_meshes()
        except (PlanError, AnnotationError):  # no mesh left, or none with a plan
            return self
        solutions, refusals = [*self.solutions, *others.solutions], {**self.mesh_errors, **others.mesh_errors}
        return replace(self, search=search, solutions=solutions, mesh_errors=refusals, used_multipliers=False)

    @property
    def fastest(self) -> MeshSolution:
        """The fastest solution, memory aside."""
        return min(self.solutions, key=lambda solution: solution.step_s)

    @property
    def step_s(self) -> float:
        """Seconds a step of the feasible plan; infinite without one."""
        return math.inf if self.best_plan is None else self.best_plan.cost.step_s


@dataclass(slots=True)
class Incumbent:
    """The fastest feasible plan so far, of any variant: the result at a deadline.

    search: the search it belongs to.
    best_plan: the plan.
    smallest_infeasible: the infeasible plan needing least memory, with its search.
    """

    search: Search | None = None
    best_plan: CandidatePlan | None = None
    smallest_infeasible: tuple[Search, CandidatePlan] | None = None

    def offer(self, search: Search, plan: CandidatePlan) -> None:
        if self.best_plan is None or plan.cost.step_s < self.best_plan.cost.step_s:
            self.search, self.best_plan = search, plan

    def record_infeasible(self, search: Search, plan: CandidatePlan) -> None:
        """Record an infeasible plan."""
        if self.smallest_infeasible is None or search.bytes_needed(plan) < self.smallest_infeasible[0].bytes_needed(
            self.smallest_infeasible[1]
        ):
            self.smallest_infeasible = search, plan

    def clear(self) -> None:
        """Drop all references: incumbent and search refer to each other, a cycle left to the garbage collector."""
        self.search = self.best_plan = self.smallest_infeasible = None

    def is_faster_than(self, outcome: SearchResult) -> bool:
        return self.best_plan is not None and (
            outcome.best_plan is None or self.best_plan.cost.step_s < outcome.step_s * (1 - outcome.search.min_gain)
        )

    def to_result(self) -> SearchResult:
        assert self.search is not None
        return SearchResult(search=self.search, solutions=[], mesh_errors={}, best_plan=self.best_plan)
