"""From an assembled program to its Plan: collectives, seconds and memory recomputed, everything checked.

Nothing is searched: every instruction has its layout from the plan of the whole step. The search's own pricing code
derives a program's collectives and costs from these layouts. `verify` checks the result like any plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import sha256

from shardwright.clusters.cluster import Cluster
from shardwright.cost import HardwareProfile, predict_memory
from shardwright.hlo import ArrayShape
from shardwright.planner.costs.kernels import find_kernels
from shardwright.planner.costs.prices import Prices
from shardwright.planner.costs.rounded_uses import rounded_uses_of
from shardwright.planner.gc_pause import gc_paused
from shardwright.planner.graph.dataflow import Dataflow, Leaf, Node, build_dataflow
from shardwright.planner.pipeline.program_writer import ProgramDraft
from shardwright.planner.plans.assemble import Decisions
from shardwright.planner.plans.causes import Causes
from shardwright.planner.plans.collectives import list_collectives, total_own_times_s
from shardwright.planner.plans.verify import check_plan
from shardwright.planner.rules import rule_of
from shardwright.planner.segments.cost_graph import CostGraph
from shardwright.planner.segments.dominator_cut import Segments
from shardwright.planner.segments.overlap import gradients
from shardwright.planner.segments.variables import build_variables, cheap_nodes
from shardwright.planner.strategies.expansion import Strategy, local_results
from shardwright.planner.strategies.strategy_set import StrategyBuilder
from shardwright.plans.plan import CostSummary, InstructionPlan, Plan, VariablePlan
from shardwright.plans.shardings import Mesh, TensorSharding

#: `CostSummary.bound_scope` of programs that are parts of a plan.
_SCOPE = "one program of a pipeline: the step as a whole was searched"


class Pricing:
    """Plans of programs on one mesh."""

    def __init__(
        self,
        mesh: Mesh,
        cluster: Cluster,
        profile: HardwareProfile,
        original_sha256: str,
        bucket_bytes: int | None = None,
    ) -> None:
        profile = profile.with_bucket(bucket_bytes)
        self._compile_options = profile.bucket_options(bucket_bytes)
        self._prices = Prices(mesh, cluster, profile)
        self._builder = StrategyBuilder(self._prices)
        self._profile = profile
        self._original_sha256 = original_sha256

    def plan(self, program: ProgramDraft) -> Plan:
        """The checked plan of one program. Raises PlanCheckError if it is invalid (a defect of the planner)."""
        mesh = self._prices.mesh
        text = program.module.to_text()
        with gc_paused():
            decisions = self._decisions(build_dataflow(program.module), program)
            causes = Causes(decisions.graph.flow, program.reads, program.writes)
            collectives, own = list_collectives(decisions, causes), total_own_times_s(decisions)
            plan = Plan(
                module_name=program.module.name,
                hlo_sha256=sha256(text.encode()).hexdigest(),
                mesh=mesh,
                hardware=self._profile.name,
                origin="pipeline",
                instructions=program.entries,
                parameters=program.parameters,
                outputs=program.outputs,
                collectives=collectives,
                cost=CostSummary(
                    compute_s=own.compute_s,
                    transfers_s=own.transfers_s,
                    communication_s=sum(collective.time_s for collective in collectives),
                    lower_bound_s=0.0,
                    bound_scope=_SCOPE,
                ),
                memory=predict_memory(
                    program.module, program.entries, program.parameters, program.outputs, mesh, self._profile
                ),
                compile_options=self._compile_options,
                original_sha256=self._original_sha256,
                hlo_text=text,
            )
            check_plan(program.module, plan, is_piece=True)
        return plan

    def arrival_s(self, variable: VariablePlan) -> float:
        """Seconds until an array sent by the client with the step is on its devices."""
        return self._prices.arrival_s(ArrayShape(variable.element_type, variable.shape), variable.sharding)

    def _decisions(self, flow: Dataflow, program: ProgramDraft) -> Decisions:
        """The decisions that the entries represent."""
        free = cheap_nodes(flow, ())
        segments = Segments(of=tuple(-1 if is_free else 0 for is_free in free), count=1, cuts=())
        kernels = find_kernels(flow, merges=self._profile.compiler.runs("merges_loops"))
        rounded = rounded_uses_of(flow, self._profile)
        layout = build_variables(flow, free, segments, {}, {}, kernels, self._builder.rules, gradients(flow), rounded)
        graph = CostGraph(variables=layout, prices=self._prices, builder=self._builder, pinned={})
        entries = {entry.name: entry for entry in program.entries}
        parameters = {node: v.sharding for node, v in zip(flow.parameters, program.parameters, strict=True)}
        outputs = {node: v.sharding for node, v in zip(flow.outputs, program.outputs, strict=True)}
        handed_on = {**outputs, **parameters}
        node_shardings = tuple(
            (handed_on[node.index],) if node.index in handed_on else _results(node, entries) for node in flow.nodes
        )
        strategies = tuple(
            _value(node_shardings[node.index][0])
            if node.is_value
            else self._strategy(node, entries[node.instruction.name])
            for node in flow.nodes
        )
        return Decisions(
            graph=graph,
            strategies=strategies,
            shardings=node_shardings,
            shared_layouts={},
            shared=dict(_find_shared_layouts(flow, entries)),
        )

    def _strategy(self, node: Node, entry: InstructionPlan) -> Strategy:
        operands = tuple(sharding for value in entry.operands for sharding in value)
        order = list(self._prices.mesh.sizes)
        results = tuple(_before_reduction(sharding, entry.partial, order) for sharding in entry.result)
        fallback = Strategy(operands=operands, results=results, partial=entry.partial)
        if not rule_of(node.instruction).exchange_factors:
            return fallback
        ways = tuple(
            frozenset(i for i, sharding in enumerate(operands) if axis in sharding.unreduced) for axis in order
        )
        strategy_set = self._builder.of_instruction(node.instruction, tuple(dict.fromkeys(way for way in ways if way)))
        return next(
            (s for s in strategy_set.strategies if s.operands == operands and _local(s) == _local(fallback)), fallback
        )


def _local(strategy: Strategy) -> list[tuple[tuple[tuple[str, ...], ...], set[str]]]:
    """Layouts of partial results, and the axes to combine them over, by either method."""
    return [(sharding.dims, {*sharding.unreduced, *strategy.gathered}) for sharding in local_results(strategy)]


def _results(node: Node, entries: Mapping[str, InstructionPlan]) -> tuple[TensorSharding, ...]:
    """Layouts of a node's array leaves for their readers."""
    result = entries[node.instruction.name].result
    return (result[node.leaf],) if node.is_value else result


def _find_shared_layouts(
    flow: Dataflow, entries: Mapping[str, InstructionPlan]
) -> Iterator[tuple[Leaf, TensorSharding]]:
    """Second layouts of values, for several readers."""
    for node in flow.nodes:
        entry = entries[node.instruction.name]
        for leaf, sharding in enumerate(entry.shared):
            if sharding != entry.result[leaf] and flow.leaves[node.instruction][leaf] == (node.index, leaf):
                yield (node.index, leaf), sharding


def _value(sharding: TensorSharding) -> Strategy:
    return Strategy(operands=(sharding,), results=(sharding,))


def _before_reduction(sharding: TensorSharding, summed: tuple[str, ...], order: list[str]) -> TensorSharding:
    """The layout of a result before its reduction, or scatter, over `summed`."""
    dims = tuple(tuple(axis for axis in axes if axis not in summed) for axes in sharding.dims)
    return TensorSharding(dims, tuple(axis for axis in order if axis in {*sharding.unreduced, *summed}))
