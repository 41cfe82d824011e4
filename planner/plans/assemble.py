"""Assembles a Plan's parts from chosen strategies: instructions, collectives, variables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwright.hlo import Instruction
from shardwright.planner.graph.dataflow import BARRIERS, CONTROL_FLOW, Dataflow, Leaf, Node, Use, computations_of
from shardwright.planner.graph.scopes import distinguishing_depth, scope_range
from shardwright.planner.plans.causes import is_backward
from shardwright.planner.segments.cost_graph import CostGraph
from shardwright.planner.segments.forward_pass import CHOICE_OPCODES
from shardwright.planner.segments.variables import Variable
from shardwright.planner.strategies.expansion import Strategy, local_results
from shardwright.plans.plan import InstructionPlan, SegmentPlan, VariablePlan, choose_layout
from shardwright.plans.shardings import TensorSharding, ValueSharding

if TYPE_CHECKING:
    from shardwright.planner.segments.segment_chain import Chain


#: Producers of values carried by loops and branches.
_CARRYING = frozenset({*CONTROL_FLOW, "parameter"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """The decisions of a plan.

    graph: the cost graph.
    strategies: one per node.
    shardings: per node, the sharding of each array leaf for its readers.
    shared_layouts: leaf → layout chosen for its readers in common.
    shared: leaf → second layout; computed once, for several readers that need another layout than the leaf's own.
    """

    graph: CostGraph
    strategies: tuple[Strategy, ...]
    shardings: tuple[tuple[TensorSharding, ...], ...]
    shared_layouts: Mapping[Leaf, TensorSharding]
    shared: Mapping[Leaf, TensorSharding]

    def result(self, leaf: Leaf) -> TensorSharding:
        """The sharding of an array leaf for its readers."""
        node, i = leaf
        return self.shardings[node][i]

    def source(self, node: Node, use: Use, used: TensorSharding) -> TensorSharding:
        """The layout of an operand that a node reads, out of its available ones, to use it as `used`."""
        sharding = self.result(use.source)
        if use.source not in self.shared or (node.index, use.source) in self.graph.variables.in_loop_readers:
            return sharding
        return choose_layout(sharding, self.shared[use.source], used)


def decide(graph: CostGraph, states: Mapping[Variable, int]) -> Decisions:
    """Strategies from the states of the variables; rematerialized nodes take the layouts their readers need."""
    chosen: list[Strategy | None] = [None] * len(graph.flow.nodes)
    hubs: dict[Leaf, TensorSharding] = {}
    for (index, leaf), state in states.items():
        strategy = graph.set_of((index, leaf)).strategies[state]
        if leaf < 0:
            chosen[index] = strategy
        else:
            hubs[index, leaf] = strategy.results[0]
    strategies = tuple(_fill_free_nodes(graph, chosen))
    shardings = _shardings(graph, strategies, hubs)
    shared = _find_shared_layouts(graph, strategies, shardings, hubs)
    return Decisions(graph=graph, strategies=strategies, shardings=shardings, shared_layouts=hubs, shared=shared)


def _shardings(
    graph: CostGraph, strategies: Sequence[Strategy], hubs: Mapping[Leaf, TensorSharding]
) -> tuple[tuple[TensorSharding, ...], ...]:
    """Shardings of each node's array leaves: as computed, but sums without partial readers are reduced."""
    apart = graph.variables.after_loops
    different = {id(strategy): strategy for strategy in strategies}  # few: equal instructions share theirs
    has_sums = {key: any(sharding.unreduced for sharding in strategy.results) for key, strategy in different.items()}
    is_sum = [has_sums[id(strategy)] for strategy in strategies]
    wanted = {leaf: sharding for leaf, sharding in hubs.items() if leaf not in apart}
    for node in graph.flow.nodes:
        for use in node.uses:
            if is_sum[use.source[0]]:
                wanted.setdefault(use.source, strategies[node.index].operands[use.position])

    def reduce_leaf(leaf: Leaf, sharding: TensorSharding) -> TensorSharding:
        return sharding if not sharding.unreduced or leaf in apart else _reduce_to(sharding, wanted.get(leaf))

    return tuple(
        [
            tuple([reduce_leaf((index, leaf), sharding) for leaf, sharding in enumerate(strategy.results)])
            if is_sum[index]
            else strategy.results
            for index, strategy in enumerate(strategies)
        ]
    )


