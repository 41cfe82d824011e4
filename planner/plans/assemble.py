"""From chosen strategies to a Plan's parts: instructions, collectives, variables."""

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
from shardwright.plans import InstructionPlan, SegmentPlan, VariablePlan, choose_layout
from shardwright.shardings import TensorSharding, ValueSharding

if TYPE_CHECKING:
    from shardwright.planner.segments.segment_chain import Chain


#: Whose values loops and branches hand on.
_CARRYING = frozenset({*CONTROL_FLOW, "parameter"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """The strategy of every node of a graph, how each array leaf lies for its readers, and which hubs want it how.

    shared: how a leaf is brought to lie once, for several readers that want it otherwise than it lies.
    """

    graph: CostGraph
    strategies: tuple[Strategy, ...]
    shardings: tuple[tuple[TensorSharding, ...], ...]
    shared_layouts: Mapping[Leaf, TensorSharding]
    shared: Mapping[Leaf, TensorSharding]

    def result(self, leaf: Leaf) -> TensorSharding:
        """How an array leaf lies for its readers."""
        node, i = leaf
        return self.shardings[node][i]

    def source(self, node: Node, use: Use, used: TensorSharding) -> TensorSharding:
        """How what a node reads lies where the node, which uses it as `used`, takes it from."""
        lies = self.result(use.source)
        if use.source not in self.shared or (node.index, use.source) in self.graph.variables.in_loop_readers:
            return lies
        return choose_layout(lies, self.shared[use.source], used)


def decide(graph: CostGraph, states: Mapping[Variable, int]) -> Decisions:
    """Strategies from the states of the variables; free nodes take what their readers want."""
    chosen: list[Strategy | None] = [None] * len(graph.flow.nodes)
    hubs: dict[Leaf, TensorSharding] = {}
    for (index, leaf), state in states.items():
        found = graph.set_of((index, leaf)).strategies[state]
        if leaf < 0:
            chosen[index] = found
        else:
            hubs[index, leaf] = found.results[0]
    strategies = tuple(_fill_free_nodes(graph, chosen))
    lies = _shardings(graph, strategies, hubs)
    shared = _find_shared_layouts(graph, strategies, lies, hubs)
    return Decisions(graph=graph, strategies=strategies, shardings=lies, shared_layouts=hubs, shared=shared)


def _shardings(
    graph: CostGraph, strategies: Sequence[Strategy], hubs: Mapping[Leaf, TensorSharding]
) -> tuple[tuple[TensorSharding, ...], ...]:
    """Per node how its array leaves lie: as made, but for sums that no reader takes as partial ones: reduced."""
    apart = graph.variables.after_loops
    different = {id(strategy): strategy for strategy in strategies}  # few: equal instructions share theirs
    has_sums = {key: any(made.unreduced for made in strategy.results) for key, strategy in different.items()}
    is_sum = [has_sums[id(strategy)] for strategy in strategies]
    wanted = {leaf: lies for leaf, lies in hubs.items() if leaf not in apart}
    for node in graph.flow.nodes:
        for use in node.uses:
            if is_sum[use.source[0]]:
                wanted.setdefault(use.source, strategies[node.index].operands[use.position])

    def reduce_leaf(leaf: Leaf, made: TensorSharding) -> TensorSharding:
        return made if not made.unreduced or leaf in apart else _reduce_to(made, wanted.get(leaf))

    return tuple(
        [
            tuple([reduce_leaf((index, leaf), made) for leaf, made in enumerate(strategy.results)])
            if is_sum[index]
            else strategy.results
            for index, strategy in enumerate(strategies)
        ]
    )


def _find_shared_layouts(
    graph: CostGraph,
    strategies: Sequence[Strategy],
    lies: Sequence[Sequence[TensorSharding]],
    hubs: Mapping[Leaf, TensorSharding],
) -> dict[Leaf, TensorSharding]:
    """Hubs that a value is brought to before a reader takes it from there to a layout of its own.

    Where no reader does, the move to the hub is one that its readers share anyway. What loops hand on has no place for
    a second layout but behind them.
    """
    layout, arguments = graph.variables, set(graph.flow.parameters)
    found: dict[Leaf, TensorSharding] = {}
    for node in graph.flow.nodes:
        for use in node.uses:
            hub = hubs.get(use.source)
            if hub is None or hub.unreduced:
                continue
            index, leaf = use.source
            made = graph.flow.nodes[index]
            is_behind = use.source in layout.after_loops and (node.index, use.source) not in layout.in_loop_readers
            is_carried = made.is_value and index not in arguments and made.instruction.opcode in _CARRYING
            if is_carried and not is_behind:
                continue
            used = strategies[node.index].operands[use.position]
            if used not in (lies[index][leaf], hub) and not used.unreduced and hub != lies[index][leaf]:
                found[use.source] = hub
    return found


def _reduce_to(made: TensorSharding, wanted: TensorSharding | None) -> TensorSharding:
    """A partial sum reduced over the axes that `wanted` reduces: split where it wants that and nothing else moves."""
    ending = [axis for axis in made.unreduced if wanted is None or axis not in wanted.unreduced]
    kept = tuple(axis for axis in made.unreduced if axis not in ending)
    whole = TensorSharding(made.dims, kept)
    if wanted is None:
        return whole
    dims = list(made.dims)
    for axis in ending:
        for dim, axes in enumerate(wanted.dims):
            if axis in axes:
                split = {*dims[dim], axis}
                if not split <= set(axes):
                    return whole
                dims[dim] = tuple(each for each in axes if each in split)
    for dim, axes in enumerate(dims):
        if axes[: len(made.dims[dim])] != made.dims[dim]:  # an axis would come between those that split it already
            return whole
    return TensorSharding(tuple(dims), kept)


def _fill_free_nodes(graph: CostGraph, strategies: list[Strategy | None]) -> Iterator[Strategy]:
    """Fill in free nodes, readers first: per mesh axis the split that all readers want, else none."""
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


def _strategy_for_readers(graph: CostGraph, node: int, wanted: Sequence[TensorSharding]) -> Strategy:
    """The strategy of a free node whose result is what all readers agree on; replicated where there is none."""
    instruction = graph.flow.nodes[node].instruction
    whole = TensorSharding.replicated(graph.flow.nodes[node].shapes[0].rank)
    common = wanted[0] if wanted else whole
    for other in wanted[1:]:
        dims = tuple(
            tuple(axis for axis in a if axis in b) if a != b else a
            for a, b in zip(common.dims, other.dims, strict=True)
        )
        common = TensorSharding(dims)
    giving, number = graph.builder.strategy_giving, graph.variables.signatures[node]
    found = giving(instruction, number, common) or giving(instruction, number, whole)
    assert found is not None, "every instruction can be computed whole"
    return found


# ---- instructions ------------------------------------------------------------


def instruction_plans(decisions: Decisions) -> tuple[InstructionPlan, ...]:
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
    flow, graph = decisions.graph.flow, decisions.graph
    made, lies = flow.leaves[instruction], decisions.shardings
    is_alone = len(made) == 1 and len(lies[made[0][0]]) == 1
    result = lies[made[0][0]] if is_alone else tuple([lies[node][leaf] for node, leaf in made])
    partial: tuple[str, ...] = ()
    reason = ""
    used: Sequence[TensorSharding]
    if instruction.opcode in CONTROL_FLOW:
        used = [lies[node][leaf] for node, leaf in flow.entering[instruction]]
    elif instruction.opcode in BARRIERS:
        used = result
    elif instruction.opcode == "tuple" and instruction in flow.leaving:
        used = result = tuple([lies[node][leaf] for node, leaf in flow.leaving[instruction]])
    elif made and flow.nodes[made[0][0]].instruction is instruction and instruction.opcode != "parameter":
        strategy = decisions.strategies[made[0][0]]
        used = strategy.operands
        partial = (*_axes_reduced_here(strategy, result), *strategy.gathered)
        reason = graph.reason(made[0][0])
    else:
        used = [lies[node][leaf] for operand in instruction.operands for node, leaf in flow.leaves[operand]]
    return InstructionPlan(
        computation=computation,
        name=instruction.name,
        opcode=instruction.opcode,
        operands=_group_by_operand(instruction, used),
        result=result,
        partial=partial,
        reason=reason,
        shared=_second_layouts(decisions, computation, instruction, made),
    )


def _second_layouts(
    decisions: Decisions, computation: str, instruction: Instruction, made: Sequence[Leaf]
) -> ValueSharding:
    """Second layouts of what an instruction makes."""
    if not decisions.shared or decisions.shared.keys().isdisjoint(made):
        return ()
    if not _hands_out(decisions.graph, computation, instruction, made):
        return ()
    return tuple(decisions.shared.get(leaf, decisions.result(leaf)) for leaf in made)


def _hands_out(graph: CostGraph, computation: str, instruction: Instruction, made: Sequence[Leaf]) -> bool:
    """Whether readers find second layouts at an instruction: where values are made; of what a loop carries at the loop
    and at its elements behind it."""
    loops = {graph.variables.after_loops[leaf] for leaf in made if leaf in graph.variables.after_loops}
    if not loops:
        return graph.flow.nodes[made[0][0]].instruction is instruction
    is_inside = any(computation in computations_of(loop) for loop in loops)
    return instruction in loops or (instruction.opcode == "get-tuple-element" and not is_inside)


def _axes_reduced_here(strategy: Strategy, result: Sequence[TensorSharding]) -> tuple[str, ...]:
    """Axes the local results are reduced over at once: partial sums made here or taken through that end here."""
    if not (strategy.partial or any(made.unreduced for made in strategy.results)):
        return ()
    kept = {axis for lies in result for axis in lies.unreduced}
    local = [axis for made in local_results(strategy) for axis in made.unreduced]
    return tuple(dict.fromkeys(axis for axis in (*strategy.partial, *local) if axis not in kept))


def _group_by_operand(instruction: Instruction, flat: Sequence[TensorSharding]) -> tuple[ValueSharding, ...]:
    """Shardings of all operand leaves, operand by operand."""
    counts = [len(operand.shape.leaves) for operand in instruction.operands]
    if counts.count(1) == len(counts):
        return tuple([(each,) for each in flat])
    grouped, first = [], 0
    for count in counts:
        grouped.append(tuple(flat[first : first + count]))
        first += count
    return tuple(grouped)


# ---- segments ----------------------------------------------------------------


def segment_plans(decisions: Decisions, chain: Chain) -> tuple[SegmentPlan, ...]:
    """The segments in order, each with the values that it hands to others."""
    crossing = decisions.graph.variables.cross_segment
    flow = decisions.graph.flow
    products = [_forward_products(flow, instance.nodes) for instance in chain.instances]
    depth = distinguishing_depth(product for each in products for product in each)
    found = []
    for number, instance in enumerate(chain.instances):
        handed = [leaf for leaf in instance.variables[: instance.own_count] if leaf in crossing]
        found.append(
            SegmentPlan(
                name=segment_name(decisions, number, scope_range(products[number], depth)),
                kind=instance.kind,
                instructions=len(instance.nodes),
                boundary=tuple((flow.nodes[leaf[0]].instruction.name, decisions.result(leaf)) for leaf in handed),
            )
        )
    return tuple(found)


def segment_name(decisions: Decisions, number: int, scopes: str = "") -> str:
    """`segment 2, block_1, to model.py:93`: the user's scopes in it, and the line of the critical node that ends it."""
    flow, cuts = decisions.graph.flow, decisions.graph.variables.segments.cuts
    end = flow.module.place(flow.nodes[cuts[number]].instruction) if number < len(cuts) else ""
    parts = (f"segment {number}", scopes, f"to {end}" if end else "")
    return ", ".join(filter(None, parts))


def _forward_products(flow: Dataflow, nodes: Sequence[int]) -> list[Instruction]:
    """Products, lookups and the like of the forward pass: what a part of a model is known by."""
    instructions = (flow.nodes[index].instruction for index in nodes if not flow.nodes[index].is_value)
    return [each for each in instructions if each.opcode in CHOICE_OPCODES and not is_backward(each.op_name)]


# ---- variables -------------------------------------------------------------------


def variable_plans(
    decisions: Decisions, argument_names: Sequence[str], output_names: Sequence[str]
) -> tuple[tuple[VariablePlan, ...], tuple[VariablePlan, ...]]:
    """The program's parameters and outputs, flat, as they are stored between steps."""
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
    return VariablePlan.from_sharding(number, name, shape.element_type, shape.dimensions, sharding, mesh, alias=alias)
