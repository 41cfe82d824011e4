"""What the search finds: plans on single meshes, and what all meshes gave."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from shardwright.cost.peak.memory import Held
from shardwright.errors import AnnotationError, MemoryBudgetError, PlanError
from shardwright.planner.again.trails import Entry
from shardwright.planner.memory.budget import MemoryPrice
from shardwright.planner.memory.words import TooLargeError
from shardwright.planner.plans.assemble import Decisions
from shardwright.planner.segments.chain import Chain, SolvedChain
from shardwright.plans import Candidate, CostSummary, InstructionPlan, MemorySummary, VariablePlan
from shardwright.shardings import Mesh

if TYPE_CHECKING:
    from shardwright.planner.search.search import Search

#: Part of the step time that a mesh must save over one tried before it, which has fewer axes or more data
#: parallelism: less is no difference that the cost model could tell.
LEAST_GAIN = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """The fastest plan on one mesh: its states, and what it costs but for what is made anew for readers.

    start: the plan on a coarser mesh from which it was descended, if it was.
    """

    mesh: Mesh
    step_s: float
    chain: Chain
    solved: SolvedChain
    notes: tuple[str, ...]
    start: Tried | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
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
    solved: SolvedChain
    decisions: Decisions
    cost: CostSummary
    notes: tuple[str, ...]
    instructions: tuple[InstructionPlan, ...]
    parameters: tuple[VariablePlan, ...]
    outputs: tuple[VariablePlan, ...]
    memory: MemorySummary
    held: tuple[Held, ...] = ()
    price_bound_s: float = 0.0
    price: MemoryPrice | None = None
    fastest: SolvedChain | None = None
    promised_s: float = 0.0
    start: Tried | None = None
    relaxed: tuple[Tried, ...] = ()
    was_open: bool = False
    stored: frozenset[tuple[str, int]] = frozenset()

    @property
    def is_descended(self) -> bool:
        """Whether only what is near other plans was searched: then it is bounded by all strategies on its mesh. A
        mixture of two such plans is near none."""
        return bool(self.chain.graph.near) or self.is_from_another_mesh

    @property
    def is_from_another_mesh(self) -> bool:
        """Whether it was descended to from a plan on another mesh."""
        return self.start is not None and self.start.mesh != self.mesh


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What planning one program on every mesh gave; a plan that fits, or why there is none.

    others: what planning the same program otherwise gave. notes: what else is to be said of that.
    plain: the outcome of the program as it is. entry: what of it this one computes otherwise.
    is_priced: whether all that was tried was fitted by a price of memory.
    """

    search: Search
    tried: list[Tried]
    refusals: dict[Mesh, PlanError | AnnotationError]
    found: Found | None = None
    refusal: MemoryBudgetError | None = None
    others: list[Candidate] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    plain: Outcome | None = None
    entry: Entry | None = None
    is_priced: bool = False
    _plans: dict[int, Found] = field(default_factory=dict)

    def plan(self, tried: Tried) -> Found:
        """The plan that was found on one of the meshes, memory aside; worked out once."""
        found = self._plans.get(id(tried))
        if found is None:
            made = self.search.found(tried.chain, tried.solved, tried.notes)
            found = self._plans[id(tried)] = replace(made, start=tried.start)
        return found

    def refuse(self, error: MemoryBudgetError) -> None:
        """Nothing fits that led to this error: of several the one is kept that needs least."""
        if self.refusal is None or (isinstance(error, TooLargeError) and error.needed_bytes < self.least_bytes):
            self.refusal = error

    @property
    def least_bytes(self) -> float:
        """What a device must have for the refused plan that needs least; infinite where that is not known."""
        return self.refusal.needed_bytes if isinstance(self.refusal, TooLargeError) else math.inf

    def widened(self, without: frozenset[Mesh]) -> Outcome:
        """The outcome of a part of the meshes with what all others but those of `without` give."""
        search = self.search.off_route(without | {(each.start or each).mesh for each in self.tried})
        try:
            others = search.outcome()
        except (PlanError, AnnotationError):  # there are none, or none gives anything
            return self
        tried, refusals = [*self.tried, *others.tried], {**self.refusals, **others.refusals}
        return replace(self, search=search, tried=tried, refusals=refusals, is_priced=False)

    @property
    def fastest(self) -> Tried:
        """The fastest plan, memory aside."""
        return min(self.tried, key=lambda each: each.step_s)

    @property
    def step_s(self) -> float:
        """Seconds a step of the plan that fits."""
        return math.inf if self.found is None else self.found.cost.step_s


@dataclass(slots=True)
class Known:
    """The fastest plan so far that fits, of whatever variant of the program: what a deadline leaves.

    least: of the plans that do not fit the one that needs least, and the search that it is of.
    """

    search: Search | None = None
    found: Found | None = None
    least: tuple[Search, Found] | None = None

    def offer(self, search: Search, found: Found) -> None:
        if self.found is None or found.cost.step_s < self.found.cost.step_s:
            self.search, self.found = search, found

    def refuse(self, search: Search, found: Found) -> None:
        """A plan does not fit."""
        if self.least is None or search.needed_bytes(found) < self.least[0].needed_bytes(self.least[1]):
            self.least = search, found

    def forget(self) -> None:
        """Let go of what is known: the search that it is of knows it in turn, and such a cycle would be left to the
        garbage collector."""
        self.search = self.found = self.least = None

    def is_faster_than(self, outcome: Outcome) -> bool:
        return self.found is not None and (
            outcome.found is None or self.found.cost.step_s < outcome.found.cost.step_s * (1 - LEAST_GAIN)
        )

    def outcome(self) -> Outcome:
        assert self.search is not None
        return Outcome(search=self.search, tried=[], refusals={}, found=self.found)