def _find_shared_layouts(
    graph: CostGraph,
    strategies: Sequence[Strategy],
    shardings: Sequence[Sequence[TensorSharding]],
    hubs: Mapping[Leaf, TensorSharding],
) -> dict[Leaf, TensorSharding]:
    """Shared layouts to which a value is resharded before a reader reshards it to a layout of its own.

    Without such a reader, the reshard to the shared layout is common to its readers anyway. Loop-carried values can
    have a second layout only after the loop.
    """
    layout, arguments = graph.variables, set(graph.flow.parameters)
    second_layouts: dict[Leaf, TensorSharding] = {}
    for node in graph.flow.nodes:
        for use in node.uses:
            hub = hubs.get(use.source)
            if hub is None or hub.unreduced:
                continue
            index, leaf = use.source
            producer = graph.flow.nodes[index]
            is_behind = use.source in layout.after_loops and (node.index, use.source) not in layout.in_loop_readers
            is_carried = producer.is_value and index not in arguments and producer.instruction.opcode in _CARRYING
            if is_carried and not is_behind:
                continue
            used = strategies[node.index].operands[use.position]
            if used not in (shardings[index][leaf], hub) and not used.unreduced and hub != shardings[index][leaf]:
                second_layouts[use.source] = hub
    return second_layouts


def _reduce_to(source: TensorSharding, target: TensorSharding | None) -> TensorSharding:
    """Reduces a partial sum over the axes that `target` reduces.

    It is scattered if `target` is split over them and nothing else moves.
    """
    ending = [axis for axis in source.unreduced if target is None or axis not in target.unreduced]
    remaining = tuple(axis for axis in source.unreduced if axis not in ending)
    whole = TensorSharding(source.dims, remaining)
    if target is None:
        return whole
    dims = list(source.dims)
    for axis in ending:
        for dim, axes in enumerate(target.dims):
            if axis in axes:
                split = {*dims[dim], axis}
                if not split <= set(axes):
                    return whole
                dims[dim] = tuple(name for name in axes if name in split)
    for dim, axes in enumerate(dims):
        if axes[: len(source.dims[dim])] != source.dims[dim]:  # the axis would go between existing ones
            return whole
    return TensorSharding(tuple(dims), remaining)


def _fill_free_nodes(graph: CostGraph, strategies: list[Strategy | None]) -> Iterator[Strategy]:
    """Fills in rematerialized nodes, readers first: per mesh axis the split common to all readers, else none."""
    wanted: dict[int, list[TensorSharding]] = {}
    for node in reversed(graph.flow.nodes):
        strategy = strategies[node.index]
        if strategy is None:
            strategy = strategies[node.index] = _strategy_for_readers(graph, node.index, wanted.get(node.index, []))
        for use in node.uses:
            if graph.is_cheap_to_recompute[use.source[0]]:
                wanted.setdefault(use.source[0], []).append(strategy.operands[use.position])
    for strategy in strategies:
        assert strategy is not None
        yield strategy


def _strategy_for_readers(graph: CostGraph, node: int, layouts: Sequence[TensorSharding]) -> Strategy:
    """The strategy of a rematerialized node with the result common to all readers; replicated if there is none."""
    instruction = graph.flow.nodes[node].instruction
    whole = TensorSharding.replicated(graph.flow.nodes[node].shapes[0].rank)
    common = layouts[0] if layouts else whole
    for other in layouts[1:]:
        dims = tuple(
            tuple(axis for axis in a if axis in b) if a != b else a
            for a, b in zip(common.dims, other.dims, strict=True)
        )
        common = TensorSharding(dims)
    giving, number = graph.builder.strategy_giving, graph.variables.signatures[node]
    strategy = giving(instruction, number, common) or giving(instruction, number, whole)
    assert strategy is not None, "every instruction can be computed whole"
    return strategy


