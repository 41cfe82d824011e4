"""What is made of constants, iota and scalars alone, and takes too long to be made anew for each reader.

`layout.free_nodes` lets such values take whatever sharding their readers want, at no price but the least: right for a
mask beside the products it masks, wrong where comparing indices is a good part of a small program. There it is a choice
like any other.
"""

from __future__ import annotations

from shardwright.cost import HardwareProfile
from shardwright.planner.costs.kernels import whole_s
from shardwright.planner.graph.dataflow import Dataflow
from shardwright.planner.segments.layout import free_nodes

#: Part of the program's computing that what is made anew may take altogether, and one instruction of it.
_MOST, _MOST_EACH = 1e-3, 1e-4

#: Nodes of the largest program in which it is looked for: in larger ones it has yet to be seen.
_NODES = 2500


def dear_nodes(flow: Dataflow, profile: HardwareProfile) -> frozenset[int]:
    """The nodes that could be made anew for each reader and are not to be; no scalars, which lie in one way only."""
    if len(flow.nodes) > _NODES:
        return frozenset()
    times = {node.index: whole_s(node, profile) for node in flow.nodes if not node.is_value}
    free = {index for index, is_free in enumerate(free_nodes(flow, ())) if is_free}
    total_s = sum(times.values())
    if sum(times[index] for index in free) <= _MOST * total_s:
        return frozenset()
    return frozenset(
        index for index in free if flow.nodes[index].shapes[0].rank and times[index] > _MOST_EACH * total_s
    )
