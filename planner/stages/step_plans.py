"""Plans of a whole step, accumulated over its micro-batches, on the device groups of stages."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace

from shardwright.errors import AnnotationError, OptionError, PlanError
from shardwright.hlo import Module
from shardwright.options.plan_options import PlanOptions
from shardwright.planner.clock import Clock
from shardwright.planner.constraints.pins import DimPin, Requirement
from shardwright.planner.memory.constraint import Multipliers
from shardwright.planner.microbatch import StepSplit, accumulate_step
from shardwright.planner.search.program import Program
from shardwright.planner.search.search import Search
from shardwright.planner.search.solutions import CandidatePlan
from shardwright.planner.stages.clustering import Clustering
from shardwright.planner.stages.device_groups import DeviceGroups
from shardwright.planner.stages.node_costs import StepCosts, measure_step
from shardwright.planner.stages.tuning import FIRST_PRICE, PRICE_RATIO, STEP_PLAN_GAP
from shardwright.plans.shardings import Mesh


@dataclass(slots=True, eq=False)
class _Plans:
    """Plans of one program on one mesh with decreasing memory."""

    search: Search
    mesh: Mesh
    _found: list[CandidatePlan] = field(default_factory=list)
    _refusal: PlanError | AnnotationError | None = None

    def at(self, thrift: int) -> CandidatePlan:
        """The fastest plan, or the one at the thrift-th memory multiplier. Raises the planner's refusal of the mesh."""
        if self._refusal is not None:
            raise self._refusal
        try:
            while len(self._found) <= thrift:
                self._found.append(self._next())
        except (PlanError, AnnotationError) as error:
            self._refusal = error
            raise
        return self._found[thrift]

    def _next(self) -> CandidatePlan:
        search = self.search
        if not self._found:
            mesh_solution = search.solve_mesh(self.mesh, STEP_PLAN_GAP)
            return search.evaluate(mesh_solution.chain, mesh_solution.solution, mesh_solution.notes)
        first = self._found[0]
        memory = search.memory_model(first.chain.graph.variables.shared_layouts)
        price = FIRST_PRICE * PRICE_RATIO ** (len(self._found) - 1) * first.cost.step_s / first.memory.peak_bytes
        peaks = [memory.constraint_at_peak(plan.decisions) for plan in self._found[-2:]]
        peaks = peaks[:1] if peaks[0] == peaks[-1] else peaks
        chain = first.chain.with_multipliers(Multipliers.split_equally(peaks, price))
        return search.evaluate(first.chain, chain.solve(search.time_limit_s(), STEP_PLAN_GAP), first.notes)


@dataclass(slots=True, kw_only=True, eq=False)
class StepPlans:
    """Plans by kind of group, number of micro-batches and mesh, each computed once.

    mesh: of each stage, at the user's request. clock: ends planning.
    Raises OptionError if requested layouts of arrays are impossible in a pipeline.
    """

    program: Program
    split: StepSplit
    clustering: Clustering
    mesh: Mapping[str, int] | None
    clock: Clock
    _modules: dict[int, Module] = field(default_factory=dict)
    _searches: dict[Hashable, Search] = field(default_factory=dict)
    _plans: dict[Hashable, _Plans] = field(default_factory=dict)
    _measured: dict[int, StepCosts] = field(default_factory=dict)

    def at(self, groups: DeviceGroups, kind: int, mesh: Mesh, micro_batches: int, thrift: int) -> CandidatePlan:
        """The fastest plan of the accumulated step on one kind of group; with thrift, under a memory multiplier."""
        key = (groups.kinds[kind], micro_batches, mesh)
        if key not in self._plans:
            self._plans[key] = _Plans(self._search(groups, kind, micro_batches), mesh)
        return self._plans[key].at(thrift)

    def module(self, micro_batches: int) -> Module:
        """The accumulated step of the plans."""
        if micro_batches not in self._modules:
            self._modules[micro_batches] = accumulate_step(self.split, micro_batches)
        return self._modules[micro_batches]

    def step_costs(self, plan: CandidatePlan, micro_batches: int) -> StepCosts:
        """The costs of the step's nodes in one of the plans."""
        if id(plan) not in self._measured:  # plans are kept in `_plans`
            self._measured[id(plan)] = measure_step(
                self.clustering.flow, plan.decisions, plan.instructions, plan.parameters, micro_batches
            )
        return self._measured[id(plan)]

    def _search(self, groups: DeviceGroups, kind: int, micro_batches: int) -> Search:
        key = (groups.kinds[kind], micro_batches)
        if key not in self._searches:
            search = Search(self.module(micro_batches), groups.part(kind), self._part_options(), clock=self.clock)
            batch = None
            if micro_batches > 1:  # the batch is behind the dimension of the micro-batches
                batch = {number: along.dim + 1 for number, along in self.split.batch.items()}
            search.program.adopt_shardings(self.program.own_shardings, batch)
            self._keep_rows_whole(search)
            self._searches[key] = search
        return self._searches[key]

    def __post_init__(self) -> None:
        """Checks the user's requests on arrays: a pipeline must allow them."""
        options, names = self.program.options, self.program.arguments
        if (options.argument_axes or options.output_axes) and self.mesh is None:
            raise OptionError("argument_axes needs mesh", where="argument_axes", remedy="pass the mesh of one stage")
        cut = next((number for number in options.argument_axes if number in self.split.batch), None)
        if cut is not None:
            raise OptionError(
                f"{names[cut]} carries the batch: a pipeline stores it by micro-batches, not as argument_axes says",
                where="argument_axes",
                remedy="leave it out, or plan with stages=1",
            )
        rows = next(
            (n for n in sorted(self._find_stacked_arguments()) if any(options.argument_axes.get(n, ())[:1])), None
        )
        if rows is not None:
            raise OptionError(
                f"{names[rows]} has a row for every layer: stages store rows of it, unlike what argument_axes says",
                where="argument_axes",
                remedy="split another dimension, or plan with stages=1",
            )

    def _find_stacked_arguments(self) -> frozenset[int]:
        """Arguments stored in rows, layer by layer."""
        rows = [len(self.clustering.members(node)) for node in self.clustering.flow.parameters]
        shapes = [self.clustering.flow.nodes[node].shapes[0] for node in self.clustering.flow.parameters]
        return frozenset(n for n, shape in enumerate(shapes) if rows[n] > 1 and shape.dimensions[:1] == (rows[n],))

    def _keep_rows_whole(self, search: Search) -> None:
        """Pins arrays stored in rows: a stage has too few layers to split them over an axis."""
        flow, whole = search.flow, Requirement(asked_by="stages", dims={0: DimPin(axes=())})
        replaced = {alias.parameter_number: alias.output_index for alias in search.program.module.aliases}
        for number in sorted(self._find_stacked_arguments()):
            search.program.pins.setdefault(flow.parameters[number], []).append(whole)
            if number in replaced:
                output = flow.outputs[replaced[number][0] if replaced[number] else 0]
                search.program.pins.setdefault(output, []).append(whole)

    def _part_options(self) -> PlanOptions:
        options = self.program.options
        return replace(
            options,
            mesh=self.mesh if options.argument_axes or options.output_axes else None,
            stages=None,
            micro_batches=None,
            rewrites="none",
            argument_names=tuple(self.program.arguments),
            output_names=tuple(self.program.outputs),
        )
