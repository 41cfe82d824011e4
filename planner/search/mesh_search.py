"""The search on one mesh: choice problem, solution, and evaluated plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace

from shardwright.clusters.cluster import Cluster
from shardwright.cost import bytes_with_margin, hardware_profile, predict_memory_and_peak
from shardwright.cost.profiles import memory_limit_bytes
from shardwright.errors import PlanError
from shardwright.hlo import Module
from shardwright.options.plan_options import PlanOptions
from shardwright.planner.clock import Clock
from shardwright.planner.constraints.carried import CarriedDecisions, CarriedPlan
from shardwright.planner.constraints.confine import Confinement
from shardwright.planner.constraints.forced import ForcedStrategy, check_force
from shardwright.planner.constraints.pins import Requirement, array_name, satisfying_shardings
from shardwright.planner.costs.prices import Prices
from shardwright.planner.costs.relaxed_prices import RelaxedPrices
from shardwright.planner.graph.dataflow import Leaf
from shardwright.planner.graph.source import Source
from shardwright.planner.limits import SearchLimits
from shardwright.planner.memory.constraint import MemoryModel
from shardwright.planner.memory.lagrangian import LagrangianSearch
from shardwright.planner.memory.recompute import Recomputation
from shardwright.planner.mixtures import Blocks
from shardwright.planner.plans.assemble import Decisions, build_instruction_plans, build_variable_plans, decide
from shardwright.planner.plans.collectives import communication, total_own_times_s
from shardwright.planner.rules import axes_on
from shardwright.planner.search.manual_meshes import check_manual_axes
from shardwright.planner.search.meshes import mesh_from_options
from shardwright.planner.search.program import Program
from shardwright.planner.search.sharding_propagation import propagate_shardings
from shardwright.planner.search.solutions import CandidatePlan, MeshSolution
from shardwright.planner.search.tuning import FAST_GAP_TOLERANCE, LARGE_GAP_TOLERANCE, MIN_GAIN
from shardwright.planner.segments.combinable_collectives import combinable_bytes_by_node
from shardwright.planner.segments.cost_graph import CostGraph
from shardwright.planner.segments.neighborhood_cache import NeighborhoodCache
from shardwright.planner.segments.overlap import nodes_at
from shardwright.planner.segments.segment_chain import Chain, ChainSolution
from shardwright.planner.segments.variables import with_views
from shardwright.planner.strategies.relaxed_strategies import RelaxedStrategyBuilder
from shardwright.planner.strategies.strategy_set import StrategyBuilder, StrategySet
from shardwright.planner.strategies.tie_break import TieBreak
from shardwright.planner.tuning import EXACT_RANK
from shardwright.plans.plan import CostSummary
from shardwright.plans.shardings import Mesh
from shardwright.progress import PlanProgress

Listener = Callable[[PlanProgress], None]


class MeshSearch:
    """The program and its pins, read once; solves any single mesh.

    lagrangian_search: fits a plan to the memory; subclasses may fit it otherwise.
    """

    lagrangian_search: type[LagrangianSearch] = LagrangianSearch

    def __init__(
        self,
        hlo: str | Module | Source,
        cluster: Cluster,
        options: PlanOptions,
        progress: Listener | None = None,
        clock: Clock | None = None,
        *,
        limits: SearchLimits = SearchLimits(),
        carried: CarriedPlan | None = None,
        blocks: Blocks | None = None,
    ) -> None:
        self.limits = limits
        self.carried = carried
        self.clock = clock or Clock(options.deadline_s)
        self._progress = progress
        self._reported_plan: CandidatePlan | None = None
        self._incumbent_s = math.inf
        check_force(options)
        given = mesh_from_options(options, cluster.device_count)  # an impossible mesh is refused before parsing
        self.report("parse")
        self.cluster = cluster
        self.options = options
        self.profile = hardware_profile(cluster.hardware).with_bucket(options.bucket_bytes)
        self.limit_bytes = memory_limit_bytes(options, cluster, self.profile)
        self.program = Program(hlo, options, self.profile, self.clock, blocks=blocks)
        if given is not None and self.program.rules.inside.places:
            check_manual_axes(given, self.program.rules.inside)
        self.clock.record_build_time(
            self.clock.elapsed_s
        )  # initial estimate: building a plan takes about as long as parsing
        self.flow = self.program.flow
        self.recomputation: Recomputation | None = None
        self.hidden_share = 1.0
        self._strategies: dict[Mesh, StrategyBuilder] = {}

    @property
    def is_large(self) -> bool:
        return len(self.flow.nodes) > self.limits.large_program_nodes

    @property
    def is_fast(self) -> bool:
        """Whether one mesh is searched and its first feasible plan taken, without bounding or improving it."""
        return self.options.effort == "fast" and self.options.mode == "search"

    @property
    def chose_offload(self) -> bool:
        """Whether the search, not the user, put optimizer state on the host."""
        return self.options.offload == "auto" and bool(self.program.on_host)

    @property
    def refines_to_three_axes(self) -> bool:
        """Whether plans are refined to three axes. Not with axis roles or names, undefined on the parts of an axis.
        Also when three axes are searched outright: in a large program the descent may end at a better plan."""
        options = self.options
        is_free = options.force is None and options.mesh is None and not self.program.pins
        return is_free and options.mode == "search" and not self.is_fast

    @property
    def simplicity_tolerance(self) -> float:
        """Relative excess of a simpler plan's step, at most; 0 where the step alone decides."""
        return self.limits.simplicity_tolerance if self.options.simple else 0.0

    @property
    def min_gain(self) -> float:
        """Minimum relative gain over an earlier plan, of fewer axes mostly; 0 where the step alone decides."""
        return MIN_GAIN if self.options.simple else 0.0

    def must_stop(self) -> bool:
        """Whether the search must stop with its current result: a plan, or infeasibility."""
        return self.clock.must_stop

    def time_limit_s(self) -> float:
        """Seconds left until the deadline, the time limit of an integer program; infinite without a deadline."""
        return self.clock.time_left_s(math.inf)

    def report(self, phase: str, detail: str = "") -> None:
        best = self._reported_plan
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

    @property
    def reported_plan(self) -> CandidatePlan | None:
        """The last reported plan: the result of an improvement step cut off by the deadline."""
        return self._reported_plan

    def report_plan(self, plan: CandidatePlan) -> None:
        """Report a feasible plan with its bound so far, now and in later reports."""
        self._reported_plan = plan
        self.report("search", str(plan.mesh))

    def solve_mesh(self, mesh: Mesh, close: float = 0.0) -> MeshSolution:
        """The fastest plan on one mesh, memory aside, within a relative gap of `close`."""
        self.report("rules", str(mesh))
        force = self.program.resolve_force(self.options, mesh)
        notes = list(self.flow.notes)
        chain = self.build_chain(mesh, force, force.in_place)
        self.report("search", str(mesh))
        try:
            solved = self._solve_chain(chain, close)
        except PlanError:
            if not force.in_place:
                raise
            notes.append(f"force={self.options.force!r}: some state must be gathered where it is used")
            chain = self.build_chain(mesh, force, frozenset())
            solved = self._solve_chain(chain, close)
        if _runs_along_batch(self.options):
            notes += _note_unsplit_products(decide(chain.graph, solved.states), self.options)
        return self.to_mesh_solution(chain, solved, notes)

    def to_mesh_solution(self, chain: Chain, solved: ChainSolution, notes: Sequence[str]) -> MeshSolution:
        step_s = solved.value + chain.graph.min_recompute_s()
        return MeshSolution(
            mesh=chain.graph.prices.mesh, step_s=step_s, chain=chain, solution=solved, notes=tuple(notes)
        )

    def predict_step_s(self, solution: MeshSolution) -> float:
        """Seconds a step of a solution's plan: combined collectives share a latency, overlap ends with the compute."""
        decisions = decide(solution.chain.graph, solution.solution.states)
        return sum(total_own_times_s(decisions)) + communication(decisions).exposed_s

    def _solve_chain(self, chain: Chain, close: float) -> ChainSolution:
        if self.options.mode == "propagate":
            return propagate_shardings(chain)
        least = (
            LARGE_GAP_TOLERANCE
            if self.is_large and self.refines_to_three_axes
            else FAST_GAP_TOLERANCE
            if self.is_fast
            else 0.0
        )
        return chain.solve(self.time_limit_s(), max(close, least))

    def evaluate(self, chain: Chain, solved: ChainSolution, notes: Sequence[str]) -> CandidatePlan:
        self.clock.check(self.clock.plan_build_s)
        begun_s = self.clock.elapsed_s
        decisions = decide(chain.graph, solved.states)
        mesh = chain.graph.prices.mesh
        own = total_own_times_s(decisions)
        moved = communication(decisions)
        instructions = build_instruction_plans(decisions)
        parameters, outputs = build_variable_plans(decisions, self.program.arguments, self.program.outputs)
        predicted = predict_memory_and_peak(self.program.module, instructions, parameters, outputs, mesh, self.profile)
        self.clock.record_build_time(self.clock.elapsed_s - begun_s)
        return CandidatePlan(
            mesh=mesh,
            chain=chain,
            solution=solved,
            decisions=decisions,
            cost=CostSummary(
                compute_s=own.compute_s,
                transfers_s=own.transfers_s,
                communication_s=moved.exposed_s,
                hidden_s=moved.hidden_s,
                lower_bound_s=0.0,
                bound_scope="",
            ),
            notes=tuple(notes),
            instructions=instructions,
            parameters=parameters,
            outputs=outputs,
            memory=predicted.summary,
            live_buffers=predicted.held,
            stored_leaves=predicted.stored,
            overlap_excess_s=moved.promised_s,
        )

    def bytes_needed(self, plan: CandidatePlan) -> int:
        """Device memory a plan needs, bytes: predicted peak plus margin."""
        return bytes_with_margin(plan.memory, self.profile)

    def fits(self, plan: CandidatePlan) -> bool:
        """Whether a plan's memory need is within the limit."""
        return self.bytes_needed(plan) <= self.limit_bytes

    def memory_model(self, hubs: Iterable[Leaf]) -> MemoryModel:
        """Memory model of the program, with the margin required of feasible plans.

        hubs: values with a shared layout.
        """
        margin = self.profile.compiler.margin_within(self.limit_bytes)
        return self.program.build_memory_model(self.profile, hubs, margin)

    def _strategies_for(self, mesh: Mesh) -> StrategyBuilder:
        """Strategies on a searched mesh, shared by all variants and forced strategies."""
        builder = self._strategies.get(mesh)
        if builder is None:
            builder = self._strategies[mesh] = self.strategy_builder(Prices(mesh, self.cluster, self.profile))
        return builder

    def strategy_builder(self, prices: Prices) -> StrategyBuilder:
        """Strategies on the mesh of `prices`. With rewrites allowed, dimensions split unevenly are stored padded; such
        a plan needs a rewritten program."""
        return StrategyBuilder(prices, pads=self.options.rewrites != "none", rules=self.program.rules)

    def build_chain(self, mesh: Mesh, force: ForcedStrategy, in_place: frozenset[int]) -> Chain:
        """The choice problem on one mesh, in segments."""
        builder = self._strategies_for(mesh)
        chain = self._build_chain(builder.prices, builder, force, in_place)
        chain.graph.preference = TieBreak(mesh.axes[0].name, chain.graph.min_compute_s(), len(self.flow.nodes))
        return chain

    def refine_graph(self, chain: Chain, mesh: Mesh) -> CostGraph:
        """The cost graph of a chain on another mesh, the target of a descent."""
        prices = Prices(mesh, self.cluster, self.profile)
        builder, cache = self.strategy_builder(prices), NeighborhoodCache()
        return replace(
            chain.graph,
            prices=prices,
            builder=builder,
            neighborhood_cache=cache,
            _sets={},
            _min_seconds={},
            _partial={},
        )

    def build_bounding_chain(self, mesh: Mesh, *, even_rank: int = EXACT_RANK, uneven_rank: int = 0) -> Chain:
        """A relaxed chain with every strategy available to refined plans at equal or lower cost: valid only to bound.

        even_rank, uneven_rank: see `RelaxedPrices`.
        """
        prices = RelaxedPrices(mesh, self.cluster, self.profile, even_rank=even_rank, uneven_rank=uneven_rank)
        builder = RelaxedStrategyBuilder(prices, pads=self.options.rewrites != "none", rules=self.program.rules)
        return replace(self._build_chain(prices, builder, ForcedStrategy(), frozenset()), is_for_bound=True)

    @property
    def max_rank(self) -> int:
        """The rank up to which all moves are followed exactly."""
        return max(EXACT_RANK, *(shape.rank for node in self.flow.nodes for shape in node.shapes))

    def with_exact_moves(self, chain: Chain, rank: int) -> Chain:
        """A bounding chain with the same strategies; moves of arrays up to `rank` dimensions are followed exactly."""
        prices = chain.graph.prices
        assert isinstance(prices, RelaxedPrices), "only chains to bound count moves by what a device must receive"
        if (prices.even_rank, prices.uneven_rank) == (rank, rank):
            return chain
        graph = replace(chain.graph, prices=prices.with_exact_rank(rank), _partial={})
        return Chain(graph=graph, instances=chain.instances, runs=chain.runs, is_for_bound=True)

    def _build_chain(
        self, prices: Prices, builder: StrategyBuilder, force: ForcedStrategy, in_place: frozenset[int]
    ) -> Chain:
        requirements = {
            node: (*self.program.pins.get(node, ()), *force.requirements.get(node, ()))
            for node in sorted({*self.program.pins, *force.requirements})
        }
        confinement: Confinement | CarriedDecisions | None = None
        if self.carried is not None:
            confinement = self.carried.on(self.flow)
        if force.roles is not None:
            confinement = force.confinement(self.flow, self.program.ties(requirements))
        in_place = with_views(self.flow, in_place)
        extra: dict[int, tuple[Hashable, ...]] = dict.fromkeys(in_place, ("in place",))
        combinable: Mapping[Leaf, int] = self.program.combinable_bytes if prices.topology.combiner_limits else {}
        if combinable:
            extra |= {
                node: (*extra.get(node, ()), group_key)
                for node, group_key in combinable_bytes_by_node(self.flow, combinable)
            }
        overlap, beside, behind = prices.topology.overlap, frozenset[Leaf](), frozenset[int]()
        if overlap:
            beside = self.program.gradients
            behind = self.program.readiness.hiding_nodes if self.hidden_share < 1 else behind
            extra |= {node: (*extra.get(node, ()), "beside") for node in nodes_at(self.flow, beside)}
            extra |= {node: (*extra.get(node, ()), "behind") for node in sorted(behind)}
        if confinement is not None:
            for node in self.flow.nodes:
                extra[node.index] = (*extra.get(node.index, ()), *confinement.key(node))
        self.clock.check()
        structure = self.program.build_structure(requirements, extra)
        graph = CostGraph(
            variables=structure.variables,
            isomorphic_variables=structure.isomorphic_variables,
            prices=prices,
            builder=builder,
            pinned=self._strategies_of_pins(builder, requirements, prices.mesh),
            in_place=in_place,
            kept_axes=force.kept_axes,
            fed_arguments=self.program.fed_arguments,
            confinement=confinement,
            combinable_bytes=combinable,
            overlappable=beside,
            exposed_fraction=1.0 - self.hidden_share * overlap,
            readiness=self.program.readiness if overlap else None,
            hiding_nodes=behind,
            counted_fraction=self.hidden_share,
            clock=self.clock,
        )
        return Chain(graph=graph, instances=structure.instances, runs=structure.runs)

    def _strategies_of_pins(
        self, builder: StrategyBuilder, requirements: dict[int, tuple[Requirement, ...]], mesh: Mesh
    ) -> dict[int, StrategySet]:
        """Strategies of the pinned nodes."""
        names, around = self._node_names(), self.program.rules.inside.axes
        sets = {}
        for number, asked in requirements.items():
            node = self.flow.nodes[number]
            name = names.get(number) or array_name(self.flow.module, node.instruction)
            barred = axes_on(mesh, around.get(node.instruction, ()))
            sets[number] = builder.of_shardings(satisfying_shardings(self.flow, node, asked, mesh, name, barred))
        return sets

    def _node_names(self) -> dict[int, str]:
        """Names of user-visible nodes in messages; an output that is also an argument has the argument's name."""
        flow, program = self.flow, self.program
        labels: dict[int, str] = {}
        for kind, nodes, names in (
            ("argument", flow.parameters, program.arguments),
            ("output", flow.outputs, program.outputs),
        ):
            for node, name in zip(nodes, names, strict=True):
                labels.setdefault(node, f"{kind} {name}")
        return labels


