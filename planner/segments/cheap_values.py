"""What is made of constants, iota and scalars alone, and takes too long to be made anew for each reader.

`layout.cheap_nodes` lets such values take whatever sharding their readers want, at no price but the least: right for a
mask beside the products it masks, wrong where comparing indices is a good part of a small program, or counting the
elements of dropout's masks (`jax_threefry_partitionable`) is some percent of a large one. There it is a choice like any
other.
"""

from __future__ import annotations

from collections import defaultdict

from shardwright.cost import HardwareProfile
from shardwright.hlo import ArrayShape
from shardwright.planner.costs.kernels import Kernels, one_device_s
from shardwright.planner.graph.dataflow import Dataflow, Node
from shardwright.planner.segments.variables import cheap_nodes

#: Part of the program's computing that what is made anew may take altogether, and equal instructions of it.
_MAX_SHARE, _MAX_EQUAL_SHARE = 1e-3, 1e-4


def expensive_nodes(flow: Dataflow, kernels: Kernels, profile: HardwareProfile) -> frozenset[int]:
    """The nodes that could be made anew for each reader and are not to be; no scalars, which lie in one way only."""
    times = {node.index: one_device_s(node, kernels, profile) for node in flow.nodes if not node.is_value}
    free = {index for index, is_free in enumerate(cheap_nodes(flow, ())) if is_free}
    total_s = sum(times.values())
    if sum(times[index] for index in free) <= _MAX_SHARE * total_s:
        return frozenset()
    alike_s: defaultdict[tuple[str, ArrayShape], float] = defaultdict(float)
    for index in free:
        alike_s[_kind(flow.nodes[index])] += times[index]
    return frozenset(
        index
        for index in free
        if flow.nodes[index].shapes[0].rank and alike_s[_kind(flow.nodes[index])] > _MAX_EQUAL_SHARE * total_s
    )


def _kind(node: Node) -> tuple[str, ArrayShape]:
    return node.instruction.opcode, node.shapes[0]
