"""The search: every candidate mesh is planned, the fastest plan is kept."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial

from shardwright.clusters.cluster import Cluster
from shardwright.cost.profiles import host_limit_bytes
from shardwright.errors import AnnotationError, MemoryBudgetError, PlanError
from shardwright.hlo import Module
from shardwright.options.plan_options import PlanOptions
from shardwright.planner.clock import Clock, OutOfTimeError, too_short_error
from shardwright.planner.constraints.carried import CarriedPlan
from shardwright.planner.gc_pause import gc_paused
from shardwright.planner.graph.source import Source
from shardwright.planner.limits import SearchLimits
from shardwright.planner.memory.constraint import BranchingBound
from shardwright.planner.memory.messages import note_deadline, too_large_error
from shardwright.planner.memory.recompute import Recomputation
from shardwright.planner.memory.tuning import HOPELESS_RATIO, MULTIPLIER_GAP
from shardwright.planner.mixtures import Blocks, list_blocks
from shardwright.planner.parallel import ForkedFuture
from shardwright.planner.plans.axis_names import name_axes
from shardwright.planner.plans.verify import check_plan
from shardwright.planner.search.alternative_meshes import alternative_mesh_groups, suggest_other_mesh
from shardwright.planner.search.blocks import choose_blocks
from shardwright.planner.search.branching import Branch, branch_and_bound
from shardwright.planner.search.candidates import list_candidates
from shardwright.planner.search.certify import BackgroundBound, assemble_plan, bound_plan, remove_idle_views
from shardwright.planner.search.dual_bound import tighten_dual_bound
from shardwright.planner.search.experts import (
    EXPERTS,
    FASTER_THAN_SEARCH,
    experts_for,
    find_faster_expert,
    find_first_plan,
    price_experts,
)
from shardwright.planner.search.feasibility import check_state_fits
from shardwright.planner.search.gap_closing import close_gap
from shardwright.planner.search.local_search import block_coordinate_descent
from shardwright.planner.search.memory_tradeoffs import fit_with_remat
from shardwright.planner.search.mesh_search import Listener, MeshSearch
from shardwright.planner.search.meshes import meshes_to_search, refines
from shardwright.planner.search.min_memory_plan import find_fallback_plan
from shardwright.planner.search.multiplier_refinement import refine_multipliers, refine_over_all_strategies
from shardwright.planner.search.overlap_cap import enforce_overlap_cap
from shardwright.planner.search.primal_recovery import fit_over_all_strategies
from shardwright.planner.search.program import Program
from shardwright.planner.search.replicated import choose_first_plan, replicate_if_faster
from shardwright.planner.search.simplest import choose_simplest, find_promising_plan, is_preferable
from shardwright.planner.search.solutions import CandidatePlan, Incumbent, MeshSolution, SearchResult
from shardwright.planner.search.tuning import MAX_DESCENTS, MAX_ROUNDS_IF_LARGE, MAX_SEARCHED_AXES, MIN_GAIN
from shardwright.planner.segments.descent import descend, lift_plan
from shardwright.planner.segments.segment_chain import Chain, ChainSolution
from shardwright.planner.solver.tuning import TIGHT
from shardwright.planner.tuning import EXACT_RANK
from shardwright.planner.warm_start.replanning import SearchRestriction, replan, save_record, warm_start_chain
from shardwright.planner.warm_start.search_records import SearchHistory, SearchQuery, SearchRecord
from shardwright.plans.plan import Candidate, Plan
from shardwright.plans.shardings import Mesh


def plan(
    hlo: str | Module | Source,
    cluster: Cluster,
    options: PlanOptions | None = None,
    *,
    progress: Listener | None = None,
    history: SearchHistory | None = None,
    clock: Clock | None = None,
    limits: SearchLimits = SearchLimits(),
    carried: CarriedPlan | None = None,
) -> Plan:
    """Plan one HLO module on a cluster.

    hlo: HLO text, a parsed module or both.
    options: without `options.mesh`, all factorizations of the device count into one or two axes are tried (three with
        `effort="best"`); equivalent ones once.
    progress: called during planning.
    history: records of earlier searches; this search may follow one and adds its own.
    clock: measures the deadline; None starts one now.
    limits: how far the search goes.
    carried: an earlier plan whose decisions stay; with `options.mesh`.

    Raises HloSyntaxError on text other than HLO, OptionError on options unfit to the program or cluster,
    AnnotationError on impossible pins, PlanError on contradicting pins, MemoryBudgetError when no plan fits the devices
    or none was found in time, OutOfTimeError when the deadline is too short to find any.
    """
    with gc_paused():
        options = options or PlanOptions()
        clock = clock or Clock(options.deadline_s)
        try:
            search = Search(hlo, cluster, options, progress, history, clock, limits=limits, carried=carried)
        except OutOfTimeError:
            raise too_short_error(clock) from None
        blocks = list_blocks(search.program.mixtures, cluster, options) if search.may_block else []
        if not blocks:
            return search.run_and_clear()
        return choose_blocks(search, blocks)


class Search(MeshSearch):
    """One call of `plan`: selects meshes and variants, and chooses the plan."""

    def __init__(
        self,
        hlo: str | Module | Source,
        cluster: Cluster,
        options: PlanOptions,
        progress: Listener | None = None,
        history: SearchHistory | None = None,
        clock: Clock | None = None,
        *,
        limits: SearchLimits = SearchLimits(),
        carried: CarriedPlan | None = None,
        blocks: Blocks | None = None,
    ) -> None:
        super().__init__(hlo, cluster, options, progress, clock, limits=limits, carried=carried, blocks=blocks)
        self.history = history
        self.query = SearchQuery.of(self.program.original, cluster, options) if history is not None else None
        self.record: SearchRecord | None = None
        self.restriction: SearchRestriction | None = None
        self.restricted_results: list[SearchResult] = []  # results of an abandoned record under a binding memory budget
        self.incumbent = Incumbent()
        self.background_bound = BackgroundBound()
        self.base_solutions: dict[Mesh, MeshSolution] = {}
        self.fallback_result: SearchResult | None = None  # minimum-memory plan, once built
        self.warm_start_notes: dict[Mesh, str] = {}
        self.expert_costs: dict[tuple[str, Mesh], Candidate] = {}
        self.expert_misfits: set[tuple[str, Mesh]] = set()  # those whose plans were built and do not fit the memory
        self.expert_solutions: dict[tuple[Program, float, str, Mesh], MeshSolution] = {}
        self.background_experts: ForkedFuture[dict[tuple[str, Mesh], Candidate]] | None = None
        self.gap_tolerance = 0.0  # relative gap of each mesh's solution
        self.excluded_meshes = frozenset[Mesh]()

    @property
    def may_block(self) -> bool:
        """Whether mixtures may be planned in blocks: no other option says how."""
        is_named = isinstance(self.options.force, str)
        return self.options.mode == "search" and not is_named

    def with_blocks(self, blocks: Blocks) -> Search:
        """The search of the program with its mixtures in blocks, in the time left."""
        return Search(
            self.program.original, self.cluster, self.options, self._progress,
            clock=self.clock.renew(interrupts=True), limits=self.limits, carried=self.carried, blocks=blocks,
        )  # fmt: skip

    def run_and_clear(self) -> Plan:
        """`run`, and the end of what goes on beside it."""
        try:
            return self.run()
        finally:
            self.incumbent.clear()
            self.background_bound.cancel()
            if self.background_experts is not None:
                self.background_experts.cancel()

    def run(self) -> Plan:
        is_whole = False
        try:
            check_state_fits(self)
            outcome = self._search_from_record()
            if outcome is None:
                outcome = self._search_all()
                is_whole = not self.clock.is_expired
            self._compare_with_replicated(outcome)
        except OutOfTimeError:
            if self.incumbent.best_plan is None and self.clock.is_interrupted:
                self._find_plan_after_all()
            if self.incumbent.best_plan is None:
                raise self._deadline_error() from None
            outcome = self.incumbent.to_result()
        self.clock.may_stop, self.clock.is_final = False, True
        if self.incumbent.is_faster_than(outcome):
            outcome.search, outcome.best_plan, is_whole = self.incumbent.search or self, self.incumbent.best_plan, False
        if outcome.best_plan is not None:
            outcome.best_plan = choose_simplest(outcome)
            # An expert's plan is no starting point; a record says nothing of state on the host.
            is_whole = is_whole and not outcome.best_plan.cost.bound_scope and not outcome.search.chose_offload
        final_plan = outcome.search.finish(outcome)
        if is_whole:
            save_record(self, outcome)
        return name_axes(final_plan) if self._names_axes else final_plan

    @property
    def _names_axes(self) -> bool:
        """Whether no axis has a name by the user: then names are the planner's to give."""
        options = self.options
        is_free = options.mesh is None and options.force is None and not self.program.pins
        return is_free and options.mode == "search" and self.carried is None

    def _search_from_record(self) -> SearchResult | None:
        """Result of following an earlier search's record; None without one leading to an equally good plan."""
        may_follow = self.options.mode == "search" and self.options.effort == "default" and self.options.remat != "full"
        if self.history is None or self.query is None or not may_follow:
            return None
        record = self.record = self.history.find_best(self.query)
        if record is None:
            return None
        if self.clock.is_hurried:
            self._find_first_plan()
            self.clock.check()
        return replan(self, record)

    def _search_all(self) -> SearchResult:
        """Result of the unrestricted search."""
        self._find_first_plan()
        self.clock.check()
        self._start_pricing_experts()
        outcome = fit_with_remat(self.search_meshes())
        outcome = outcome if self.is_fast else enforce_overlap_cap(outcome)
        self._compare_with_experts(outcome)
        return outcome

    def _solve_chain(self, chain: Chain, close: float) -> ChainSolution:
        """Solve a chain, message passing warm-started from an earlier search's record. Following a record of a large
        program, a plan within the cost model's resolution suffices."""
        warm_start_chain(self, chain)
        follows_far = self.restriction is not None and self.is_large
        return super()._solve_chain(chain, max(close, MIN_GAIN) if follows_far else close)

    def _find_first_plan(self) -> None:
        """Find a first plan at once. Skipped under a forced strategy, and without a hurry when it takes a
        considerable part of the search."""
        is_hurried = self.clock.is_hurried
        is_dear = self.is_large or self.is_fast
        if not self.is_unforced or self.incumbent.best_plan is not None or (is_dear and not is_hurried):
            return
        first = find_first_plan(self)
        candidate = choose_first_plan(self, first)
        if candidate is not None:
            self.offer(candidate)
        else:  # the minimum-memory plan waits until needed, except under a deadline
            self.fallback_result = self._find_fallback_plan(first) if is_hurried else None
            candidate = self.fallback_result.best_plan if self.fallback_result is not None else None
        if candidate is not None:
            self._incumbent_s = candidate.cost.step_s
            self.report("search", str(candidate.mesh))

    def _find_fallback_plan(self, plain: CandidatePlan | None) -> SearchResult | None:
        """`find_fallback_plan`, with the optimizer's state on the host where nothing fits otherwise."""
        state = self.offloadable_state
        has_room = self.program.state_bytes <= self.cluster.device_count * self.limit_bytes
        result = find_fallback_plan(self, plain) if has_room or not state else None
        if not state or (result is not None and result.best_plan is not None):
            return result
        offloaded = find_fallback_plan(self.with_state_on_host(state))
        return offloaded if offloaded is not None and offloaded.best_plan is not None else result

    def _find_plan_after_all(self) -> None:
        """Of a search that had none when it was interrupted: an expert's plan takes seconds, and the user waits."""
        self.clock.is_final = True  # nothing ends it but another interruption
        self._find_first_plan()

    def _start_pricing_experts(self) -> None:
        """Price experts' plans of a large program on a second core, unless in a hurry. Small programs need no
        second core."""
        names = experts_for(self) if self.is_unforced and self.is_large and not self.clock.is_hurried else ()
        if names:
            self.background_experts = ForkedFuture(partial(price_experts, self, names))

    def _compare_with_experts(self, outcome: SearchResult) -> None:
        """Offer an expert's plan when it beats the search's. Large programs try a few experts only, unless the search
        found no plan."""
        if not self.is_unforced:
            return
        if self.background_experts is not None and not self.must_stop():
            self.expert_costs |= self.background_experts.result()
        names = experts_for(self) if outcome.best_plan is not None else tuple(EXPERTS)
        expert_plan = find_faster_expert(self, outcome.step_s * (1 - self.min_gain), names)
        if expert_plan is not None:
            self.offer(expert_plan)

    def _compare_with_replicated(self, outcome: SearchResult) -> None:
        """Offer the fully replicated program when it beats the incumbent."""
        is_known = self.incumbent.is_faster_than(outcome)
        search, best_plan = (
            (self.incumbent.search, self.incumbent.best_plan) if is_known else (outcome.search, outcome.best_plan)
        )
        if self.is_unforced and search is not None and best_plan is not None:
            whole = replicate_if_faster(search, best_plan, FASTER_THAN_SEARCH)
            if whole is not None:
                search.offer(whole)

    @property
    def is_unforced(self) -> bool:
        return self.options.force is None and self.options.mode == "search" and self.carried is None

    def search_variant(
        self, again: Recomputation | None, micro_batches: int, without: frozenset[Mesh] = frozenset()
    ) -> SearchResult:
        """Result of a variant (rematerialization, micro-batches) on all meshes outside `without`; plans are solved to a
        tolerance (see `polish`). Raises MicroBatchError, and the errors of `search_meshes`."""
        variant = self.for_variant(again, micro_batches)
        variant.gap_tolerance, variant.excluded_meshes = MULTIPLIER_GAP, without
        return variant.search_meshes()

    def with_state_on_host(self, state: Mapping[int, int]) -> Search:
        """The search of the program with these arguments on the host; of its own, but for the incumbent."""
        self.report("rewrite", f"{len(state)} arrays of the optimizer on the host")
        variant = copy(self)
        variant.program = self.program.with_state_on_host(state)
        variant.flow, variant.recomputation = variant.program.flow, None
        variant.gap_tolerance, variant.excluded_meshes = MULTIPLIER_GAP, frozenset()
        variant.restriction, variant.restricted_results, variant.fallback_result = None, [], None
        return variant

    def is_variant(self, again: Recomputation | None, micro_batches: int) -> bool:
        """Whether this search plans the given variant."""
        return (self.recomputation, self.program.micro_batches) == (again, micro_batches)

    def without_restriction(self, without: frozenset[Mesh]) -> Search:
        """The same search without restriction, on all meshes outside `without`."""
        unrestricted = copy(self)
        unrestricted.restriction, unrestricted.excluded_meshes = None, without
        return unrestricted

    def for_variant(self, again: Recomputation | None, micro_batches: int) -> Search:
        """The search of a variant of the program. Raises MicroBatchError."""
        self.report("rewrite", f"{len(again.instructions) if again else 0} again, {micro_batches} micro-batches")
        variant = copy(self)
        variant.program = self.program.rewrite_variant(again, micro_batches)
        variant.flow, variant.recomputation = variant.program.flow, again
        return variant

    def search_meshes(self) -> SearchResult:
        """Solutions of all meshes, memory aside. Raises PlanError or AnnotationError when no mesh has one."""
        finest = self.three_axis_meshes() if self.refines_to_three_axes else []
        if len(finest) == 1:
            self.start_bounding(finest[0])
        solutions, refusals = self._solve_meshes(self._select_meshes())
        for group in alternative_mesh_groups(self) if not solutions else ():
            solutions, more = self._solve_meshes([mesh for mesh in group if mesh not in refusals])
            refusals |= more
            if solutions:
                break
        if not solutions:
            late = (refusal for refusal in refusals.values() if isinstance(refusal, OutOfTimeError))
            error = next(late, None) or next(iter(refusals.values()), PlanError("no mesh can be planned"))
            raise suggest_other_mesh(self, error)
        solutions += self._refine_solutions(solutions)
        fastest = min(solutions, key=lambda solution: solution.step_s)
        if fastest.coarse_solution is not None:
            self.start_bounding(fastest.mesh)
        elif fastest.chain.runs and self.is_base_variant and not self.is_fast:
            self.background_bound.start(fastest.chain, self.time_limit_s())
        return SearchResult(search=self, solutions=solutions, mesh_errors=refusals)

    @property
    def is_base_variant(self) -> bool:
        """Whether this is the program's first search, usually the only one."""
        is_as_written = self.recomputation is None and self.program.micro_batches == 1 and not self.chose_offload
        return is_as_written and self.hidden_share == 1.0

    @property
    def may_offload(self) -> bool:
        """Whether optimizer state may go to the host, and is not there yet."""
        options, host = self.options, self.profile.host
        is_free = options.offload == "auto" and options.rewrites != "none" and self.carried is None
        has_host = host is not None and math.isfinite(host.to_device_bytes_per_s)
        return is_free and has_host and not self.program.on_host

    @property
    def offloadable_state(self) -> Mapping[int, int]:
        """Arguments of the optimizer that may go to the host, with their outputs; none where the hosts' memory has no
        room for all of them."""
        if not self.may_offload:
            return {}
        room = self.cluster.device_count * host_limit_bytes(self.cluster, self.profile)
        return self.program.optimizer_state if self.program.optimizer_state_bytes <= room else {}

    def start_bounding(self, mesh: Mesh, rank: int = EXACT_RANK) -> None:
        """Start bounding all plans on a three-axis mesh, the likely mesh of the final plan.

        rank: moves of arrays with up to `rank` dimensions are followed exactly.
        """
        if self.is_base_variant and self.background_bound.chain_on(mesh, self.flow) is None:
            chain = self.build_bounding_chain(mesh)
            chain = chain if rank == EXACT_RANK else self.with_exact_moves(chain, rank)
            self.background_bound.start(chain, self.time_limit_s())

    def fit_memory(self, outcome: SearchResult, *, at_once: bool = False, below_s: float = math.inf) -> bool:
        """Find the fastest plan within the memory budget; returns whether one exists.

        at_once: try only the fastest plan of each mesh.
        below_s: plans at or above this step time are useless.
        """
        candidate = self._choose_plan(outcome, at_once, below_s)
        coarser = self._coarser_mesh(candidate) if candidate is not None else None
        if coarser is not None:
            outcome.solutions.append(self.solve_mesh(coarser))
            candidate = self._choose_plan(outcome, at_once, below_s)
        outcome.best_plan = candidate
        return candidate is not None

    def polish(self, outcome: SearchResult) -> None:
        """Solve the result's plan to optimality when its variant was solved to a tolerance only."""
        candidate = outcome.best_plan
        is_done = not self.gap_tolerance or self.is_large or self.is_fast or self.must_stop()
        if candidate is None or candidate.multipliers is not None or is_done:
            return
        solved = candidate.solution
        if solved.value - solved.tied_bound <= TIGHT * abs(solved.value):
            return
        solved = candidate.chain.solve(self.time_limit_s())
        polished_plan = replace(
            self.evaluate(candidate.chain, solved, candidate.notes), coarse_solution=candidate.coarse_solution
        )
        if polished_plan.cost.step_s < candidate.cost.step_s and self.fits(polished_plan):
            outcome.best_plan = polished_plan

    def finish(self, outcome: SearchResult) -> Plan:
        """The plan of a result, bounded and checked. MemoryBudgetError without one."""
        if outcome.best_plan is None:
            raise (
                self._deadline_error()
                if self.clock.is_expired
                else outcome.memory_error or PlanError("no mesh can be planned")
            )
        finished_plan = None if self.is_fast else self._finish_promising_plan(outcome, outcome.best_plan)
        if finished_plan is not None:
            self._reported_plan = outcome.best_plan = finished_plan
            checked_plan = self._build_checked_plan(finished_plan, outcome)
            return replace(checked_plan, planning_s=self.clock.elapsed_s)
        self._reported_plan = tightened_plan = (
            outcome.best_plan if self.is_fast else tighten_dual_bound(self, outcome.best_plan)
        )
        checked_plan = self._build_checked_plan(tightened_plan, outcome)  # a second core computes the bound meanwhile
        self._reported_plan = outcome.best_plan = best = bound_plan(self, tightened_plan, self.background_bound)
        self.report("check", str(best.mesh))
        checked_plan = (
            replace(checked_plan, cost=best.cost)
            if best.decisions is tightened_plan.decisions
            else self._build_checked_plan(best, outcome)
        )
        return replace(checked_plan, planning_s=self.clock.elapsed_s)

    def _finish_promising_plan(self, outcome: SearchResult, chosen: CandidatePlan) -> CandidatePlan | None:
        """The promising plan bounded, its gap closed, when it is preferable to the chosen one then; else None."""
        plan = find_promising_plan(outcome)
        if plan is None:
            return None
        plan = bound_plan(self, tighten_dual_bound(self, plan), self.background_bound)
        outcome.improve(outcome.fastest, plan)
        return plan if is_preferable(plan, chosen, self.simplicity_tolerance) else None

    # ---- steps that improve the plan while it is bounded; each returns the plan it was given or a better one

    def close_gap(self, incumbent: CandidatePlan, bounding: Chain) -> CandidatePlan:
        """See `gap_closing`. bounding: the chain of the plan's bound."""
        return close_gap(self, incumbent, bounding)

    def block_coordinate_descent(self, incumbent: CandidatePlan, most_open: float, *, together: int) -> CandidatePlan:
        """See `local_search`."""
        return block_coordinate_descent(self, incumbent, most_open, together=together)

    def branch_and_bound(self, incumbent: CandidatePlan, root: Branch, most_open: float) -> CandidatePlan:
        """See `branching`."""
        return branch_and_bound(self, incumbent, root, most_open)

    def fit_over_all_strategies(
        self, incumbent: CandidatePlan, chain: Chain, assignment: ChainSolution, within: tuple[BranchingBound, ...] = ()
    ) -> CandidatePlan:
        """See `primal_recovery`."""
        return fit_over_all_strategies(self, incumbent, chain, assignment, within)

    def refine_multipliers(self, plan: CandidatePlan) -> CandidatePlan:
        """See `multiplier_refinement`."""
        return refine_multipliers(self, plan)

    def refine_over_all_strategies(self, plan: CandidatePlan, chain: Chain) -> CandidatePlan:
        """See `multiplier_refinement`."""
        return refine_over_all_strategies(self, plan, chain)

    def _deadline_error(self) -> PlanError:
        """The error of a search ended by the deadline, with the smallest memory need found."""
        if self.incumbent.smallest_infeasible is None:
            return too_short_error(self.clock)
        return note_deadline(too_large_error(*self.incumbent.smallest_infeasible), self.clock)

    def _build_checked_plan(self, plan: CandidatePlan, outcome: SearchResult) -> Plan:
        """Assemble and check the plan of a result."""
        checked_plan = assemble_plan(self, plan, (*list_candidates(outcome, plan), *outcome.other_candidates))
        checked_plan = replace(checked_plan, notes=(*checked_plan.notes, *outcome.notes))
        module, checked_plan = remove_idle_views(self, checked_plan)
        check_plan(module, checked_plan)
        return checked_plan

    def _solve_meshes(
        self, meshes: Sequence[Mesh]
    ) -> tuple[list[MeshSolution], dict[Mesh, PlanError | AnnotationError]]:
        """The fastest plan per mesh, memory aside, in mesh order; and the errors of the other meshes."""
        solutions: list[MeshSolution] = []
        refusals: dict[Mesh, PlanError | AnnotationError] = {}
        for mesh in meshes:
            if mesh in self.excluded_meshes:
                continue
            if self.clock.is_expired and (solutions or self.must_stop()):
                refusals[mesh] = OutOfTimeError("not tried: the deadline has passed")
                continue
            if self.restriction is not None and not self.restriction.may_be_faster(mesh, solutions):
                continue
            try:
                solutions.append(self._solve_mesh_once(mesh))
            except (PlanError, AnnotationError) as error:
                refusals[mesh] = error
                continue
            self._incumbent_s = min(self._incumbent_s, solutions[-1].step_s)
            self.report("search", str(mesh))
        return solutions, refusals

    def _solve_mesh_once(self, mesh: Mesh) -> MeshSolution:
        """`solve_mesh`; the unchanged program is solved once per mesh, with or without restriction."""
        is_final = (
            self.restriction is None or not self.is_large or self.refines_to_three_axes
        )  # otherwise solved to a wider tolerance
        if not (self.is_base_variant and is_final):
            return self.solve_mesh(mesh, self.gap_tolerance)
        if mesh not in self.base_solutions:
            self.base_solutions[mesh] = self.solve_mesh(mesh)
        return self.base_solutions[mesh]

    def three_axis_meshes(self) -> list[Mesh]:
        """The meshes of three axes, targets of the descent."""
        meshes = meshes_to_search(self.cluster, self.options, {}, self.program.rules.inside)
        return [mesh for mesh in meshes if len(mesh.axes) == MAX_SEARCHED_AXES + 1]

    def _refine_solutions(self, solutions: Sequence[MeshSolution]) -> list[MeshSolution]:
        """Three-axis solutions refined from the fastest plan and others, on refinements of the fastest plan's mesh;
        only one in a large program."""
        if not self.refines_to_three_axes:
            return []
        fastest = min(solutions, key=lambda solution: solution.step_s)
        pairs = [
            (start, mesh)
            for mesh in self.three_axis_meshes()
            if refines(mesh, fastest.mesh)
            for start in solutions
            if refines(mesh, start.mesh) and (len(start.mesh.axes) == MAX_SEARCHED_AXES or start is fastest)
        ]
        pairs.sort(key=lambda pair: pair[0] is not fastest)
        refined_solutions: dict[Mesh, MeshSolution] = {}
        for start, mesh in pairs[: 1 if self.is_large else MAX_DESCENTS]:
            if self.must_stop():
                break
            if self.is_large:
                self.start_bounding(mesh)
            self.report("search", str(mesh))
            descended = self._refine_solution(start, mesh)
            if mesh not in refined_solutions or descended.step_s < refined_solutions[mesh].step_s:
                refined_solutions[mesh] = descended
                self._incumbent_s = min(self._incumbent_s, descended.step_s)
        return list(refined_solutions.values())

    def _refine_solution(self, start: MeshSolution, mesh: Mesh) -> MeshSolution:
        at, axes = lift_plan(start.chain, start.solution.states, mesh)
        rounds = MAX_ROUNDS_IF_LARGE if self.is_large else None
        fine = self.refine_graph(start.chain, mesh)
        chain, solved = descend(start.chain, at, fine, axes, time_limit_s=self.time_limit_s(), most_rounds=rounds)
        free_s = start.step_s - start.solution.value
        return replace(
            start, mesh=mesh, step_s=solved.value + free_s, chain=chain, solution=solved, coarse_solution=start
        )

    def _choose_plan(self, outcome: SearchResult, at_once: bool, below_s: float) -> CandidatePlan | None:
        best: CandidatePlan | None = None
        hopeless_bytes, gain = math.inf, self.min_gain
        steps_s = [outcome.predict_step_s(solution) for solution in outcome.solutions]
        for place in sorted(range(len(steps_s)), key=lambda place: steps_s[place] * (1 + gain * place)):
            solution = outcome.solutions[place]
            limit_s = below_s if best is None else min(below_s, best.cost.step_s * (1 - gain))
            if steps_s[place] >= limit_s:
                continue
            candidate = outcome.evaluate(solution)
            if not self.fits(candidate):
                if at_once or self.bytes_needed(candidate) >= hopeless_bytes:
                    continue
                fitting = self.lagrangian_search(self, candidate, limit_s)
                try:
                    candidate = replace(fitting.find_best(), coarse_solution=solution.coarse_solution)
                except MemoryBudgetError as error:
                    outcome.mesh_errors[solution.mesh] = error
                    outcome.add_memory_error(error)
                    if fitting.is_hopeless:  # likewise meshes whose fastest plan needs about as much
                        hopeless_bytes = min(hopeless_bytes, self.bytes_needed(candidate) / HOPELESS_RATIO)
                    continue
            if candidate.cost.step_s < limit_s:
                best = candidate
                self.offer(candidate)
        return best

    def _all_meshes(self) -> tuple[Mesh, ...]:
        program = self.program
        return meshes_to_search(self.cluster, self.options, program.pins, program.rules.inside)

    def _select_meshes(self) -> tuple[Mesh, ...]:
        """Meshes in search order; three axes only on request. Fast mode takes the first two-axis mesh: its axes lie
        inside and across nodes, and it can express every one-axis plan."""
        route = self.restriction
        meshes = route.meshes if route else self._all_meshes()
        if self.options.effort == "best":
            return meshes
        meshes = tuple(mesh for mesh in meshes if len(mesh.axes) <= MAX_SEARCHED_AXES) or meshes
        if self.is_fast:
            return (max(meshes, key=lambda mesh: len(mesh.axes)),)
        if self.options.force is not None or not self.is_large:
            return meshes
        return tuple(mesh for mesh in meshes if not any(refines(fine, mesh) for fine in meshes if fine != mesh))

    def _coarser_mesh(self, plan: CandidatePlan) -> Mesh | None:
        """The one-axis mesh omitted in favor of the plan's mesh, when the plan uses that mesh's axes jointly only."""
        if len(plan.mesh.axes) != MAX_SEARCHED_AXES or not self.is_large or self.is_fast or self.options.force:
            return None
        joined = {
            frozenset(axes)
            for node_shardings in plan.decisions.shardings
            for sharding in node_shardings
            for axes in (*sharding.dims, sharding.unreduced)
        }
        if not joined <= {frozenset(), frozenset(plan.mesh.sizes)}:
            return None
        meshes = self._all_meshes()
        return next((mesh for mesh in meshes if len(mesh.axes) == 1 and refines(plan.mesh, mesh)), None)

    def fits(self, plan: CandidatePlan) -> bool:
        fits = super().fits(plan)
        if not fits:
            self.incumbent.record_infeasible(self, plan)
        return fits

    def offer(self, plan: CandidatePlan) -> None:
        """Offer a feasible plan to the incumbent; the deadline may return it from now on. Ignored under `remat="full"`
        when the plan does not rematerialize."""
        if self.options.remat == "full" and self.recomputation is None:
            return
        self.incumbent.offer(self, plan)
        self.clock.record_plan()
