"""What a peak takes as a sum over the variables that decide it: alone, or two at a time.

A row of an integer program is such a sum with a limit (`mixing`, `exact_fit`). Every copy is a term of both who decides
how the value lies and who wants it otherwise, as prices have it (`Chain.problem`).
"""

from __future__ import annotations

from collections.abc import Container, Iterator

from shardwright.planner.memory.constraint import MemoryConstraint
from shardwright.planner.memory.loop_gathers import argument_of_use
from shardwright.planner.memory.terms import (
    layout_copy_bytes,
    loop_gather_bytes,
    node_bytes,
    partial_sum_bytes,
    reader_copy_bytes,
    reshard_bytes,
)
from shardwright.planner.segments.cost_graph import CostGraph
from shardwright.planner.segments.variables import Variable
from shardwright.planner.solver.pbqp import FloatArray

#: Bytes by the states of one variable, or of a pair: the first one's along rows.
MemoryTerm = tuple[tuple[Variable, ...], FloatArray]


def constraint_terms(graph: CostGraph, peak: MemoryConstraint, wanted: Container[Variable]) -> Iterator[MemoryTerm]:
    """The bytes at a peak that any of the `wanted` variables decides, alone or with another one.

    The others' part of `MemoryModel.bytes_at` is not among them.
    """

    def any_wanted(*variables: Variable) -> bool:
        return any(variable in wanted for variable in variables)

    for node in graph.flow.nodes:
        made = (node.index, -1)
        if made in wanted and (decided := node_bytes(graph, peak, node.index)) is not None:
            yield (made,), decided
        for leaf in range(len(node.shapes)):
            hub = (node.index, leaf)
            if hub in peak.layout_copies and hub in graph.variables.shared_layouts and any_wanted(made, hub):
                yield (made, hub), peak.layout_copy_weight(hub) * layout_copy_bytes(graph, hub)
        for use in node.uses:
            if graph.is_cheap_to_recompute[use.source[0]] or graph.is_cheap_to_recompute[node.index]:
                continue
            source = graph.variables.source(node, use)
            if any_wanted(source, made) and (times := peak.reader_copy_weight(use.source)):
                yield (source, made), times * reader_copy_bytes(graph, node, use)
            operand = (node.index, use.position)
            if any_wanted(source, made) and (times := peak.reshard_weight(operand)):
                yield (source, made), times * reshard_bytes(graph, operand)
    for leaf_made in sorted(peak.reduced_values):
        decider = (leaf_made[0], -1)
        kept = None if graph.is_cheap_to_recompute[leaf_made[0]] else partial_sum_bytes(graph, leaf_made)
        if kept is not None and any_wanted(decider, kept[0]):
            yield (decider, kept[0]), peak.value_weight(leaf_made) * kept[1]
    for reading in sorted(peak.loop_gathers):
        user, argument = (reading[0], -1), (argument_of_use(graph.flow, reading), -1)
        if any_wanted(argument, user):
            yield (argument, user), peak.loop_gather_weight(reading) * loop_gather_bytes(graph, reading)