#: Forced strategies that split computation along the batch.
_ALONG_THE_BATCH = frozenset({"data", "zero1", "fsdp", "mixed", "megatron", "expert"})


def _runs_along_batch(options: PlanOptions) -> bool:
    return options.rest == "data" or (isinstance(options.force, str) and options.force in _ALONG_THE_BATCH)


def _note_unsplit_products(decisions: Decisions, options: PlanOptions) -> list[str]:
    """Note of the products computed whole on every device despite a batch-splitting strategy."""
    axis = decisions.graph.prices.mesh.axes[0]
    whole = []
    for node in decisions.graph.flow.nodes:
        if node.is_value or not node.weight or node.instruction.opcode not in {"dot", "convolution"}:
            continue
        if node.instruction in decisions.graph.builder.rules.inside.places:
            continue  # of a manual region: one device's part already
        strategy = decisions.strategies[node.index]
        split = {name for s in (*strategy.operands, *strategy.results) for name in s.axes}
        if axis.size > 1 and axis.name not in split:
            whole.append(node.instruction.name)
    if not whole:
        return []
    asked_by = f"force={options.force!r}" if isinstance(options.force, str) else f"rest={options.rest!r}"
    note = (
        f"{asked_by}: {len(whole)} products ({whole[0]}, …) are computed whole on all {axis.size} devices "
        f"of axis {axis.name!r}: no dimension of theirs that these divide runs along the batch"
    )
    return [note]
