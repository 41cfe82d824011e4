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
from shardwright.planner.again.follow import Route, begin, leave_trail, planned_again
from shardwright.planner.again.trails import Question, Trail, Trails
from shardwright.planner.clock import Clock, OutOfTimeError, too_short
from shardwright.planner.collector import collector_paused
from shardwright.planner.constraints.forced import origin
from shardwright.planner.costs.relaxed_prices import EXACT_RANK
from shardwright.planner.graph.source import Source
from shardwright.planner.memory.fitting import CLOSE, HOPELESS, Fitting
from shardwright.planner.memory.recompute import Recomputation
from shardwright.planner.memory.words import briefly, cut_short, too_large
from shardwright.planner.parallel import Ahead
from shardwright.planner.plans.verify import check_plan
from shardwright.planner.search.experts import (
    AT_THE_END,
    EXPERTS,
    expert_candidates,
    faster_than,
    first_plan,
    names_for,
    priced,
)
from shardwright.planner.search.finishing import Bounding, as_stored, assembled, bounded
from shardwright.planner.search.found import LEAST_GAIN, Found, Known, Outcome, Tried
from shardwright.planner.search.hiding import kept_promises
from shardwright.planner.search.memory_bound import bounded_by_price
from shardwright.planner.search.mesh_search import Listener, MeshSearch
from shardwright.planner.search.meshes import meshes_to_search, refines
from shardwright.planner.search.other_meshes import further_meshes, with_other_mesh
from shardwright.planner.search.relief import relieved
from shardwright.planner.search.replicated import faster_replicated, first_that_fits
from shardwright.planner.search.simplest import simplest
from shardwright.planner.search.sparing import sparing_plan
from shardwright.planner.search.state_floor import check_state_fits
from shardwright.planner.segments.chain import Chain, SolvedChain
from shardwright.planner.segments.descent import descend, lifted
from shardwright.planner.solver.dual import TIGHT
from shardwright.plans import Candidate, Plan
from shardwright.shardings import Mesh

#: Most axes of the meshes that are searched outright unless more effort is asked for; and how often a plan with one
#: axis more is then descended from one of theirs.
SEARCHED_AXES = 2
DESCENTS = 4
ROUNDS_IF_LARGE = 1

#: What is said of a mesh, or an expert, whose fastest plan would be faster than the one that is taken.
_MEMORY_ASIDE = "its fastest plan, memory aside"


