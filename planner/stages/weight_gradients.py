"""The part of the backward pass awaited by no other part of the model: gradients of variables.

A zero-bubble schedule computes them later (Qi et al., 2023), in separate programs:
`planner/pipeline/weight_programs.py`.
"""

from __future__ import annotations

from typing import NamedTuple

from shardwright.planner.graph.dataflow import Leaf
from shardwright.planner.stages.clustering import Clustering


class WeightGradients(NamedTuple):
    """nodes: backward nodes that lead to no other part.
    read: values of the rest of the backward pass that these nodes read; kept until they run.
    """

    nodes: frozenset[int]
    read: frozenset[Leaf]


def find_weight_gradients(coarse: Clustering) -> WeightGradients:
    """Finds the deferrable nodes. A loop over layers is one node handing its gradient on: never deferred."""
    flow, ahead = coarse.flow, coarse.forward | coarse.fed
    backward = {
        node.index
        for node in flow.nodes
        if coarse.first[node.index] >= 0 and node.index not in ahead and node.index not in coarse.once
    }.difference(flow.parameters)
    awaited = {i for i in coarse.stacks if i in backward}
    for node in reversed(flow.nodes):
        i = node.index
        if i not in backward:
            continue
        for source in {use.source[0] for use in node.uses} & backward:
            if i in awaited or coarse.part(source) != coarse.part(i):
                awaited.add(source)
    nodes = frozenset(backward - awaited)
    sources = (use.source for i in nodes for use in flow.nodes[i].uses)
    return WeightGradients(nodes, frozenset(leaf for leaf in sources if leaf[0] in awaited))
