"""The search: every candidate mesh is planned, the fastest plan is kept."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwright.cluster import Cluster
from shardwright.config import PlanOptions
from shardwright.cost import hardware_profile, memory, required_bytes
from shardwright.cost.memory import shard_bytes
from shardwright.cost.profiles import memory_limit_bytes
from shardwright.errors import AnnotationError, MemoryBudgetError, OptionError, PlanError
from shardwright.hlo import Module
from shardwright.planner.assemble import (
    Decisions,
    arrival_time_s,
    compute_time_s,
    decide,
    instruction_plans,
    planned_collectives,
    segment_plans,
    variables,
)
from shardwright.planner.bound import lower_bound
from shardwright.planner.budget import Memory, Peak, Price, breakdown
from shardwright.planner.causes import Causes
from shardwright.planner.chain import Chain, SolvedChain
from shardwright.planner.collector import collector_paused
from shardwright.planner.descent import descend
from shardwright.planner.exact_fit import fit_exactly
from shardwright.planner.force import Forced, check_force, forced, origin
from shardwright.planner.graph import Graph, Variable, free_nodes, with_views
from shardwright.planner.meshes import given_mesh, meshes_to_search, refines
from shardwright.planner.pins import Requirement, allowed
from shardwright.planner.preference import MOST, Preference
from shardwright.planner.prices import Prices
from shardwright.planner.program import Program
from shardwright.planner.rewrites import without_idle_views
from shardwright.planner.rewrites.variables import with_views as plan_with_views
from shardwright.planner.rule_mode import propagated
from shardwright.planner.strategies import StrategyBuilder, StrategySet
from shardwright.planner.verify import check_plan
from shardwright.plans import Candidate, CostSummary, InstructionPlan, MemorySummary, Mesh, Plan, VariablePlan
from shardwright.progress import PlanProgress

#: Seconds the integer program may take on one mesh.
TIME_LIMIT_S = 20.0

#: Plans that experts write, as forced strategies on the meshes that these take, and the largest program, in nodes,
#: for which they are priced beside the search unless more effort is asked for. In larger ones a mesh that another one
#: refines is left out too, if the plan turns out to need the finer one.
EXPERTS = {
    "data parallel": "data",
    "fully sharded (ZeRO-3)": "fsdp",
    "tensor parallel": "tensor",
    "data × tensor": "mixed",
    "replicated": "replicated",
}
EXPERT_NODES = 2500

#: Seconds that it always may, however late it is.
LEAST_TIME_LIMIT_S = 0.5

#: Most axes of the meshes that are searched outright unless more effort is asked for; and how often a plan with one
#: axis more is then descended from one of theirs.
SEARCHED_AXES = 2
DESCENTS = 4

#: Part of the step time that a mesh must save over one tried before it, which has fewer axes or more data
#: parallelism: less is no difference that the cost model could tell.
LEAST_GAIN = 1e-3

#: The first price of a byte that is tried, as a part of what the plan's own bytes would cost at its own time; then
#: prices that are tried where memory binds, and the ratio of two at which they are close enough.
LEAST_PRICE = 1e-3
MOST_PRICES = 14
CLOSE_PRICES = 1.3


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
        self._start = time.perf_counter()
        self._progress = progress
        self._best: _Found | None = None
        self._incumbent_s = 0.0
        check_force(options)
        given_mesh(options, cluster.device_count)  # a mesh that cannot be is refused before anything is read
        self._report("parse")
        self.cluster = cluster
        self.options = options
        self.profile = hardware_profile(cluster.hardware)
        self.limit_bytes = memory_limit_bytes(options, cluster, self.profile)
        self.program = Program(hlo, options)
        self.flow = self.program.flow

    def run(self) -> Plan:
        tried, refusals = self._try_meshes()
        if not tried:
            raise next(iter(refusals.values()), PlanError("no mesh can be planned"))
        tried += self._finer(tried)
        found = self.choose(tried, refusals)
        coarser = self._coarser(found)
        if coarser is not None:
            tried.append(self.on_mesh(coarser))
            found = self.choose(tried, refusals)
        self._best = self._bounded(found)
        self._report("check", str(self._best.mesh))
        made = self._assemble(self._best, self._candidates(tried, refusals))
        module, made = without_idle_views(self.program.module, made)
        check_plan(module, made)
        return replace(made, planning_s=time.perf_counter() - self._start)

    def _try_meshes(self) -> tuple[list[_Tried], dict[Mesh, PlanError | AnnotationError]]:
        """The fastest plan on every mesh, memory aside, in the order of the meshes; why there is none on the others."""
        tried: list[_Tried] = []
        refusals: dict[Mesh, PlanError | AnnotationError] = {}
        for mesh in self._meshes():
            if tried and self._is_late():
                refusals[mesh] = PlanError("not tried: the deadline has passed")
                continue
            try:
                tried.append(self.on_mesh(mesh))
            except (PlanError, AnnotationError) as error:
                refusals[mesh] = error
                continue
            self._incumbent_s = min(each.step_s for each in tried)
            self._report("search", str(mesh))
        return tried, refusals

    def _finer(self, tried: Sequence[_Tried]) -> list[_Tried]:
        """Plans on meshes of three axes that refine the fastest plan's, descended from it and from others.

        Where the program is large, one. Not where axes have roles or names, which would have to
        be said anew of their parts, nor where three axes were searched outright.
        """
        options = self.options
        if options.force is not None or options.mode != "search" or options.mesh is not None or self.program.pins:
            return []
        if options.effort != "default":
            return []
        fastest = min(tried, key=lambda each: each.step_s)
        meshes = [m for m in meshes_to_search(self.cluster, options, {}) if len(m.axes) == SEARCHED_AXES + 1]
        pairs = [
            (start, mesh)
            for mesh in meshes
            if refines(mesh, fastest.mesh)
            for start in tried
            if refines(mesh, start.mesh) and (len(start.mesh.axes) == SEARCHED_AXES or start is fastest)
        ]
        pairs.sort(key=lambda pair: pair[0] is not fastest)
        found: dict[Mesh, _Tried] = {}
        for start, mesh in pairs[: 1 if len(self.flow.nodes) > EXPERT_NODES else DESCENTS]:
            if self._is_late():
                break
            self._report("search", str(mesh))
            descended = self._descended(start, mesh)
            if mesh not in found or descended.step_s < found[mesh].step_s:
                found[mesh] = descended
                self._incumbent_s = min(self._incumbent_s, descended.step_s)
        return list(found.values())

    def _descended(self, start: _Tried, mesh: Mesh) -> _Tried:
        prices = Prices(mesh, self.cluster, self.profile)
        fine = replace(start.chain.graph, prices=prices, builder=StrategyBuilder(prices), _sets={})
        chain, solved = descend(start.chain, start.solved.states, fine, self._time_limit_s())
        free_s = start.step_s - start.solved.value
        return replace(start, mesh=mesh, step_s=solved.value + free_s, chain=chain, solved=solved, start=start)

    def choose(self, tried: Sequence[_Tried], refusals: dict[Mesh, PlanError | AnnotationError]) -> _Found:
        """The fastest plan that fits the memory. MemoryBudgetError, of the mesh that needs least, where none does."""
        best: _Found | None = None
        refusal: MemoryBudgetError | None = None
        for each in sorted(tried, key=lambda each: each.step_s * (1 + LEAST_GAIN * tried.index(each))):
            if best is not None and each.step_s >= best.cost.step_s * (1 - LEAST_GAIN):
                break
            try:
                found = replace(self._fitted(self.found(each.chain, each.solved, each.notes)), start=each.start)
            except MemoryBudgetError as error:
                refusals[each.mesh] = error
                refusal = refusal or error
                continue
            if best is None or found.cost.step_s < best.cost.step_s * (1 - LEAST_GAIN):
                best = found
        if best is None:
            raise refusal or PlanError("no mesh can be planned")
        return best

    def _candidates(
        self, tried: Sequence[_Tried], refusals: Mapping[Mesh, PlanError | AnnotationError]
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
        if self.options.force is not None or self.options.mode != "search" or self._is_late():
            return ()
        if len(self.flow.nodes) > EXPERT_NODES and self.options.effort != "best":
            return ()
        return tuple(candidate for name, force in EXPERTS.items() for candidate in expert_candidates(self, name, force))

    def _meshes(self) -> tuple[Mesh, ...]:
        """Meshes in the order they are tried; three axes only where asked for."""
        found = meshes_to_search(self.cluster, self.options, self.program.pins)
        if self.options.effort == "best":
            return found
        found = tuple(mesh for mesh in found if len(mesh.axes) <= SEARCHED_AXES) or found
        if self.options.force is not None or len(self.flow.nodes) <= EXPERT_NODES:
            return found
        return tuple(mesh for mesh in found if not any(refines(fine, mesh) for fine in found if fine != mesh))

    def _coarser(self, found: _Found) -> Mesh | None:
        """The mesh of one axis that was left out because the plan's own refines it, if the plan needs no more."""
        if len(found.mesh.axes) != SEARCHED_AXES or len(self.flow.nodes) <= EXPERT_NODES or self.options.force:
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

    def _is_late(self) -> bool:
        deadline_s = self.options.deadline_s
        return deadline_s is not None and time.perf_counter() - self._start > deadline_s

    def _time_limit_s(self) -> float:
        """Seconds that the integer program may take now."""
        deadline_s = self.options.deadline_s
        if deadline_s is None:
            return TIME_LIMIT_S
        return min(TIME_LIMIT_S, max(deadline_s - (time.perf_counter() - self._start), LEAST_TIME_LIMIT_S))

    def _report(self, phase: str, detail: str = "") -> None:
        best = self._best
        if self._progress is not None:
            self._progress(
                PlanProgress(
                    phase=phase,
                    detail=detail,
                    incumbent_s=best.cost.step_s if best else self._incumbent_s,
                    lower_bound_s=best.cost.lower_bound_s if best else 0.0,
                    elapsed_s=time.perf_counter() - self._start,
                )
            )

    # ---- one mesh ------------------------------------------------------------
    def on_mesh(self, mesh: Mesh) -> _Tried:
        """The fastest plan on one mesh, memory aside."""
        self._report("rules", str(mesh))
        force = forced(self.flow, self.program.arguments, self.options, mesh, self.program.batch)
        notes = list(self.flow.notes)
        chain = self.chain(mesh, force, force.in_place)
        self._report("search", str(mesh))
        try:
            solved = self._solved(chain)
        except PlanError:
            if not force.in_place:
                raise
            notes.append(f"force={self.options.force!r}: some state must be gathered where it is used")
            chain = self.chain(mesh, force, frozenset())
            solved = self._solved(chain)
        if isinstance(self.options.force, str) and self.options.force in _ALONG_THE_BATCH:
            notes += _whole_product_notes(decide(chain.graph, solved.states), self.options)
        step_s = solved.value + chain.graph.least_of_free_s()
        return _Tried(mesh=mesh, step_s=step_s, chain=chain, solved=solved, notes=tuple(notes))

    def _solved(self, chain: Chain) -> SolvedChain:
        if self.options.mode == "propagate":
            return propagated(chain)
        return chain.solve(self._time_limit_s())

    def found(self, chain: Chain, solved: SolvedChain, notes: Sequence[str], price_bound_s: float = 0.0) -> _Found:
        decisions = decide(chain.graph, solved.states)
        mesh = chain.graph.prices.mesh
        compute_s = compute_time_s(decisions)
        communication_s = sum(collective.time_s for collective in planned_collectives(decisions))
        communication_s += arrival_time_s(decisions)
        instructions = instruction_plans(decisions)
        parameters, outputs = variables(decisions, self.program.arguments, self.program.outputs)
        return _Found(
            mesh=mesh,
            chain=chain,
            solved=solved,
            decisions=decisions,
            cost=CostSummary(compute_s=compute_s, communication_s=communication_s, lower_bound_s=0.0, bound_scope=""),
            notes=tuple(notes),
            instructions=instructions,
            parameters=parameters,
            outputs=outputs,
            memory=memory(self.program.module, instructions, parameters, outputs, mesh, self.profile),
            price_bound_s=price_bound_s,
        )

    # ---- memory ----------------------------------------------------------------
    def _fitted(self, found: _Found) -> _Found:
        """`found`, or the fastest plan that fits: the price of a byte is raised until one does, then lowered again.

        Raises MemoryBudgetError where none does.
        """
        if self.needed_bytes(found) <= self.limit_bytes:
            return found
        model = self.program.memory(self.profile, found.chain.graph.layout.hubs)
        peaks = [model.peak(found.decisions)]
        low, high, best, least = 0.0, 0.0, None, found
        bound_s = 0.0
        price = LEAST_PRICE * found.cost.step_s / found.memory.peak_bytes
        for _ in range(MOST_PRICES):
            terms = Price(peaks=tuple((peak, price / len(peaks)) for peak in peaks))
            chain = found.chain.with_price(terms)
            solved = chain.solve(self._time_limit_s())
            bound_s = max(bound_s, solved.rolled_bound - price * self.limit_bytes)
            tried = self.found(found.chain, solved, found.notes, bound_s)
            least = min(least, tried, key=self.needed_bytes)
            if self.needed_bytes(tried) <= self.limit_bytes:
                best = tried if best is None or tried.cost.step_s < best.cost.step_s else best
                high = price
            else:
                low = price
                peak = model.peak(tried.decisions)
                peaks = [*peaks[-2:], peak] if peak not in peaks else peaks
            if high and high < low * CLOSE_PRICES:
                break
            price = (low * high) ** 0.5 if low and high else (high / 8 if high else low * 8)
        exact = self._fitted_exactly(found, model, peaks)
        if exact is not None:
            return exact
        if best is None:
            raise self._too_large(least)
        return replace(best, price_bound_s=bound_s)

    def needed_bytes(self, found: _Found) -> int:
        """What a device must have for a plan: the predicted peak and what the prediction may miss."""
        return required_bytes(found.memory, self.profile)

    def _fitted_exactly(self, found: _Found, model: Memory, peaks: Sequence[Peak]) -> _Found | None:
        """The fastest plan that fits, where the program is small enough to solve whole. Else, or if none fits, None."""

        def judge(states: Mapping[Variable, int]) -> tuple[bool, Peak]:
            tried = self.found(found.chain, SolvedChain(states=dict(states), value=0.0, rolled_bound=0.0), found.notes)
            return self.needed_bytes(tried) <= self.limit_bytes, model.peak(tried.decisions)

        solved = fit_exactly(found.chain, self.limit_bytes, peaks, judge, self._time_limit_s())
        return None if solved is None else self.found(found.chain, solved, found.notes, solved.rolled_bound)

    def _too_large(self, least: _Found) -> MemoryBudgetError:
        """What is needed, what dominates, and what would help."""
        needed, limit = self.needed_bytes(least), self.limit_bytes
        state = sum(
            shard_bytes(v.element_type, v.stored_shape, v.stored_sharding, least.mesh)
            for v in least.parameters
            if v.alias is not None
        )
        parts = breakdown(
            {
                "state": state,
                "other arguments and results": least.memory.arguments_bytes - state + least.memory.outputs_bytes,
            },
            least.memory.temporaries_bytes,
        )
        devices = self.cluster.device_count
        enough = -(-devices * needed // limit)
        return MemoryBudgetError(
            f"no plan over {least.mesh} fits {limit / 2**30:.2f} GiB a device: the least that was found needs "
            f"{needed / 2**30:.2f} GiB ({parts}), at {least.cost.step_s * 1e3:.3g} ms a step",
            where="memory_budget",
            remedy=f"allow {needed / 2**30:.2f} GiB, use about {enough} devices, or make the batch smaller",
        )

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
        if confinement is not None:
            for node in self.flow.nodes:
                extra[node.index] = (node.index in in_place, *confinement.key(node))
        structure = self.program.structure(requirements, extra)
        graph = Graph(
            layout=structure.layout,
            prices=prices,
            builder=builder,
            pinned=self._pinned(builder, requirements, mesh),
            in_place=in_place,
            arriving=self.program.arriving,
            confinement=confinement,
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

    def _bounded(self, found: _Found) -> _Found:
        """The same with a lower bound on what any plan on its mesh costs."""
        cost = found.cost
        if self.options.mode == "propagate":
            return replace(found, cost=replace(cost, bound_scope="nothing was searched: the pins were propagated"))
        if found.start is None:
            bound_s = self._bound_s(found.chain, found.solved, found.price_bound_s)
            scope = _scope(found.chain, self.options, len(self.flow.nodes))
        else:
            bound_s = self._bound_s(found.start.chain, found.start.solved)
            scope = _scope(found.start.chain, self.options, len(self.flow.nodes)) + (
                f"; this plan divides its axes further, which that bound (of {bound_s * 1e3:.4g} ms) does not cover: "
                'effort="best" searches three axes outright'
            )
        return replace(found, cost=replace(cost, lower_bound_s=min(bound_s, cost.step_s), bound_scope=scope))

    def _bound_s(self, chain: Chain, solved: SolvedChain, price_bound_s: float = 0.0) -> float:
        bound_s = price_bound_s or solved.rolled_bound
        if chain.runs and not price_bound_s:
            bound_s = lower_bound(chain, self._time_limit_s())
        return bound_s + chain.graph.least_of_free_s() - MOST * chain.graph.least_s()

    def _assemble(self, found: _Found, candidates: tuple[Candidate, ...]) -> Plan:
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
            notes=(*found.notes, *_replicated_notes(found.instructions)),
            hlo_text=program.text,
        )
        original = hashlib.sha256(program.original_text.encode()).hexdigest()
        return plan_with_views(made, program.rewritten, program.original, original)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tried:
    """The fastest plan on one mesh: its states, and what it costs but for what is made anew for readers.

    start: the plan on a coarser mesh from which it was descended, if it was.
    """

    mesh: Mesh
    step_s: float
    chain: Chain
    solved: SolvedChain
    notes: tuple[str, ...]
    start: _Tried | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A plan on one mesh, before it is bounded and written down."""

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
    start: _Tried | None = None


def expert_candidates(search: Search, name: str, force: str) -> Iterator[Candidate]:
    """What a forced strategy costs on each mesh that it takes, by the objective of the search."""
    options = replace(search.options, force=force, mode="search")
    try:
        meshes = meshes_to_search(search.cluster, options, search.program.pins)
    except OptionError:
        return
    for mesh in meshes:
        if len(mesh.axes) > SEARCHED_AXES:
            continue
        try:
            wanted = forced(search.flow, search.program.arguments, options, mesh, search.program.batch)
        except OptionError:  # a strategy that needs more axes than the given mesh has
            continue
        for in_place in dict.fromkeys((wanted.in_place, frozenset())):
            try:
                chain = search.chain(mesh, wanted, in_place)
                value = chain.solve(LEAST_TIME_LIMIT_S).value + chain.graph.least_of_free_s()
            except (PlanError, AnnotationError) as error:
                if not in_place:
                    yield Candidate(mesh=mesh, step_s=None, note=error.message, name=name)
                continue
            yield Candidate(mesh=mesh, step_s=value, name=name)
            break


def _scope(chain: Chain, options: PlanOptions, nodes: int) -> str:
    """What the bound is of: no plan within this scope is cheaper, by this cost model."""
    forced_by = "" if options.force is None else f" that {origin(options).removeprefix('forced: ')} leaves"
    return (
        f"on mesh {chain.graph.prices.mesh}, one factor or none per axis and instruction{forced_by}, "
        f"{nodes} decisions in {len(chain.instances)} segments of {chain.kind_count} kinds; sums are reduced before "
        "the next product, a value has one layout for its readers besides the one it is made in, nothing overlaps"
    )


#: Forced strategies that promise to compute along the batch.
_ALONG_THE_BATCH = frozenset({"data", "fsdp", "mixed"})


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
