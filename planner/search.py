"""The search: every candidate mesh is planned, the fastest plan is kept."""

from __future__ import annotations

import functools
import hashlib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from shardwright.cluster import Cluster
from shardwright.config import PlanOptions
from shardwright.cost import hardware_profile, memory
from shardwright.errors import AnnotationError, PlanError
from shardwright.hlo import Module, parse
from shardwright.planner.assemble import (
    Decisions,
    arrival_time_s,
    compute_time_s,
    decide,
    instruction_plans,
    planned_collectives,
    variables,
)
from shardwright.planner.causes import Causes
from shardwright.planner.dataflow import build_dataflow
from shardwright.planner.force import Forced, check_force, forced, meshes_for, origin, state_arguments
from shardwright.planner.graph import Graph, build_graph, free_nodes
from shardwright.planner.ilp import Solution
from shardwright.planner.meshes import given_mesh
from shardwright.planner.names import argument_names, output_names
from shardwright.planner.pins import allowed, collect
from shardwright.planner.preference import prefer_simple
from shardwright.planner.prices import Prices
from shardwright.planner.solve import solve
from shardwright.planner.strategies import StrategyBuilder, StrategySet
from shardwright.planner.verify import check_plan
from shardwright.plans import Candidate, CostSummary, InstructionPlan, Mesh, Plan

#: Seconds the integer program may take on one mesh.
TIME_LIMIT_S = 20.0

#: Part of the step time that a mesh must save over one tried before it, which has fewer axes or more data
#: parallelism: less is no difference that the cost model could tell.
LEAST_GAIN = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanProgress:
    """How far planning is. phase: parse, rules, search or check; 0.0 where a figure is not known yet."""

    phase: str
    detail: str = ""
    incumbent_s: float = 0.0
    lower_bound_s: float = 0.0
    elapsed_s: float = 0.0


Listener = Callable[[PlanProgress], None]


def plan(
    hlo: str | Module, cluster: Cluster, options: PlanOptions | None = None, *, progress: Listener | None = None
) -> Plan:
    """Plan one HLO module for a cluster.

    hlo: HLO text (or a parsed module). Without `options.mesh` every factorization of the
    devices into one or two axes is tried. `progress` is called as planning goes on.

    Raises HloSyntaxError for text that is not HLO, OptionError for options that do not fit
    the program or the cluster, AnnotationError for pins that cannot hold, PlanError where no
    plan satisfies them together.
    """
    return _Planner(hlo, cluster, options or PlanOptions(), progress).run()