# ---- instructions ------------------------------------------------------------


def build_instruction_plans(decisions: Decisions) -> tuple[InstructionPlan, ...]:
    """One entry per instruction of every planned computation."""
    flow = decisions.graph.flow
    return tuple(
        [
            _instruction_plan(decisions, computation.name, instruction)
            for computation in flow.computations
            for instruction in computation
        ]
    )


def _instruction_plan(decisions: Decisions, computation: str, instruction: Instruction) -> InstructionPlan:
    """An instruction's entry: the layouts of its strategy, or those of the values that it hands on."""
    flow, graph = decisions.graph.flow, decisions.graph
    leaves, shardings = flow.leaves[instruction], decisions.shardings
    is_alone = len(leaves) == 1 and len(shardings[leaves[0][0]]) == 1
    result = shardings[leaves[0][0]] if is_alone else tuple([shardings[node][leaf] for node, leaf in leaves])
    partial: tuple[str, ...] = ()
    reason = ""
    used: Sequence[TensorSharding]
    if instruction.opcode in CONTROL_FLOW:
        used = [shardings[node][leaf] for node, leaf in flow.entering[instruction]]
    elif instruction.opcode in BARRIERS:
        used = result
    elif instruction.opcode == "tuple" and instruction in flow.leaving:
        used = result = tuple([shardings[node][leaf] for node, leaf in flow.leaving[instruction]])
    elif leaves and flow.nodes[leaves[0][0]].instruction is instruction and instruction.opcode != "parameter":
        strategy = decisions.strategies[leaves[0][0]]
        used = strategy.operands
        partial = (*_axes_reduced_here(strategy, result), *strategy.gathered)
        reason = graph.reason(leaves[0][0])
    else:
        used = [shardings[node][leaf] for operand in instruction.operands for node, leaf in flow.leaves[operand]]
    return InstructionPlan(
        computation=computation,
        name=instruction.name,
        opcode=instruction.opcode,
        operands=_group_by_operand(instruction, used),
        result=result,
        partial=partial,
        reason=reason,
        shared=_second_layouts(decisions, computation, instruction, leaves),
    )


def _second_layouts(
    decisions: Decisions, computation: str, instruction: Instruction, leaves: Sequence[Leaf]
) -> ValueSharding:
    """Second layouts of an instruction's results."""
    if not decisions.shared or decisions.shared.keys().isdisjoint(leaves):
        return ()
    if not _hands_out(decisions.graph, computation, instruction, leaves):
        return ()
    return tuple(decisions.shared.get(leaf, decisions.result(leaf)) for leaf in leaves)


def _hands_out(graph: CostGraph, computation: str, instruction: Instruction, leaves: Sequence[Leaf]) -> bool:
    """Whether readers find second layouts at an instruction: the producer of the value.

    Loop-carried values have them at the loop, and at its elements after it.
    """
    loops = {graph.variables.after_loops[leaf] for leaf in leaves if leaf in graph.variables.after_loops}
    if not loops:
        return graph.flow.nodes[leaves[0][0]].instruction is instruction
    is_inside = any(computation in computations_of(loop) for loop in loops)
    return instruction in loops or (instruction.opcode == "get-tuple-element" and not is_inside)


def _axes_reduced_here(strategy: Strategy, result: Sequence[TensorSharding]) -> tuple[str, ...]:
    """Axes of the immediate reduction of local results: partial sums, new or passed on, that end here."""
    if not (strategy.partial or any(sharding.unreduced for sharding in strategy.results)):
        return ()
    remaining = {axis for sharding in result for axis in sharding.unreduced}
    local = [axis for sharding in local_results(strategy) for axis in sharding.unreduced]
    return tuple(dict.fromkeys(axis for axis in (*strategy.partial, *local) if axis not in remaining))


