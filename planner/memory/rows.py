"""What a peak takes as a sum over the variables that decide it: alone, or two at a time.

A row of an integer program is such a sum with a limit (`mixing`, `exact_fit`). Every copy is a term of both who decides
how the value lies and who wants it otherwise, as prices have it (`Chain.problem`).
"""

from __future__ import annotations

from collections.abc import Container, Iterator

from shardwright.planner.memory.budget import Peak
from shardwright.planner.memory.carried import argument_of
from shardwright.planner.memory.state_bytes import (
    brought_bytes,
    carried_bytes,
    copy_bytes,
    decided_bytes,
    kept_bytes,
    read_bytes,
)
from shardwright.planner.segments.choices import Graph
from shardwright.planner.segments.layout import Variable
from shardwright.planner.solver.pbqp import FloatArray

#: Bytes by the states of one variable, or of a pair: the first one's along rows.
Term = tuple[tuple[Variable, ...], FloatArray]


def terms(graph: Graph, peak: Peak, wanted: Container[Variable]) -> Iterator[Term]:
    """The bytes at a peak that any of the `wanted` variables decides, alone or with another one.

    The others' part of `Memory.taken_at` is not among them.
    """

    def any_wanted(*variables: Variable) -> bool:
        return any(variable in wanted for variable in variables)

    for node in graph.flow.nodes:
        made = (node.index, -1)
        if made in wanted and (decided := decided_bytes(graph, peak, node.index)) is not None:
            yield (made,), decided
        for leaf in range(len(node.shapes)):
            hub = (node.index, leaf)
            if hub in peak.copies and hub in graph.layout.hubs and any_wanted(made, hub):
                yield (made, hub), peak.times_copy(hub) * copy_bytes(graph, hub)
        for use in node.uses:
            if graph.is_free[use.source[0]] or graph.is_free[node.index]:
                continue
            source = graph.layout.source(node, use)
            if any_wanted(source, made) and (times := peak.times_read(use.source)):
                yield (source, made), times * read_bytes(graph, node, use)
            operand = (node.index, use.position)
            if any_wanted(source, made) and (times := peak.times_brought(operand)):
                yield (source, made), times * brought_bytes(graph, operand)
    for leaf_made in sorted(peak.reduced):
        decider = (leaf_made[0], -1)
        kept = None if graph.is_free[leaf_made[0]] else kept_bytes(graph, leaf_made)
        if kept is not None and any_wanted(decider, kept[0]):
            yield (decider, kept[0]), peak.times_value(leaf_made) * kept[1]
    for reading in sorted(peak.carried):
        user, argument = (reading[0], -1), (argument_of(graph.flow, reading), -1)
        if any_wanted(argument, user):
            yield (argument, user), peak.times_carried(reading) * carried_bytes(graph, reading)
