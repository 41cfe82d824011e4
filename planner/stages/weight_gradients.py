"""What of the backward pass no other part of the model waits for: gradients of variables, which a zero-bubble schedule
computes later (Qi et al., 2023). `planner/pipeline/weight_programs.py` puts it into programs of its own."""

from __future__ import annotations

from typing import NamedTuple

from shardwright.planner.graph.dataflow import Leaf
from shardwright.planner.stages.clustering import Clustering


class WeightGradients(NamedTuple):
    """nodes: of the backward pass that lead to no other part. read: values of the rest of the backward pass that these
    read: kept until they run."""

    nodes: frozenset[int]
    read: frozenset[Leaf]


def find_weight_gradients(coarse: Clustering) -> WeightGradients:
    """A loop over layers is one node that hands its gradient on: nothing of it can wait."""
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
    read = (use.source for i in nodes for use in flow.nodes[i].uses)
    return WeightGradients(nodes, frozenset(leaf for leaf in read if leaf[0] in awaited))
