"""Values of constants, iota and scalars alone that are too expensive to recompute for each reader.

`variables.cheap_nodes` gives such values the sharding wanted by each reader, at the minimum price: right for a mask
beside its products, wrong when comparing indices is a good part of a small program, or when counting the elements of
dropout's masks (`jax_threefry_partitionable`) is some percent of a large one. There they are ordinary variables.
"""

from __future__ import annotations

from collections import defaultdict

from shardwright.cost import HardwareProfile
from shardwright.hlo import ArrayShape
from shardwright.planner.costs.kernels import Kernels, one_device_s
from shardwright.planner.graph.dataflow import Dataflow, Node
from shardwright.planner.segments.tuning import MAX_CHEAP_SHARE, MAX_EQUAL_SHARE
from shardwright.planner.segments.variables import cheap_nodes


def expensive_nodes(flow: Dataflow, kernels: Kernels, profile: HardwareProfile) -> frozenset[int]:
    """The recomputable nodes too expensive to recompute for each reader; no scalars, which have one layout only."""
    times = {node.index: one_device_s(node, kernels, profile) for node in flow.nodes if not node.is_value}
    free = {index for index, is_free in enumerate(cheap_nodes(flow, ())) if is_free}
    total_s = sum(times.values())
    if sum(times[index] for index in free) <= MAX_CHEAP_SHARE * total_s:
        return frozenset()
    alike_s: defaultdict[tuple[str, ArrayShape], float] = defaultdict(float)
    for index in free:
        alike_s[_kind(flow.nodes[index])] += times[index]
    return frozenset(
        index
        for index in free
        if flow.nodes[index].shapes[0].rank and alike_s[_kind(flow.nodes[index])] > MAX_EQUAL_SHARE * total_s
    )


def _kind(node: Node) -> tuple[str, ArrayShape]:
    return node.instruction.opcode, node.shapes[0]