def plan(
    hlo: str | Module | Source,
    cluster: Cluster,
    options: PlanOptions | None = None,
    *,
    progress: Listener | None = None,
    trails: Trails | None = None,
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
    with collector_paused():
        options = options or PlanOptions()
        clock = clock or Clock(options.deadline_s)
        try:
            search = Search(hlo, cluster, options, progress, trails, clock)
        except OutOfTimeError:
            raise too_short(clock) from None
        try:
            return search.run()
        finally:
            search.known.forget()
            search.bounding.cancel()
            if search.pricing is not None:
                search.pricing.cancel()


class Search(MeshSearch):
    """One call of `plan`: what is searched on which meshes, and which plan is taken."""

    def __init__(
        self,
        hlo: str | Module | Source,
        cluster: Cluster,
        options: PlanOptions,
        progress: Listener | None = None,
        trails: Trails | None = None,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(hlo, cluster, options, progress, clock)
        self.trails = trails
        self.question = Question.of(self.program.original, cluster, options) if trails is not None else None
        self.trail: Trail | None = None
        self.route: Route | None = None
        self.followed: list[Outcome] = []  # what a trail that was left led to where memory binds
        self.known = Known()
        self.bounding = Bounding()
        self.as_given: dict[Mesh, Tried] = {}
        self.spared: Outcome | None = None  # of what takes little, where that was made
        self.begun: dict[Mesh, str] = {}
        self.expert_prices: dict[tuple[str, Mesh], Candidate] = {}
        self.pricing: Ahead[dict[tuple[str, Mesh], Candidate]] | None = None
        self.close = 0.0  # relative gap at which a plan of a mesh is good enough
        self.without = frozenset[Mesh]()

    def run(self) -> Plan:
        is_whole = False
        try:
            check_state_fits(self)
            outcome = self._again()
            if outcome is None:
                outcome = self._whole()
                is_whole = not self.clock.is_late
            self._hold_against_replicated(outcome)
        except OutOfTimeError:
            if self.known.found is None:
                raise self._cut_short() from None
            outcome = self.known.outcome()
        self.clock.interrupts, self.clock.is_final = False, True
        if self.known.is_faster_than(outcome):
            outcome.search, outcome.found, is_whole = self.known.search or self, self.known.found, False
        if outcome.found is not None:
            outcome.found = simplest(outcome)
            is_whole = is_whole and not outcome.found.cost.bound_scope  # an expert's plan leads nowhere
        made = outcome.search.finish(outcome)
        if is_whole:
            leave_trail(self, outcome)
        return made

    def _again(self) -> Outcome | None:
        """What following the trail of an earlier search gives, if there is one that leads to a plan as good."""
        may_follow = self.options.mode == "search" and self.options.effort == "default" and self.options.remat != "full"
        if self.trails is None or self.question is None or not may_follow:
            return None
        trail = self.trail = self.trails.best_for(self.question)
        if trail is None:
            return None
        if self.options.deadline_s is not None:
            self._know_a_plan()
        return planned_again(self, trail)

    def _whole(self) -> Outcome:
        """What searching everything gives."""
        self._know_a_plan()
        self.clock.check()
        self._price_experts_ahead()
        outcome = relieved(self.outcome())
        outcome = outcome if self.is_fast else kept_promises(outcome)
        self._hold_against_experts(outcome)
        return outcome

    def _solved(self, chain: Chain, close: float) -> SolvedChain:
        """Message passing begins where that of the earlier search ended, if there is a trail. Following it, a plan of a
        large program will do that the cost model can hardly tell from the fastest."""
        begin(self, chain)
        follows_far = self.route is not None and self.is_large
        return super()._solved(chain, max(close, LEAST_GAIN) if follows_far else close)

    def _know_a_plan(self) -> None:
        """A first plan at once. Not where something is forced, nor, without a deadline, where that takes a good part of
        the search."""
        is_hurried = self.options.deadline_s is not None
        is_dear = self.is_large or self.is_fast
        if not self.is_free or self.known.found is not None or (is_dear and not is_hurried):
            return
        first = first_plan(self)
        found = first_that_fits(self, first)
        if found is not None:
            self.offer(found)
        else:  # one that takes less is made where it turns out to help, unless nothing else may be known in time
            self.spared = sparing_plan(self, first) if is_hurried else None
            found = self.spared.found if self.spared is not None else None
        if found is not None:
            self._incumbent_s = found.cost.step_s
            self.report("search", str(found.mesh))

    def _price_experts_ahead(self) -> None:
        """Of a large program, beside the search, unless somebody is in a hurry: of a small one that takes no time."""
        names = names_for(self) if self.is_free and self.is_large and self.options.deadline_s is None else ()
        if names:
            self.pricing = Ahead(partial(priced, self, names))

    def _hold_against_experts(self, outcome: Outcome) -> None:
        """A plan that an expert would write is known too, where it is faster than what the search found. Where the
        program is large that takes long: only some are looked at, unless nothing was found."""
        if not self.is_free:
            return
        if self.pricing is not None and not self.is_late():
            self.expert_prices |= self.pricing.result()
        names = names_for(self) if outcome.found is not None else tuple(EXPERTS)
        found = faster_than(self, outcome.step_s * (1 - LEAST_GAIN), names)
        if found is not None:
            self.offer(found)

    def _hold_against_replicated(self, outcome: Outcome) -> None:
        """The program computed whole on every device is known too, where that is faster than what was found."""
        is_known = self.known.is_faster_than(outcome)
        search, found = (self.known.search, self.known.found) if is_known else (outcome.search, outcome.found)
        if self.is_free and search is not None and found is not None:
            whole = faster_replicated(search, found, AT_THE_END)
            if whole is not None:
                search.offer(whole)

    @property
    def is_free(self) -> bool:
        return self.options.force is None and self.options.mode == "search"

    def variant(
        self, again: Recomputation | None, micro_batches: int, without: frozenset[Mesh] = frozenset()
    ) -> Outcome:
        """What the search gives for the same program computing otherwise, on all meshes but those of `without`: plans
        that are found nearly (see `polish`). Raises MicroBatchError besides what `outcome` raises."""
        made = self.computing(again, micro_batches)
        made.close, made.without = CLOSE, without
        return made.outcome()

    def computes(self, again: Recomputation | None, micro_batches: int) -> bool:
        """Whether this is the search for the program computing so."""
        return (self.recomputation, self.program.micro_batches) == (again, micro_batches)

    def off_route(self, without: frozenset[Mesh]) -> Search:
        """The same search following nothing, on all meshes but some."""
        made = copy(self)
        made.route, made.without = None, without
        return made

    def computing(self, again: Recomputation | None, micro_batches: int) -> Search:
        """The search for the same program computing otherwise. Raises MicroBatchError."""
        self.report("rewrite", f"{len(again.instructions) if again else 0} again, {micro_batches} micro-batches")
        made = copy(self)
        made.program = self.program.computing(again, micro_batches)
        made.flow, made.recomputation = made.program.flow, again
        return made

    def outcome(self) -> Outcome:
        """What every mesh gives, memory aside. PlanError or AnnotationError where none gives anything."""
        finest = self.meshes_of_three() if self.descends else []
        if len(finest) == 1:
            self.bound_ahead(finest[0])
        tried, refusals = self._try_meshes(self._meshes())
        for group in further_meshes(self) if not tried else ():
            tried, more = self._try_meshes([mesh for mesh in group if mesh not in refusals])
            refusals |= more
            if tried:
                break
        if not tried:
            late = (each for each in refusals.values() if isinstance(each, OutOfTimeError))
            error = next(late, None) or next(iter(refusals.values()), PlanError("no mesh can be planned"))
            raise with_other_mesh(self, error)
        tried += self._finer(tried)
        fastest = min(tried, key=lambda each: each.step_s)
        if fastest.start is not None:
            self.bound_ahead(fastest.mesh)
        elif fastest.chain.runs and self.is_as_given and not self.is_fast:
            self.bounding.begin(fastest.chain, self.time_limit_s())
        return Outcome(search=self, tried=tried, refusals=refusals)

    @property
    def is_as_given(self) -> bool:
        """Whether this is the first search of the program, and mostly the only one."""
        return self.recomputation is None and self.program.micro_batches == 1 and self.hidden_share == 1.0

    def bound_ahead(self, mesh: Mesh, rank: int = EXACT_RANK) -> None:
        """Begin to bound all plans on a mesh of three axes, which most likely is what the search ends on.

        rank: of arrays of up to so many dimensions moves are followed.
        """
        if self.is_as_given and self.bounding.begun_on(mesh, self.flow) is None:
            chain = self.chain_to_bound(mesh)
            chain = chain if rank == EXACT_RANK else self.following(chain, rank)
            self.bounding.begin(chain, self.time_limit_s())

    def fit(self, outcome: Outcome, *, at_once: bool = False, below_s: float = math.inf) -> bool:
        """Look for the fastest plan that fits the memory; whether there is one.

        at_once: only among the fastest of each mesh. below_s: a plan that takes as long is no use.
        """
        found = self._choose(outcome, at_once, below_s)
        coarser = self._coarser(found) if found is not None else None
        if coarser is not None:
            outcome.tried.append(self.on_mesh(coarser))
            found = self._choose(outcome, at_once, below_s)
        outcome.found = found
        return found is not None

    def polish(self, outcome: Outcome) -> None:
        """Search to the end for the plan of an outcome, where it is one of many variants' and only found nearly."""
        found = outcome.found
        is_done = not self.close or self.is_large or self.is_fast or self.is_late()
        if found is None or found.price is not None or is_done:
            return
        solved = found.solved
        if solved.value - solved.rolled_bound <= TIGHT * abs(solved.value):
            return
        solved = found.chain.solve(self.time_limit_s())
        made = replace(self.found(found.chain, solved, found.notes), start=found.start)
        if made.cost.step_s < found.cost.step_s and self.fits(made):
            outcome.found = made

    def finish(self, outcome: Outcome) -> Plan:
        """The plan of an outcome, bounded and checked. MemoryBudgetError where it has none."""
        if outcome.found is None:
            raise self._cut_short() if self.clock.is_late else outcome.refusal or PlanError("no mesh can be planned")
        self._best = found = outcome.found if self.is_fast else bounded_by_price(self, outcome.found)
        made = self._written_down(found, outcome)  # meanwhile a second core works out the bound
        self._best = outcome.found = best = bounded(self, found, self.bounding)
        self.report("check", str(best.mesh))
        made = replace(made, cost=best.cost) if best.decisions is found.decisions else self._written_down(best, outcome)
        return replace(made, planning_s=self.clock.elapsed_s)

    def _cut_short(self) -> PlanError:
        """Why there is no plan where a deadline ended the search: the least that was found to be needed."""
        if self.known.least is None:
            return too_short(self.clock)
        return cut_short(too_large(*self.known.least), self.clock)

    def _written_down(self, found: Found, outcome: Outcome) -> Plan:
        """A plan of an outcome, checked."""
        made = assembled(self, found, (*self._candidates(outcome.tried, outcome.refusals), *outcome.others))
        made = replace(made, notes=(*made.notes, *outcome.notes))
        module, made = as_stored(self, made)
        check_plan(module, made)
        return made

    def _try_meshes(self, meshes: Sequence[Mesh]) -> tuple[list[Tried], dict[Mesh, PlanError | AnnotationError]]:
        """The fastest plan on every mesh, memory aside, in the order of the meshes; why there is none on the others."""
        tried: list[Tried] = []
        refusals: dict[Mesh, PlanError | AnnotationError] = {}
        for mesh in meshes:
            if mesh in self.without:
                continue
            if self.clock.is_late and (tried or self.is_late()):
                refusals[mesh] = OutOfTimeError("not tried: the deadline has passed")
                continue
            if self.route is not None and not self.route.may_be_faster(mesh, tried):
                continue
            try:
                tried.append(self._tried_on(mesh))
            except (PlanError, AnnotationError) as error:
                refusals[mesh] = error
                continue
            self._incumbent_s = min(self._incumbent_s, tried[-1].step_s)
            self.report("search", str(mesh))
        return tried, refusals

    def _tried_on(self, mesh: Mesh) -> Tried:
        """`on_mesh`; of the program as it is once, whether a trail is followed or left."""
        is_final = self.route is None or not self.is_large or self.descends  # else solved less closely
        if not (self.is_as_given and is_final):
            return self.on_mesh(mesh, self.close)
        if mesh not in self.as_given:
            self.as_given[mesh] = self.on_mesh(mesh)
        return self.as_given[mesh]

    def meshes_of_three(self) -> list[Mesh]:
        """The meshes of three axes, to which plans are descended."""
        return [m for m in meshes_to_search(self.cluster, self.options, {}) if len(m.axes) == SEARCHED_AXES + 1]

    def _finer(self, tried: Sequence[Tried]) -> list[Tried]:
        """Plans on meshes of three axes that refine the fastest plan's, descended from it and from others; one, where
        the program is large."""
        if not self.descends:
            return []
        fastest = min(tried, key=lambda each: each.step_s)
        pairs = [
            (start, mesh)
            for mesh in self.meshes_of_three()
            if refines(mesh, fastest.mesh)
            for start in tried
            if refines(mesh, start.mesh) and (len(start.mesh.axes) == SEARCHED_AXES or start is fastest)
        ]
        pairs.sort(key=lambda pair: pair[0] is not fastest)
        found: dict[Mesh, Tried] = {}
        for start, mesh in pairs[: 1 if self.is_large else DESCENTS]:
            if self.is_late():
                break
            if self.is_large:
                self.bound_ahead(mesh)
            self.report("search", str(mesh))
            descended = self._descended(start, mesh)
            if mesh not in found or descended.step_s < found[mesh].step_s:
                found[mesh] = descended
                self._incumbent_s = min(self._incumbent_s, descended.step_s)
        return list(found.values())

    def _descended(self, start: Tried, mesh: Mesh) -> Tried:
        at, axes = lifted(start.chain, start.solved.states, mesh)
        rounds = ROUNDS_IF_LARGE if self.is_large else None
        fine = self.finer(start.chain, mesh)
        chain, solved = descend(start.chain, at, fine, axes, time_limit_s=self.time_limit_s(), most_rounds=rounds)
        free_s = start.step_s - start.solved.value
        return replace(start, mesh=mesh, step_s=solved.value + free_s, chain=chain, solved=solved, start=start)

    def _choose(self, outcome: Outcome, at_once: bool, below_s: float) -> Found | None:
        best: Found | None = None
        tried, hopeless_bytes = outcome.tried, math.inf
        for each in sorted(tried, key=lambda each: each.step_s * (1 + LEAST_GAIN * tried.index(each))):
            limit_s = below_s if best is None else min(below_s, best.cost.step_s * (1 - LEAST_GAIN))
            if each.step_s >= limit_s:
                break
            found = outcome.plan(each)
            if not self.fits(found):
                if at_once or self.needed_bytes(found) >= hopeless_bytes:
                    continue
                fitting = Fitting(self, found, limit_s)
                try:
                    found = replace(fitting.best(), start=each.start)
                except MemoryBudgetError as error:
                    outcome.refusals[each.mesh] = error
                    outcome.refuse(error)
                    if fitting.is_hopeless:  # and so is each mesh whose fastest plan does not need far less
                        hopeless_bytes = min(hopeless_bytes, self.needed_bytes(found) / HOPELESS)
                    continue
            if found.cost.step_s < limit_s:
                best = found
                self.offer(found)
        return best

    def _candidates(
        self, tried: Sequence[Tried], refusals: Mapping[Mesh, PlanError | AnnotationError]
    ) -> tuple[Candidate, ...]:
        """What was tried, with its price; and the plans that experts write, as far as they were priced."""
        name = origin(self.options)
        chosen_s = math.inf if self._best is None else self._best.cost.step_s
        taken_s = {each.mesh: self.kept_s(each) for each in tried if each.mesh not in refusals}
        found = {mesh: Candidate(mesh=mesh, step_s=step_s, name=name) for mesh, step_s in taken_s.items()}
        if self._best is not None:
            found[self._best.mesh] = Candidate(mesh=self._best.mesh, step_s=self._best.cost.step_s, name=name)
        refused = [Candidate(mesh=mesh, step_s=None, note=briefly(e), name=name) for mesh, e in refusals.items()]
        made = (*found.values(), *refused, *expert_candidates(self))
        return tuple(_memory_aside(each, chosen_s) for each in made)

    def _meshes(self) -> tuple[Mesh, ...]:
        """Meshes in the order they are tried; three axes only where asked for. Where it is to be fast the first of two
        axes: they lie inside nodes and across them, and can express what one axis can."""
        route = self.route
        found = route.meshes if route else meshes_to_search(self.cluster, self.options, self.program.pins)
        if self.options.effort == "best":
            return found
        found = tuple(mesh for mesh in found if len(mesh.axes) <= SEARCHED_AXES) or found
        if self.is_fast:
            return (max(found, key=lambda mesh: len(mesh.axes)),)
        if self.options.force is not None or not self.is_large:
            return found
        return tuple(mesh for mesh in found if not any(refines(fine, mesh) for fine in found if fine != mesh))

    def _coarser(self, found: Found) -> Mesh | None:
        """The mesh of one axis that was left out because the plan's own refines it, if the plan needs no more."""
        if len(found.mesh.axes) != SEARCHED_AXES or not self.is_large or self.is_fast or self.options.force:
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

    def fits(self, found: Found) -> bool:
        fits = super().fits(found)
        if not fits:
            self.known.refuse(self, found)
        return fits

    def offer(self, found: Found) -> None:
        """A plan that fits, which a deadline may leave with from now on; not one that keeps what was to be computed
        again."""
        if self.options.remat == "full" and self.recomputation is None:
            return
        self.known.offer(self, found)
        self.clock.interrupts = True


def _memory_aside(candidate: Candidate, chosen_s: float) -> Candidate:
    """What was tried, and that it does not fit where it would be faster than the plan that is taken."""
    step_s = candidate.step_s
    is_faster = step_s is not None and step_s * (1 + LEAST_GAIN) < chosen_s
    return replace(candidate, note=_MEMORY_ASIDE) if is_faster and not candidate.note else candidate
