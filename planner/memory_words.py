"""What messages say of memory: what dominates where a plan takes most, and what it is made of."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath

from shardwright.cost.memory import shard_bytes
from shardwright.planner.assemble import Decisions
from shardwright.planner.budget import Peak
from shardwright.report.units import format_bytes

#: Source lines that a message names, at most.
_MOST_LINES = 3


def dominating(peak: Peak, decisions: Decisions) -> str:
    """`2.1 GiB of model.py:93, 1.0 GiB of model.py:97`: the source lines whose values take most at a peak."""
    flow, mesh = decisions.graph.flow, decisions.graph.prices.mesh
    taken: dict[str, int] = {}
    for node, leaf in peak.values:
        line = flow.module.source(flow.nodes[node].instruction)
        if line is not None and node not in flow.parameters:
            where = f"{PurePath(line.file).name}:{line.line}"
            shape = flow.nodes[node].shapes[leaf]
            size = shard_bytes(shape.element_type, shape.dimensions, decisions.result((node, leaf)), mesh)
            taken[where] = taken.get(where, 0) + size
    largest = sorted(taken.items(), key=lambda item: (-item[1], item[0]))[:_MOST_LINES]
    return ", ".join(f"{format_bytes(size)} of {where}" for where, size in largest if size)


def breakdown(parameters: Mapping[str, int], temporaries: int) -> str:
    """`parameters and state 1.2 GiB, activations and the rest 4.0 GiB`, the larger first."""
    parts = {**parameters, "activations, gradients and buffers": temporaries}
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    return ", ".join(f"{what} {format_bytes(size)}" for what, size in ordered if size)