def _group_by_operand(instruction: Instruction, flat: Sequence[TensorSharding]) -> tuple[ValueSharding, ...]:
    """Shardings of all operand leaves, operand by operand."""
    counts = [len(operand.shape.leaves) for operand in instruction.operands]
    if counts.count(1) == len(counts):
        return tuple([(sharding,) for sharding in flat])
    grouped, first = [], 0
    for count in counts:
        grouped.append(tuple(flat[first : first + count]))
        first += count
    return tuple(grouped)


# ---- segments ----------------------------------------------------------------


def segment_plans(decisions: Decisions, chain: Chain) -> tuple[SegmentPlan, ...]:
    """The segments in order, each with its values read by other segments."""
    crossing = decisions.graph.variables.cross_segment
    flow = decisions.graph.flow
    products = [_forward_products(flow, instance.nodes) for instance in chain.instances]
    depth = distinguishing_depth(product for members in products for product in members)
    segments = []
    for number, instance in enumerate(chain.instances):
        handed = [leaf for leaf in instance.variables[: instance.own_count] if leaf in crossing]
        segments.append(
            SegmentPlan(
                name=segment_name(decisions, number, scope_range(products[number], depth)),
                kind=instance.kind,
                instructions=len(instance.nodes),
                boundary=tuple((flow.nodes[leaf[0]].instruction.name, decisions.result(leaf)) for leaf in handed),
            )
        )
    return tuple(segments)


def segment_name(decisions: Decisions, number: int, scopes: str = "") -> str:
    """`segment 2, block_1, to model.py:93`: the user's scopes in it, and the line of the critical node at its end."""
    flow, cuts = decisions.graph.flow, decisions.graph.variables.segments.cuts
    end = flow.module.place(flow.nodes[cuts[number]].instruction) if number < len(cuts) else ""
    parts = (f"segment {number}", scopes, f"to {end}" if end else "")
    return ", ".join(filter(None, parts))


def _forward_products(flow: Dataflow, nodes: Sequence[int]) -> list[Instruction]:
    """Products, lookups and the like of the forward pass: the landmarks of a model part."""
    instructions = (flow.nodes[index].instruction for index in nodes if not flow.nodes[index].is_value)
    return [
        instruction
        for instruction in instructions
        if instruction.opcode in CHOICE_OPCODES and not is_backward(instruction.op_name)
    ]


# ---- variables -------------------------------------------------------------------


def build_variable_plans(
    decisions: Decisions, argument_names: Sequence[str], output_names: Sequence[str]
) -> tuple[tuple[VariablePlan, ...], tuple[VariablePlan, ...]]:
    """The program's parameters and outputs, flat, as stored between steps."""
    flow = decisions.graph.flow
    alias_of = {parameter: output for output, parameter in flow.aliases.items()}
    parameters = tuple(
        _variable(decisions, i, node, name, alias_of.get(i))
        for i, (node, name) in enumerate(zip(flow.parameters, argument_names, strict=True))
    )
    outputs = tuple(
        _variable(decisions, i, node, name, flow.aliases.get(i))
        for i, (node, name) in enumerate(zip(flow.outputs, output_names, strict=True))
    )
    return parameters, outputs


def _variable(decisions: Decisions, number: int, node: int, name: str, alias: int | None) -> VariablePlan:
    shape = decisions.graph.flow.nodes[node].shapes[0]
    sharding = decisions.result((node, 0))
    mesh = decisions.graph.prices.mesh
    return VariablePlan.from_sharding(
        number, name, shape.element_type, shape.dimensions, sharding, mesh, alias=alias, is_on_host=shape.is_on_host
    )
