"""The bytes at a peak as a sum of terms over single variables and pairs.

A row of an integer program is such a sum with a limit (`restricted_master`, `ilp_with_memory_rows`). Every copy is a
term of the source's and the reader's variables, like its price (`Chain.problem`).
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

#: Bytes by the states of one variable, or of a pair, the first one's along rows.
MemoryTerm = tuple[tuple[Variable, ...], FloatArray]


def constraint_terms(graph: CostGraph, peak: MemoryConstraint, scope: Container[Variable]) -> Iterator[MemoryTerm]:
    """The bytes at a peak decided by any variable in `scope`, alone or in a pair.

    Other variables' parts of `MemoryModel.bytes_at` are left out.
    """

    def any_wanted(*variables: Variable) -> bool:
        return any(variable in scope for variable in variables)

    for node in graph.flow.nodes:
        producer = (node.index, -1)
        if producer in scope and (decided := node_bytes(graph, peak, node.index)) is not None:
            yield (producer,), decided
        for leaf in range(len(node.shapes)):
            hub = (node.index, leaf)
            if hub in peak.layout_copies and hub in graph.variables.shared_layouts and any_wanted(producer, hub):
                yield (producer, hub), peak.layout_copy_weight(hub) * layout_copy_bytes(graph, hub)
        for use in node.uses:
            if graph.is_cheap_to_recompute[use.source[0]] or graph.is_cheap_to_recompute[node.index]:
                continue
            source = graph.variables.source(node, use)
            if any_wanted(source, producer) and (times := peak.reader_copy_weight(use.source)):
                yield (source, producer), times * reader_copy_bytes(graph, node, use)
            operand = (node.index, use.position)
            if any_wanted(source, producer) and (times := peak.reshard_weight(operand)):
                yield (source, producer), times * reshard_bytes(graph, operand)
    for leaf_made in sorted(peak.reduced_values):
        decider = (leaf_made[0], -1)
        unscattered = None if graph.is_cheap_to_recompute[leaf_made[0]] else partial_sum_bytes(graph, leaf_made)
        if unscattered is not None and any_wanted(decider, unscattered[0]):
            yield (decider, unscattered[0]), peak.value_weight(leaf_made) * unscattered[1]
    for reading in sorted(peak.loop_gathers):
        user, argument = (reading[0], -1), (argument_of_use(graph.flow, reading), -1)
        if any_wanted(argument, user):
            yield (argument, user), peak.loop_gather_weight(reading) * loop_gather_bytes(graph, reading)
