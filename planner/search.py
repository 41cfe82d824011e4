"""The search: every candidate mesh is planned, the fastest plan is kept."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace

from shardwright.cluster import Cluster
from shardwright.config import PlanOptions
from shardwright.cost import hardware_profile, memory, required_bytes
from shardwright.cost.profiles import memory_limit_bytes
from shardwright.errors import AnnotationError, MemoryBudgetError, PlanError
from shardwright.hlo import Module
from shardwright.planner.assemble import (
    Decisions,
    communication,
    compute_time_s,
    decide,
    instruction_plans,
    planned_collectives,
    segment_plans,
    variables,
)
from shardwright.planner.bound import lower_bound
from shardwright.planner.causes import Causes
from shardwright.planner.chain import Chain, SolvedChain
from shardwright.planner.clock import Clock, OutOfTimeError
from shardwright.planner.collector import collector_paused
from shardwright.planner.dataflow import Leaf
from shardwright.planner.descent import descend
from shardwright.planner.experts import expert_candidates, first_plan
from shardwright.planner.exposed import nodes_at, nodes_behind
from shardwright.planner.fitting import fitted
from shardwright.planner.force import Forced, check_force, forced, origin
from shardwright.planner.graph import Graph, free_nodes, with_views
from shardwright.planner.hiding import kept_promises
from shardwright.planner.meshes import given_mesh, meshes_to_search, refines
from shardwright.planner.pins import Requirement, allowed
from shardwright.planner.preference import MOST, Preference
from shardwright.planner.prices import Prices
from shardwright.planner.program import Program
from shardwright.planner.recompute import Recomputation
from shardwright.planner.relief import relieved
from shardwright.planner.rewrites import without_idle_views
from shardwright.planner.rewrites.variables import with_views as plan_with_views
from shardwright.planner.rule_mode import propagated
from shardwright.planner.strategies import StrategyBuilder, StrategySet
from shardwright.planner.verify import check_plan
from shardwright.plans import Candidate, CostSummary, InstructionPlan, MemorySummary, Mesh, Plan, VariablePlan
from shardwright.progress import PlanProgress

#: Seconds the integer program may take on one mesh.
TIME_LIMIT_S = 20.0

#: The largest program, in nodes, for which the plans that experts write are priced beside the search unless more
#: effort is asked for. In larger ones a mesh that another one refines is left out too, if the plan turns out to need
#: the finer one.
EXPERT_NODES = 2500

#: Most axes of the meshes that are searched outright unless more effort is asked for; and how often a plan with one
#: axis more is then descended from one of theirs.
SEARCHED_AXES = 2
DESCENTS = 4
ROUNDS_IF_LARGE = 1

#: Relative gap at which a plan that another one is descended from counts as found, where the program is large.
CLOSE_IF_LARGE = 1e-3

#: Part of the step time that a mesh must save over one tried before it, which has fewer axes or more data
#: parallelism: less is no difference that the cost model could tell.
LEAST_GAIN = 1e-3

Listener = Callable[[PlanProgress], None]


def plan(
    hlo: str | Module, cluster: Cluster, options: PlanOptions | None = None, *, progress: Listener | None = None
) -> Plan:
    """Plan one HLO module for a cluster.

    hlo: HLO text (or a parsed module). Without `options.mesh` every factorization of the
    devices into one or two axes is tried (three with `effort="best"`), those that are the same problem
    once. `progress` is called as planning goes on.

    Raises HloSyntaxError for text that is not HLO, OptionError for options that do not fit
    the program or the cluster, AnnotationError for pins that cannot hold, PlanError where no
    plan satisfies them together, MemoryBudgetError where none fits the devices.
    """
    with collector_paused():
        return Search(hlo, cluster, options or PlanOptions(), progress).run()


class Search:
    """One call of `plan`: the program and its pins are read once, then planned on mesh after mesh."""

    def __init__(
        self, hlo: str | Module, cluster: Cluster, options: PlanOptions, progress: Listener | None = None
    ) -> None:
        self.clock = Clock(options.deadline_s if options is not None else None)
        self._progress = progress
        self._best: Found | None = None
        self._incumbent_s = math.inf
        self._known = _Known()
        self.expert_prices: dict[tuple[int, str, Mesh], Candidate] = {}
        check_force(options)
        given_mesh(options, cluster.device_count)  # a mesh that cannot be is refused before anything is read
        self.report("parse")
        self.cluster = cluster
        self.options = options
        self.profile = hardware_profile(cluster.hardware)
        self.limit_bytes = memory_limit_bytes(options, cluster, self.profile)
        self.program = Program(hlo, options)
        self.flow = self.program.flow
        self.recomputation: Recomputation | None = None
        self.hidden_share = 1.0

    def run(self) -> Plan:
        self._know_a_plan()
        try:
            outcome = kept_promises(relieved(self.outcome()))
        except OutOfTimeError:
            outcome = self._known.outcome()
        self.clock.interrupts = False
        if self._known.is_faster_than(outcome):
            outcome.search, outcome.found = self._known.search or self, self._known.found
        return outcome.search.finish(outcome)

    def _know_a_plan(self) -> None:
        """A first plan at once. Not where something is forced, nor, if nobody is in a hurry, where that takes long."""
        if self.options.force is not None or self.options.mode != "search":
            return
        if self._is_large and self.options.deadline_s is None:
            return
        found = first_plan(self)
        if found is not None:
            self._incumbent_s = found.cost.step_s
            self._offer(found)
            self.report("search", str(found.mesh))

    def variant(self, again: Recomputation | None, micro_batches: int) -> Outcome:
        """What the search gives for the same program computing otherwise. Raises MicroBatchError besides what
        `outcome` raises."""
        self.report("rewrite", f"{len(again.instructions) if again else 0} again, {micro_batches} micro-batches")
        made = copy(self)
        made.program = self.program.computing(again, micro_batches)
        made.flow, made.recomputation = made.program.flow, again
        return made.outcome()

    def outcome(self) -> Outcome:
        """What every mesh gives, memory aside. PlanError or AnnotationError where none gives anything."""
        tried, refusals = self._try_meshes()
        if not tried:
            late = (each for each in refusals.values() if isinstance(each, OutOfTimeError))
            raise next(late, None) or next(iter(refusals.values()), PlanError("no mesh can be planned"))
        tried += self._finer(tried)
        return Outcome(search=self, tried=tried, refusals=refusals)

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

    def finish(self, outcome: Outcome) -> Plan:
        """The plan of an outcome, bounded and checked. MemoryBudgetError where it has none."""
        if outcome.found is None:
            raise outcome.refusal or PlanError("no mesh can be planned")
        self._best = self._bounded(outcome.found)
        self.report("check", str(self._best.mesh))
        made = self._assemble(self._best, (*self._candidates(outcome.tried, outcome.refusals), *outcome.others))
        made = replace(made, notes=(*made.notes, *outcome.notes))
        options = self.options
        module, made = without_idle_views(
            self.program.module, made, arguments=options.argument_views, outputs=options.output_views
        )
        check_plan(module, made)
        return replace(made, planning_s=self.clock.elapsed_s)

    def _try_meshes(self) -> tuple[list[Tried], dict[Mesh, PlanError | AnnotationError]]:
        """The fastest plan on every mesh, memory aside, in the order of the meshes; why there is none on the others."""
        tried: list[Tried] = []
        refusals: dict[Mesh, PlanError | AnnotationError] = {}
        for mesh in self._meshes():
            if self.clock.is_late and (tried or self.clock.interrupts):
                refusals[mesh] = OutOfTimeError("not tried: the deadline has passed")
                continue
            try:
                tried.append(self.on_mesh(mesh))
            except (PlanError, AnnotationError) as error:
                refusals[mesh] = error
                continue
            self._incumbent_s = min(self._incumbent_s, tried[-1].step_s)
            self.report("search", str(mesh))
        return tried, refusals

    def _finer(self, tried: Sequence[Tried]) -> list[Tried]:
        """Plans on meshes of three axes that refine the fastest plan's, descended from it and from others; one, where
        the program is large."""
        if not self._descends:
            return []
        fastest = min(tried, key=lambda each: each.step_s)
        meshes = [m for m in meshes_to_search(self.cluster, self.options, {}) if len(m.axes) == SEARCHED_AXES + 1]
        pairs = [
            (start, mesh)
            for mesh in meshes
            if refines(mesh, fastest.mesh)
            for start in tried
            if refines(mesh, start.mesh) and (len(start.mesh.axes) == SEARCHED_AXES or start is fastest)
        ]
        pairs.sort(key=lambda pair: pair[0] is not fastest)
        found: dict[Mesh, Tried] = {}
        for start, mesh in pairs[: 1 if self._is_large else DESCENTS]:
            if self.is_late():
                break
            self.report("search", str(mesh))
            descended = self._descended(start, mesh)
            if mesh not in found or descended.step_s < found[mesh].step_s:
                found[mesh] = descended
                self._incumbent_s = min(self._incumbent_s, descended.step_s)
        return list(found.values())

    def _descended(self, start: Tried, mesh: Mesh) -> Tried:
        prices = Prices(mesh, self.cluster, self.profile)
        fine = replace(start.chain.graph, prices=prices, builder=StrategyBuilder(prices), _sets={}, _least_s={})
        rounds = ROUNDS_IF_LARGE if self._is_large else None
        chain, solved = descend(
            start.chain, start.solved.states, fine, time_limit_s=self.time_limit_s(), most_rounds=rounds
        )
        free_s = start.step_s - start.solved.value
        return replace(start, mesh=mesh, step_s=solved.value + free_s, chain=chain, solved=solved, start=start)

    def _choose(self, outcome: Outcome, at_once: bool, below_s: float) -> Found | None:
        best: Found | None = None
        tried = outcome.tried
        for each in sorted(tried, key=lambda each: each.step_s * (1 + LEAST_GAIN * tried.index(each))):
            limit_s = below_s if best is None else min(below_s, best.cost.step_s * (1 - LEAST_GAIN))
            if each.step_s >= limit_s:
                break
            found = replace(self.found(each.chain, each.solved, each.notes), start=each.start)
            if self.needed_bytes(found) > self.limit_bytes:
                if at_once:
                    continue
                try:
                    found = replace(fitted(self, found, limit_s), start=each.start)
                except MemoryBudgetError as error:
                    outcome.refusals[each.mesh] = error
                    outcome.refusal = outcome.refusal or error
                    continue
            if found.cost.step_s < limit_s:
                best = found
                self._offer(found)
        return best

    def _candidates(
        self, tried: Sequence[Tried], refusals: Mapping[Mesh, PlanError | AnnotationError]
    ) -> tuple[Candidate, ...]:
        """What was tried, with its price; and the plans that experts write, where the program is small enough."""
        name = origin(self.options)
        found = {
            each.mesh: Candidate(mesh=each.mesh, step_s=each.step_s, name=name)
            for each in tried
            if each.mesh not in refusals
        }
        if self._best is not None:
            found[self._best.mesh] = Candidate(mesh=self._best.mesh, step_s=self._best.cost.step_s, name=name)
        refused = [Candidate(mesh=mesh, step_s=None, note=e.message, name=name) for mesh, e in refusals.items()]
        return (*found.values(), *refused, *self._experts())

    def _experts(self) -> tuple[Candidate, ...]:
        """The plans that are written by hand, priced by the same model."""
        if self.options.force is not None or self.options.mode != "search" or self.is_late():
            return ()
        if self._is_large and self.options.effort != "best":
            return ()
        return tuple(expert_candidates(self))

    def _meshes(self) -> tuple[Mesh, ...]:
        """Meshes in the order they are tried; three axes only where asked for."""
        found = meshes_to_search(self.cluster, self.options, self.program.pins)
        if self.options.effort == "best":
            return found
        found = tuple(mesh for mesh in found if len(mesh.axes) <= SEARCHED_AXES) or found
        if self.options.force is not None or not self._is_large:
            return found
        return tuple(mesh for mesh in found if not any(refines(fine, mesh) for fine in found if fine != mesh))

    def _coarser(self, found: Found) -> Mesh | None:
        """The mesh of one axis that was left out because the plan's own refines it, if the plan needs no more."""
        if len(found.mesh.axes) != SEARCHED_AXES or not self._is_large or self.options.force:
            return None
        joined = {
            frozenset(axes)
            for lies in found.decisions.lies
            for sharding in lies
            for axes in (*sharding.dims, sharding.unreduced)
        }
        if not joined <= {frozenset(), frozenset(found.mesh.sizes)}:
            return None
        meshes = meshes_to_search(self.cluster, self.options, self.program.pins)
        return next((mesh for mesh in meshes if len(mesh.axes) == 1 and refines(found.mesh, mesh)), None)

    @property
    def _is_large(self) -> bool:
        return len(self.flow.nodes) > EXPERT_NODES

    @property
    def _descends(self) -> bool:
        """Whether three axes are descended to. Not where axes have roles or names, which would have to be said anew
        of their parts, nor where three axes are searched outright."""
        options = self.options
        is_free = options.force is None and options.mesh is None and not self.program.pins
        return is_free and options.mode == "search" and options.effort == "default"

    def is_late(self) -> bool:
        """Whether the plan that is known has to do."""
        return self.clock.is_late and self.clock.interrupts

    def _offer(self, found: Found) -> None:
        """A plan that fits, which a deadline may leave with from now on; not one that keeps what was to be computed
        again."""
        if self.options.remat == "full" and self.recomputation is None:
            return
        self._known.offer(self, found)
        self.clock.interrupts = True

    def time_limit_s(self) -> float:
        """Seconds that the integer program may take now."""
        return self.clock.within(TIME_LIMIT_S)

    def report(self, phase: str, detail: str = "") -> None:
        best = self._best
        known_s = self._incumbent_s if self._incumbent_s < math.inf else 0.0
        if self._progress is not None:
            self._progress(
                PlanProgress(
                    phase=phase,
                    detail=detail,
                    incumbent_s=best.cost.step_s if best else known_s,
                    lower_bound_s=best.cost.lower_bound_s if best else 0.0,
                    elapsed_s=self.clock.elapsed_s,
                )
            )

    # ---- one mesh ------------------------------------------------------------
    def on_mesh(self, mesh: Mesh, close: float = 0.0) -> Tried:
        """The fastest plan on one mesh, memory aside, or one within a relative gap of `close`."""
        self.report("rules", str(mesh))
        force = forced(self.flow, self.program.arguments, self.options, mesh, self.program.batch)
        notes = list(self.flow.notes)
        chain = self.chain(mesh, force, force.in_place)
        self.report("search", str(mesh))
        try:
            solved = self._solved(chain, close)
        except PlanError:
            if not force.in_place:
                raise
            notes.append(f"force={self.options.force!r}: some state must be gathered where it is used")
            chain = self.chain(mesh, force, frozenset())
            solved = self._solved(chain, close)
        if isinstance(self.options.force, str) and self.options.force in _ALONG_THE_BATCH:
            notes += _whole_product_notes(decide(chain.graph, solved.states), self.options)
        return self.tried(chain, solved, notes)

    def tried(self, chain: Chain, solved: SolvedChain, notes: Sequence[str]) -> Tried:
        step_s = solved.value + chain.graph.least_of_free_s()
        return Tried(mesh=chain.graph.prices.mesh, step_s=step_s, chain=chain, solved=solved, notes=tuple(notes))

    def _solved(self, chain: Chain, close: float) -> SolvedChain:
        if self.options.mode == "propagate":
            return propagated(chain)
        least = CLOSE_IF_LARGE if self._is_large and self._descends else 0.0
        return chain.solve(self.time_limit_s(), max(close, least))

    def found(self, chain: Chain, solved: SolvedChain, notes: Sequence[str], price_bound_s: float = 0.0) -> Found:
        decisions = decide(chain.graph, solved.states)
        mesh = chain.graph.prices.mesh
        compute_s = compute_time_s(decisions)
        moved = communication(decisions)
        instructions = instruction_plans(decisions)
        parameters, outputs = variables(decisions, self.program.arguments, self.program.outputs)
        return Found(
            mesh=mesh,
            chain=chain,
            solved=solved,
            decisions=decisions,
            cost=CostSummary(
                compute_s=compute_s,
                communication_s=moved.waited_s,
                hidden_s=moved.hidden_s,
                lower_bound_s=0.0,
                bound_scope="",
            ),
            notes=tuple(notes),
            instructions=instructions,
            parameters=parameters,
            outputs=outputs,
            memory=memory(self.program.module, instructions, parameters, outputs, mesh, self.profile),
            price_bound_s=price_bound_s,
            promised_s=moved.hideable_s - moved.hidden_s,
        )

    def needed_bytes(self, found: Found) -> int:
        """What a device must have for a plan: the predicted peak and what the prediction may miss."""
        return required_bytes(found.memory, self.profile)

    def chain(self, mesh: Mesh, force: Forced, in_place: frozenset[int]) -> Chain:
        """The choice problem on one mesh, in segments."""
        prices = Prices(mesh, self.cluster, self.profile)
        builder = StrategyBuilder(prices)
        requirements = {
            node: (*self.program.pins.get(node, ()), *force.requirements.get(node, ()))
            for node in sorted({*self.program.pins, *force.requirements})
        }
        free = free_nodes(self.flow, requirements, with_stored=True)
        confinement = force.confinement(self.flow, free, builder)
        in_place = with_views(self.flow, in_place)
        extra: dict[int, Hashable] = dict.fromkeys(in_place, "in place")
        overlap, beside, behind = prices.topology.overlap, frozenset[Leaf](), frozenset[int]()
        if overlap:
            beside = self.program.gradients
            behind = nodes_behind(self.flow, beside) if self.hidden_share < 1 else behind
            extra |= {node: (extra.get(node), "beside") for node in nodes_at(self.flow, beside)}
            extra |= {node: (extra.get(node), "behind") for node in sorted(behind)}
        if confinement is not None:
            for node in self.flow.nodes:
                extra[node.index] = (extra.get(node.index), *confinement.key(node))
        structure = self.program.structure(requirements, extra)
        graph = Graph(
            layout=structure.layout,
            prices=prices,
            builder=builder,
            pinned=self._pinned(builder, requirements, mesh),
            in_place=in_place,
            arriving=self.program.arriving,
            confinement=confinement,
            beside=beside,
            exposed=1.0 - self.hidden_share * overlap,
            behind=behind,
            counted=self.hidden_share,
            clock=self.clock,
        )
        graph.preference = Preference(mesh.axes[0].name, graph.least_s(), len(self.flow.nodes))
        return Chain(graph=graph, instances=structure.instances, runs=structure.runs)

    def _pinned(
        self, builder: StrategyBuilder, requirements: dict[int, tuple[Requirement, ...]], mesh: Mesh
    ) -> dict[int, StrategySet]:
        """Strategies of the nodes that may not choose freely."""
        return {
            node: builder.of_shardings(allowed(self.flow, self.flow.nodes[node], asked, mesh, self._name(node)))
            for node, asked in requirements.items()
        }

    def _name(self, index: int) -> str:
        """What messages call a value."""
        flow = self.flow
        if index in flow.parameters:
            return f"argument {self.program.arguments[flow.parameters.index(index)]}"
        if index in flow.outputs:
            return f"output {self.program.outputs[flow.outputs.index(index)]}"
        instruction = flow.nodes[index].instruction
        return instruction.op_name or instruction.name

    def _bounded(self, found: Found) -> Found:
        """The same with a lower bound on what any plan on its mesh costs."""
        cost = found.cost
        if cost.bound_scope:  # a deadline cut the search short
            return found
        if self.options.mode == "propagate":
            return replace(found, cost=replace(cost, bound_scope="nothing was searched: the pins were propagated"))
        start = found.start or found
        bound_s = self._bound_s(start.chain, start.solved, found.price_bound_s if start is found else 0.0)
        bound_s = max((bound_s, *(self._bound_s(each.chain, each.solved) for each in found.relaxed)))
        scope = self._scope(start.chain)
        if start.mesh != found.mesh:
            scope += (
                f"; this plan divides its axes further, which that bound (of {bound_s * 1e3:.4g} ms) does not cover: "
                'effort="best" searches three axes outright'
            )
        return replace(found, cost=replace(cost, lower_bound_s=min(bound_s, cost.step_s), bound_scope=scope))

    def _bound_s(self, chain: Chain, solved: SolvedChain, price_bound_s: float = 0.0) -> float:
        bound_s = price_bound_s or solved.rolled_bound
        if chain.runs and not price_bound_s:
            bound_s = lower_bound(chain, self.time_limit_s())
        return bound_s + chain.graph.least_of_free_s() - MOST * chain.graph.least_s()

    def _scope(self, chain: Chain) -> str:
        """What the bound is of: no plan within this scope is cheaper, by this cost model."""
        forced_by = f" that {origin(self.options).removeprefix('forced: ')} leaves" if self.options.force else ""
        again = f"these {len(self.recomputation.instructions)} values computed again, " if self.recomputation else ""
        again += f"{self.program.micro_batches} micro-batches, " if self.program.micro_batches > 1 else ""
        return (
            f"on mesh {chain.graph.prices.mesh}, {again}one factor or none per axis and instruction{forced_by}, "
            f"{len(self.flow.nodes)} decisions in {len(chain.instances)} segments of {chain.kind_count} kinds; sums "
            "are reduced before the next product, a value has one layout for its readers besides the one it is made "
            "in"
            + (
                f"; {chain.graph.exposed:.0%} of the time that gradients move is priced, the rest is hidden"
                if chain.graph.exposed < 1
                else ", nothing overlaps"
            )
        )

    def _assemble(self, found: Found, candidates: tuple[Candidate, ...]) -> Plan:
        decisions, program = found.decisions, self.program
        made = Plan(
            module_name=program.module.name,
            hlo_sha256=hashlib.sha256(program.text.encode()).hexdigest(),
            mesh=found.mesh,
            hardware=self.profile.name,
            origin=origin(self.options),
            instructions=found.instructions,
            parameters=found.parameters,
            outputs=found.outputs,
            collectives=planned_collectives(decisions, Causes(self.flow, program.arguments, program.outputs)),
            cost=found.cost,
            memory=found.memory,
            candidates=candidates,
            segments=segment_plans(decisions, found.chain),
            recomputed=self.recomputation.segments if self.recomputation else (),
            micro_batches=program.micro_batches,
            notes=(*found.notes, *_replicated_notes(found.instructions)),
            hlo_text=program.text,
        )
        original = hashlib.sha256(program.original_text.encode()).hexdigest()
        return plan_with_views(made, program.rewritten, program.original, original)


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What planning one program on every mesh gave; a plan that fits, or why there is none.

    others: what planning the same program otherwise gave. notes: what else is to be said of that.
    """

    search: Search
    tried: list[Tried]
    refusals: dict[Mesh, PlanError | AnnotationError]
    found: Found | None = None
    refusal: MemoryBudgetError | None = None
    others: list[Candidate] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def step_s(self) -> float:
        """Seconds a step of the plan that fits."""
        return math.inf if self.found is None else self.found.cost.step_s


@dataclass(slots=True)
class _Known:
    """The fastest plan so far that fits, of whatever variant of the program: what a deadline leaves."""

    search: Search | None = None
    found: Found | None = None

    def offer(self, search: Search, found: Found) -> None:
        if self.found is None or found.cost.step_s < self.found.cost.step_s:
            self.search, self.found = search, found

    def is_faster_than(self, outcome: Outcome) -> bool:
        return self.found is not None and (
            outcome.found is None or self.found.cost.step_s < outcome.found.cost.step_s * (1 - LEAST_GAIN)
        )

    def outcome(self) -> Outcome:
        assert self.search is not None
        return Outcome(search=self.search, tried=[], refusals={}, found=self.found)


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

    promised_s: seconds a step that the search took to run beside compute, and that find nothing to run beside.
    start: the plan on a coarser mesh from which it was descended, if it was. relaxed: other searches on its mesh, or
    the start's, whose bounds hold too.
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
    price_bound_s: float = 0.0
    promised_s: float = 0.0
    start: Tried | None = None
    relaxed: tuple[Tried, ...] = ()


#: Forced strategies that promise to compute along the batch.
_ALONG_THE_BATCH = frozenset({"data", "zero1", "fsdp", "mixed"})


def _whole_product_notes(decisions: Decisions, options: PlanOptions) -> list[str]:
    """What a strategy that splits the batch computes whole on every device all the same."""
    axis = decisions.graph.prices.mesh.axes[0]
    whole = []
    for node in decisions.graph.flow.nodes:
        if node.is_value or not node.weight or node.instruction.opcode not in {"dot", "convolution"}:
            continue
        strategy = decisions.strategies[node.index]
        split = {name for s in (*strategy.operands, *strategy.results) for name in s.axes}
        if axis.size > 1 and axis.name not in split:
            whole.append(node.instruction.name)
    if not whole:
        return []
    note = (
        f"force={options.force!r}: {len(whole)} products ({whole[0]}, …) are computed whole on all {axis.size} devices "
        f"of axis {axis.name!r}: no dimension of theirs that these divide runs along the batch"
    )
    return [note]


def _replicated_notes(instructions: tuple[InstructionPlan, ...]) -> list[str]:
    """`3 × cholesky: no strategy rule…`, one note per opcode and reason."""
    counts = Counter((entry.opcode, entry.reason) for entry in instructions if entry.reason)
    return [f"{count} × {opcode}: {reason}" for (opcode, reason), count in sorted(counts.items())]
