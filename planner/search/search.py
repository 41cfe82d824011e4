"""The search: every candidate mesh is planned, the fastest plan is kept."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial

from shardwright.cluster import Cluster
from shardwright.config import PlanOptions
from shardwright.errors import AnnotationError, MemoryBudgetError, PlanError
from shardwright.hlo import Module
from shardwright.planner.clock import Clock, OutOfTimeError, too_short_error
from shardwright.planner.constraints.forced import origin
from shardwright.planner.costs.relaxed_prices import EXACT_RANK
from shardwright.planner.gc_pause import gc_paused
from shardwright.planner.graph.source import Source
from shardwright.planner.memory.lagrangian import GAP_TOLERANCE, HOPELESS_RATIO, LagrangianSearch
from shardwright.planner.memory.messages import note_deadline, summarize_error, too_large_error
from shardwright.planner.memory.recompute import Recomputation
from shardwright.planner.parallel import ForkedFuture
from shardwright.planner.plans.verify import check_plan
from shardwright.planner.search.alternative_meshes import alternative_mesh_groups, suggest_other_mesh
from shardwright.planner.search.certify import BackgroundBound, assemble_plan, bound_plan, remove_idle_views
from shardwright.planner.search.dual_bound import tighten_dual_bound
from shardwright.planner.search.experts import (
    EXPERTS,
    FASTER_THAN_SEARCH,
    expert_candidates,
    experts_for,
    find_faster_expert,
    find_first_plan,
    price_experts,
)
from shardwright.planner.search.feasibility import check_state_fits
from shardwright.planner.search.memory_tradeoffs import fit_with_remat
from shardwright.planner.search.mesh_search import Listener, MeshSearch
from shardwright.planner.search.meshes import meshes_to_search, refines
from shardwright.planner.search.min_memory_plan import find_fallback_plan
from shardwright.planner.search.overlap_cap import enforce_overlap_cap
from shardwright.planner.search.replicated import choose_first_plan, replicate_if_faster
from shardwright.planner.search.simplest import choose_simplest
from shardwright.planner.search.solutions import MIN_GAIN, CandidatePlan, Incumbent, MeshSolution, SearchResult
from shardwright.planner.segments.descent import descend, lift_plan
from shardwright.planner.segments.segment_chain import Chain, ChainSolution
from shardwright.planner.solver.dual import TIGHT
from shardwright.planner.warm_start.replanning import SearchRestriction, replan, save_record, warm_start_chain
from shardwright.planner.warm_start.search_records import SearchHistory, SearchQuery, SearchRecord
from shardwright.plans import Candidate, Plan
from shardwright.shardings import Mesh

#: Most axes of the meshes that are searched outright unless more effort is asked for; and how often a plan with one
#: axis more is then descended from one of theirs.
MAX_SEARCHED_AXES = 2
MAX_DESCENTS = 4
MAX_ROUNDS_IF_LARGE = 1

#: What is said of a mesh, or an expert, whose fastest plan would be faster than the one that is taken.
_IGNORING_MEMORY = "its fastest plan, memory aside"


def plan(
    hlo: str | Module | Source,
    cluster: Cluster,
    options: PlanOptions | None = None,
    *,
    progress: Listener | None = None,
    trails: SearchHistory | None = None,
    clock: Clock | None = None,
) -> Plan:
    """Plan one HLO module for a cluster.

    hlo: HLO text, a parsed module or both. Without `options.mesh` every factorization of the
    devices into one or two axes is tried (three with `effort="best"`), those that are the same problem
    once. `progress` is called as planning goes on. trails: of earlier searches, which this one may follow and adds to.
    clock: that the deadline runs by; None begins one now.

    Raises HloSyntaxError for text that is not HLO, OptionError for options that do not fit
    the program or the cluster, AnnotationError for pins that cannot hold, PlanError where no
    plan satisfies them together, MemoryBudgetError where none fits the devices, or none was found in time that does,
    OutOfTimeError where the deadline is too short for any.
    """
    with gc_paused():
        options = options or PlanOptions()
        clock = clock or Clock(options.deadline_s)
        try:
            search = Search(hlo, cluster, options, progress, trails, clock)
        except OutOfTimeError:
            raise too_short_error(clock) from None
        try:
            return search.run()
        finally:
            search.incumbent.clear()
            search.background_bound.cancel()
            if search.background_experts is not None:
                search.background_experts.cancel()


class Search(MeshSearch):
    """One call of `plan`: what is searched on which meshes, and which plan is taken."""

    def __init__(
        self,
        hlo: str | Module | Source,
        cluster: Cluster,
        options: PlanOptions,
        progress: Listener | None = None,
        trails: SearchHistory | None = None,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(hlo, cluster, options, progress, clock)
        self.history = trails
        self.query = SearchQuery.of(self.program.original, cluster, options) if trails is not None else None
        self.record: SearchRecord | None = None
        self.restriction: SearchRestriction | None = None
        self.restricted_results: list[SearchResult] = []  # what a trail that was left led to where memory binds
        self.incumbent = Incumbent()
        self.background_bound = BackgroundBound()
        self.base_solutions: dict[Mesh, MeshSolution] = {}
        self.fallback_result: SearchResult | None = None  # of what takes little, where that was made
        self.warm_start_notes: dict[Mesh, str] = {}
        self.expert_costs: dict[tuple[str, Mesh], Candidate] = {}
        self.background_experts: ForkedFuture[dict[tuple[str, Mesh], Candidate]] | None = None
        self.gap_tolerance = 0.0  # relative gap at which a plan of a mesh is good enough
        self.excluded_meshes = frozenset[Mesh]()

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
            if self.incumbent.best_plan is None:
                raise self._deadline_error() from None
            outcome = self.incumbent.to_result()
        self.clock.may_stop, self.clock.is_final = False, True
        if self.incumbent.is_faster_than(outcome):
            outcome.search, outcome.best_plan, is_whole = self.incumbent.search or self, self.incumbent.best_plan, False
        if outcome.best_plan is not None:
            outcome.best_plan = choose_simplest(outcome)
            is_whole = is_whole and not outcome.best_plan.cost.bound_scope  # an expert's plan leads nowhere
        made = outcome.search.finish(outcome)
        if is_whole:
            save_record(self, outcome)
        return made

    def _search_from_record(self) -> SearchResult | None:
        """What following the trail of an earlier search gives, if there is one that leads to a plan as good."""
        may_follow = self.options.mode == "search" and self.options.effort == "default" and self.options.remat != "full"
        if self.history is None or self.query is None or not may_follow:
            return None
        trail = self.record = self.history.find_best(self.query)
        if trail is None:
            return None
        if self.options.deadline_s is not None:
            self._find_first_plan()
        return replan(self, trail)

    def _search_all(self) -> SearchResult:
        """What searching everything gives."""
        self._find_first_plan()
        self.clock.check()
        self._start_pricing_experts()
        outcome = fit_with_remat(self.search_meshes())
        outcome = outcome if self.is_fast else enforce_overlap_cap(outcome)
        self._compare_with_experts(outcome)
        return outcome

    def _solve_chain(self, chain: Chain, close: float) -> ChainSolution:
        """Message passing begins where that of the earlier search ended, if there is a trail. Following it, a plan of a
        large program will do that the cost model can hardly tell from the fastest."""
        warm_start_chain(self, chain)
        follows_far = self.restriction is not None and self.is_large
        return super()._solve_chain(chain, max(close, MIN_GAIN) if follows_far else close)

    def _find_first_plan(self) -> None:
        """A first plan at once. Not where something is forced, nor, without a deadline, where that takes a good part of
        the search."""
        is_hurried = self.options.deadline_s is not None
        is_dear = self.is_large or self.is_fast
        if not self.is_unforced or self.incumbent.best_plan is not None or (is_dear and not is_hurried):
            return
        first = find_first_plan(self)
        found = choose_first_plan(self, first)
        if found is not None:
            self.offer(found)
        else:  # one that takes less is made where it turns out to help, unless nothing else may be known in time
            self.fallback_result = find_fallback_plan(self, first) if is_hurried else None
            found = self.fallback_result.best_plan if self.fallback_result is not None else None
        if found is not None:
            self._incumbent_s = found.cost.step_s
            self.report("search", str(found.mesh))

    def _start_pricing_experts(self) -> None:
        """Of a large program, beside the search, unless somebody is in a hurry: of a small one that takes no time."""
        names = experts_for(self) if self.is_unforced and self.is_large and self.options.deadline_s is None else ()
        if names:
            self.background_experts = ForkedFuture(partial(price_experts, self, names))

    def _compare_with_experts(self, outcome: SearchResult) -> None:
        """A plan that an expert would write is known too, where it is faster than what the search found. Where the
        program is large that takes long: only some are looked at, unless nothing was found."""
        if not self.is_unforced:
            return
        if self.background_experts is not None and not self.must_stop():
            self.expert_costs |= self.background_experts.result()
        names = experts_for(self) if outcome.best_plan is not None else tuple(EXPERTS)
        found = find_faster_expert(self, outcome.step_s * (1 - MIN_GAIN), names)
        if found is not None:
            self.offer(found)

    def _compare_with_replicated(self, outcome: SearchResult) -> None:
        """The program computed whole on every device is known too, where that is faster than what was found."""
        is_known = self.incumbent.is_faster_than(outcome)
        search, found = (
            (self.incumbent.search, self.incumbent.best_plan) if is_known else (outcome.search, outcome.best_plan)
        )
        if self.is_unforced and search is not None and found is not None:
            whole = replicate_if_faster(search, found, FASTER_THAN_SEARCH)
            if whole is not None:
                search.offer(whole)

    @property
    def is_unforced(self) -> bool:
        return self.options.force is None and self.options.mode == "search"

    def search_variant(
        self, again: Recomputation | None, micro_batches: int, without: frozenset[Mesh] = frozenset()
    ) -> SearchResult:
        """What the search gives for the same program computing otherwise, on all meshes but those of `without`: plans
        that are found nearly (see `polish`). Raises MicroBatchError besides what `outcome` raises."""
        made = self.for_variant(again, micro_batches)
        made.gap_tolerance, made.excluded_meshes = GAP_TOLERANCE, without
        return made.search_meshes()

    def is_variant(self, again: Recomputation | None, micro_batches: int) -> bool:
        """Whether this is the search for the program computing so."""
        return (self.recomputation, self.program.micro_batches) == (again, micro_batches)

    def without_restriction(self, without: frozenset[Mesh]) -> Search:
        """The same search following nothing, on all meshes but some."""
        made = copy(self)
        made.restriction, made.excluded_meshes = None, without
        return made

    def for_variant(self, again: Recomputation | None, micro_batches: int) -> Search:
        """The search for the same program computing otherwise. Raises MicroBatchError."""
        self.report("rewrite", f"{len(again.instructions) if again else 0} again, {micro_batches} micro-batches")
        made = copy(self)
        made.program = self.program.rewrite_variant(again, micro_batches)
        made.flow, made.recomputation = made.program.flow, again
        return made

    def search_meshes(self) -> SearchResult:
        """What every mesh gives, memory aside. PlanError or AnnotationError where none gives anything."""
        finest = self.three_axis_meshes() if self.refines_to_three_axes else []
        if len(finest) == 1:
            self.start_bounding(finest[0])
        tried, refusals = self._solve_meshes(self._select_meshes())
        for group in alternative_mesh_groups(self) if not tried else ():
            tried, more = self._solve_meshes([mesh for mesh in group if mesh not in refusals])
            refusals |= more
            if tried:
                break
        if not tried:
            late = (each for each in refusals.values() if isinstance(each, OutOfTimeError))
            error = next(late, None) or next(iter(refusals.values()), PlanError("no mesh can be planned"))
            raise suggest_other_mesh(self, error)
        tried += self._refine_solutions(tried)
        fastest = min(tried, key=lambda each: each.step_s)
        if fastest.coarse_solution is not None:
            self.start_bounding(fastest.mesh)
        elif fastest.chain.runs and self.is_base_variant and not self.is_fast:
            self.background_bound.start(fastest.chain, self.time_limit_s())
        return SearchResult(search=self, solutions=tried, mesh_errors=refusals)

    @property
    def is_base_variant(self) -> bool:
        """Whether this is the first search of the program, and mostly the only one."""
        return self.recomputation is None and self.program.micro_batches == 1 and self.hidden_share == 1.0

    def start_bounding(self, mesh: Mesh, rank: int = EXACT_RANK) -> None:
        """Begin to bound all plans on a mesh of three axes, which most likely is what the search ends on.

        rank: of arrays of up to so many dimensions moves are followed.
        """
        if self.is_base_variant and self.background_bound.chain_on(mesh, self.flow) is None:
            chain = self.build_bounding_chain(mesh)
            chain = chain if rank == EXACT_RANK else self.with_exact_moves(chain, rank)
            self.background_bound.start(chain, self.time_limit_s())

    def fit_memory(self, outcome: SearchResult, *, at_once: bool = False, below_s: float = math.inf) -> bool:
        """Look for the fastest plan that fits the memory; whether there is one.

        at_once: only among the fastest of each mesh. below_s: a plan that takes as long is no use.
        """
        found = self._choose_plan(outcome, at_once, below_s)
        coarser = self._coarser_mesh(found) if found is not None else None
        if coarser is not None:
            outcome.solutions.append(self.solve_mesh(coarser))
            found = self._choose_plan(outcome, at_once, below_s)
        outcome.best_plan = found
        return found is not None

    def polish(self, outcome: SearchResult) -> None:
        """Search to the end for the plan of an outcome, where it is one of many variants' and only found nearly."""
        found = outcome.best_plan
        is_done = not self.gap_tolerance or self.is_large or self.is_fast or self.must_stop()
        if found is None or found.multipliers is not None or is_done:
            return
        solved = found.solution
        if solved.value - solved.tied_bound <= TIGHT * abs(solved.value):
            return
        solved = found.chain.solve(self.time_limit_s())
        made = replace(self.evaluate(found.chain, solved, found.notes), coarse_solution=found.coarse_solution)
        if made.cost.step_s < found.cost.step_s and self.fits(made):
            outcome.best_plan = made

    def finish(self, outcome: SearchResult) -> Plan:
        """The plan of an outcome, bounded and checked. MemoryBudgetError where it has none."""
        if outcome.best_plan is None:
            raise (
                self._deadline_error()
                if self.clock.is_expired
                else outcome.memory_error or PlanError("no mesh can be planned")
            )
        self._reported_plan = found = outcome.best_plan if self.is_fast else tighten_dual_bound(self, outcome.best_plan)
        made = self._build_checked_plan(found, outcome)  # meanwhile a second core works out the bound
        self._reported_plan = outcome.best_plan = best = bound_plan(self, found, self.background_bound)
        self.report("check", str(best.mesh))
        made = (
            replace(made, cost=best.cost)
            if best.decisions is found.decisions
            else self._build_checked_plan(best, outcome)
        )
        return replace(made, planning_s=self.clock.elapsed_s)

    def _deadline_error(self) -> PlanError:
        """Why there is no plan where a deadline ended the search: the least that was found to be needed."""
        if self.incumbent.smallest_infeasible is None:
            return too_short_error(self.clock)
        return note_deadline(too_large_error(*self.incumbent.smallest_infeasible), self.clock)

    def _build_checked_plan(self, found: CandidatePlan, outcome: SearchResult) -> Plan:
        """A plan of an outcome, checked."""
        made = assemble_plan(
            self, found, (*self._list_candidates(outcome.solutions, outcome.mesh_errors), *outcome.other_candidates)
        )
        made = replace(made, notes=(*made.notes, *outcome.notes))
        module, made = remove_idle_views(self, made)
        check_plan(module, made)
        return made

    def _solve_meshes(
        self, meshes: Sequence[Mesh]
    ) -> tuple[list[MeshSolution], dict[Mesh, PlanError | AnnotationError]]:
        """The fastest plan on every mesh, memory aside, in the order of the meshes; why there is none on the others."""
        tried: list[MeshSolution] = []
        refusals: dict[Mesh, PlanError | AnnotationError] = {}
        for mesh in meshes:
            if mesh in self.excluded_meshes:
                continue
            if self.clock.is_expired and (tried or self.must_stop()):
                refusals[mesh] = OutOfTimeError("not tried: the deadline has passed")
                continue
            if self.restriction is not None and not self.restriction.may_be_faster(mesh, tried):
                continue
            try:
                tried.append(self._solve_mesh_once(mesh))
            except (PlanError, AnnotationError) as error:
                refusals[mesh] = error
                continue
            self._incumbent_s = min(self._incumbent_s, tried[-1].step_s)
            self.report("search", str(mesh))
        return tried, refusals

    def _solve_mesh_once(self, mesh: Mesh) -> MeshSolution:
        """`solve_mesh`; of the program as it is once, whether a trail is followed or left."""
        is_final = (
            self.restriction is None or not self.is_large or self.refines_to_three_axes
        )  # else solved less closely
        if not (self.is_base_variant and is_final):
            return self.solve_mesh(mesh, self.gap_tolerance)
        if mesh not in self.base_solutions:
            self.base_solutions[mesh] = self.solve_mesh(mesh)
        return self.base_solutions[mesh]

    def three_axis_meshes(self) -> list[Mesh]:
        """The meshes of three axes, to which plans are descended."""
        return [m for m in meshes_to_search(self.cluster, self.options, {}) if len(m.axes) == MAX_SEARCHED_AXES + 1]

    def _refine_solutions(self, tried: Sequence[MeshSolution]) -> list[MeshSolution]:
        """Plans on meshes of three axes that refine the fastest plan's, descended from it and from others; one, where
        the program is large."""
        if not self.refines_to_three_axes:
            return []
        fastest = min(tried, key=lambda each: each.step_s)
        pairs = [
            (start, mesh)
            for mesh in self.three_axis_meshes()
            if refines(mesh, fastest.mesh)
            for start in tried
            if refines(mesh, start.mesh) and (len(start.mesh.axes) == MAX_SEARCHED_AXES or start is fastest)
        ]
        pairs.sort(key=lambda pair: pair[0] is not fastest)
        found: dict[Mesh, MeshSolution] = {}
        for start, mesh in pairs[: 1 if self.is_large else MAX_DESCENTS]:
            if self.must_stop():
                break
            if self.is_large:
                self.start_bounding(mesh)
            self.report("search", str(mesh))
            descended = self._refine_solution(start, mesh)
            if mesh not in found or descended.step_s < found[mesh].step_s:
                found[mesh] = descended
                self._incumbent_s = min(self._incumbent_s, descended.step_s)
        return list(found.values())

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
        tried, hopeless_bytes = outcome.solutions, math.inf
        for each in sorted(tried, key=lambda each: each.step_s * (1 + MIN_GAIN * tried.index(each))):
            limit_s = below_s if best is None else min(below_s, best.cost.step_s * (1 - MIN_GAIN))
            if each.step_s >= limit_s:
                break
            found = outcome.evaluate(each)
            if not self.fits(found):
                if at_once or self.bytes_needed(found) >= hopeless_bytes:
                    continue
                fitting = LagrangianSearch(self, found, limit_s)
                try:
                    found = replace(fitting.find_best(), coarse_solution=each.coarse_solution)
                except MemoryBudgetError as error:
                    outcome.mesh_errors[each.mesh] = error
                    outcome.add_memory_error(error)
                    if fitting.is_hopeless:  # and so is each mesh whose fastest plan does not need far less
                        hopeless_bytes = min(hopeless_bytes, self.bytes_needed(found) / HOPELESS_RATIO)
                    continue
            if found.cost.step_s < limit_s:
                best = found
                self.offer(found)
        return best

    def _list_candidates(
        self, tried: Sequence[MeshSolution], refusals: Mapping[Mesh, PlanError | AnnotationError]
    ) -> tuple[Candidate, ...]:
        """What was tried, with its price; and the plans that experts write, as far as they were priced."""
        name = origin(self.options)
        chosen_s = math.inf if self._reported_plan is None else self._reported_plan.cost.step_s
        taken_s = {each.mesh: self.step_with_overlap_s(each) for each in tried if each.mesh not in refusals}
        found = {mesh: Candidate(mesh=mesh, step_s=step_s, name=name) for mesh, step_s in taken_s.items()}
        if self._reported_plan is not None:
            found[self._reported_plan.mesh] = Candidate(
                mesh=self._reported_plan.mesh, step_s=self._reported_plan.cost.step_s, name=name
            )
        refused = [
            Candidate(mesh=mesh, step_s=None, note=summarize_error(e), name=name) for mesh, e in refusals.items()
        ]
        made = (*found.values(), *refused, *expert_candidates(self))
        return tuple(_note_memory(each, chosen_s) for each in made)

    def _select_meshes(self) -> tuple[Mesh, ...]:
        """Meshes in the order they are tried; three axes only where asked for. Where it is to be fast the first of two
        axes: they lie inside nodes and across them, and can express what one axis can."""
        route = self.restriction
        found = route.meshes if route else meshes_to_search(self.cluster, self.options, self.program.pins)
        if self.options.effort == "best":
            return found
        found = tuple(mesh for mesh in found if len(mesh.axes) <= MAX_SEARCHED_AXES) or found
        if self.is_fast:
            return (max(found, key=lambda mesh: len(mesh.axes)),)
        if self.options.force is not None or not self.is_large:
            return found
        return tuple(mesh for mesh in found if not any(refines(fine, mesh) for fine in found if fine != mesh))

    def _coarser_mesh(self, found: CandidatePlan) -> Mesh | None:
        """The mesh of one axis that was left out because the plan's own refines it, if the plan needs no more."""
        if len(found.mesh.axes) != MAX_SEARCHED_AXES or not self.is_large or self.is_fast or self.options.force:
            return None
        joined = {
            frozenset(axes)
            for lies in found.decisions.shardings
            for sharding in lies
            for axes in (*sharding.dims, sharding.unreduced)
        }
        if not joined <= {frozenset(), frozenset(found.mesh.sizes)}:
            return None
        meshes = meshes_to_search(self.cluster, self.options, self.program.pins)
        return next((mesh for mesh in meshes if len(mesh.axes) == 1 and refines(found.mesh, mesh)), None)

    def fits(self, found: CandidatePlan) -> bool:
        fits = super().fits(found)
        if not fits:
            self.incumbent.record_infeasible(self, found)
        return fits

    def offer(self, found: CandidatePlan) -> None:
        """A plan that fits, which a deadline may leave with from now on; not one that keeps what was to be computed
        again."""
        if self.options.remat == "full" and self.recomputation is None:
            return
        self.incumbent.offer(self, found)
        self.clock.may_stop = True


def _note_memory(candidate: Candidate, chosen_s: float) -> Candidate:
    """What was tried, and that it does not fit where it would be faster than the plan that is taken."""
    step_s = candidate.step_s
    is_faster = step_s is not None and step_s * (1 + MIN_GAIN) < chosen_s
    return replace(candidate, note=_IGNORING_MEMORY) if is_faster and not candidate.note else candidate