class _Planner:
    """One call of `plan`: the program and its pins are read once, then planned on mesh after mesh."""

    def __init__(self, hlo: str | Module, cluster: Cluster, options: PlanOptions, progress: Listener | None) -> None:
        self._start = time.perf_counter()
        self._progress = progress
        self._best: _Found | None = None
        check_force(options)
        self.given = given_mesh(options, cluster.device_count)
        self._report("parse")
        self.module = hlo if isinstance(hlo, Module) else parse(hlo)
        self.text = hlo if isinstance(hlo, str) else hlo.to_text()
        self.cluster = cluster
        self.options = options
        self.profile = hardware_profile(cluster.hardware)
        self.flow = build_dataflow(self.module)
        self.arguments = argument_names(self.flow, options.argument_names)
        self.outputs = output_names(self.flow, options.output_names)
        self.pins = collect(self.flow, options)
        state = state_arguments(self.flow, options)
        self.arriving = frozenset(node for number, node in enumerate(self.flow.parameters) if number not in state)

    def run(self) -> Plan:
        meshes = (self.given,) if self.given else meshes_for(self.options, self.cluster.device_count)
        candidates: list[Candidate] = []
        refusal: PlanError | AnnotationError | None = None
        for mesh in meshes:
            try:
                found = self._on_mesh(mesh)
            except (PlanError, AnnotationError) as error:
                refusal = refusal or error
                candidates.append(Candidate(mesh=mesh, step_s=None, note=error.message))
                continue
            candidates.append(Candidate(mesh=mesh, step_s=found.cost.step_s))
            if self._best is None or found.cost.step_s < self._best.cost.step_s * (1 - LEAST_GAIN):
                self._best = found
        if self._best is None:
            raise refusal or PlanError("no mesh can be planned")
        self._report("check", str(self._best.decisions.graph.prices.mesh))
        made = self._assemble(self._best, tuple(candidates))
        check_plan(self.module, made)
        return replace(made, planning_s=time.perf_counter() - self._start)

    def _report(self, phase: str, detail: str = "") -> None:
        best = self._best
        if self._progress is not None:
            self._progress(
                PlanProgress(
                    phase=phase,
                    detail=detail,
                    incumbent_s=best.cost.step_s if best else 0.0,
                    lower_bound_s=best.cost.lower_bound_s if best else 0.0,
                    elapsed_s=time.perf_counter() - self._start,
                )
            )

    # ---- one mesh ------------------------------------------------------------
    def _on_mesh(self, mesh: Mesh) -> _Found:
        self._report("rules", str(mesh))
        prices = Prices(mesh, self.cluster, self.profile)
        builder = StrategyBuilder(prices)
        force = forced(self.flow, self.arguments, self.options, mesh)
        pinned = self._pinned(builder, force, mesh)
        confinement = force.confinement(self.flow, free_nodes(self.flow, pinned), builder) if force.roles else None
        build = functools.partial(build_graph, self.flow, builder, prices, pinned, arriving=self.arriving)
        graph = build(force.in_place, confinement)
        notes = list(self.flow.notes)
        self._report("search", str(mesh))
        try:
            solution = _solve(graph)
        except PlanError:
            if not force.in_place:
                raise
            notes.append(f"force={self.options.force!r}: some state must be gathered where it is used")
            graph = build(confinement=confinement)
            solution = _solve(graph)
        decisions = decide(graph, solution.states)
        notes += _whole_product_notes(decisions, self.options)
        compute_s = compute_time_s(decisions)
        communication_s = sum(collective.time_s for collective in planned_collectives(decisions))
        communication_s += arrival_time_s(decisions)
        cost = CostSummary(
            compute_s=compute_s,
            communication_s=communication_s,
            lower_bound_s=min(solution.lower_bound, compute_s + communication_s),
            bound_scope=_scope(graph, self.options),
        )
        return _Found(decisions=decisions, cost=cost, notes=tuple(notes))

    def _pinned(self, builder: StrategyBuilder, force: Forced, mesh: Mesh) -> dict[int, StrategySet]:
        """Strategies of the nodes that may not choose freely."""
        return {
            index: builder.of_shardings(
                allowed(
                    self.flow,
                    self.flow.nodes[index],
                    [*self.pins.get(index, ()), *force.requirements.get(index, ())],
                    mesh,
                    self._name(index),
                )
            )
            for index in sorted({*self.pins, *force.requirements})
        }

    def _name(self, index: int) -> str:
        """What messages call a value."""
        if index in self.flow.parameters:
            return f"argument {self.arguments[self.flow.parameters.index(index)]}"
        if index in self.flow.outputs:
            return f"output {self.outputs[self.flow.outputs.index(index)]}"
        instruction = self.flow.nodes[index].instruction
        return instruction.op_name or instruction.name

    def _assemble(self, found: _Found, candidates: tuple[Candidate, ...]) -> Plan:
        decisions = found.decisions
        mesh = decisions.graph.prices.mesh
        instructions = instruction_plans(decisions)
        parameters, outputs = variables(decisions, self.arguments, self.outputs)
        return Plan(
            module_name=self.module.name,
            hlo_sha256=hashlib.sha256(self.text.encode()).hexdigest(),
            mesh=mesh,
            hardware=self.profile.name,
            origin=origin(self.options),
            instructions=instructions,
            parameters=parameters,
            outputs=outputs,
            collectives=planned_collectives(decisions, Causes(self.flow, self.arguments, self.outputs)),
            cost=found.cost,
            memory=memory(self.module, instructions, parameters, outputs, mesh),
            candidates=candidates,
            notes=(*found.notes, *_replicated_notes(instructions)),
            hlo_text=self.text,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """The best of one mesh."""

    decisions: Decisions
    cost: CostSummary
    notes: tuple[str, ...]


def _solve(graph: Graph) -> Solution:
    """The best states found; the bound is of their real cost, preferences left out."""
    preferred = prefer_simple(graph, graph.problem())
    solution = solve(preferred.problem, time_limit_s=TIME_LIMIT_S)
    return replace(solution, lower_bound=solution.lower_bound - preferred.most)


def _scope(graph: Graph, options: PlanOptions) -> str:
    """What the bound is of: no plan within this scope is cheaper, by this cost model."""
    forced_by = "" if options.force is None else f" that {origin(options).removeprefix('forced: ')} leaves"
    return (
        f"on mesh {graph.prices.mesh}, one factor or none per axis and instruction{forced_by}, "
        f"{len(graph.flow.nodes)} decisions in {len(graph.leaders)} groups that choose as one; "
        "sums are reduced where they arise, each reader pays for its own reshard, nothing overlaps"
    )


#: Forced strategies that promise to compute along the batch.
_ALONG_THE_BATCH = frozenset({"data", "fsdp", "mixed"})


def _whole_product_notes(decisions: Decisions, options: PlanOptions) -> list[str]:
    """What a strategy that splits the batch computes whole on every device all the same."""
    if not isinstance(options.force, str) or options.force not in _ALONG_THE_BATCH:
        return []
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
