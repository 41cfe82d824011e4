"""Rule mode: annotations are propagated without search (`propagate`), expressed as states of a chain."""

from __future__ import annotations

import numpy as np

from shardwright.planner.constraints.propagate import propagate
from shardwright.planner.segments.cost_graph import CostGraph
from shardwright.planner.segments.segment_chain import Chain, ChainSolution
from shardwright.planner.segments.variables import Variable


def propagate_shardings(chain: Chain) -> ChainSolution:
    """The states implied by the pins; shared layouts minimize the cost of their producers and consumers."""
    graph = chain.graph
    sets = [graph.set_of((node.index, -1)) for node in graph.flow.nodes]
    chosen = propagate(graph.flow, graph.prices.mesh, sets)
    states: dict[Variable, int] = {
        (node.index, -1): chosen[node.index] for node in graph.flow.nodes if not graph.is_cheap_to_recompute[node.index]
    }
    states.update(_choose_layout_states(graph, states))
    value = 0.0
    for segment, instance in enumerate(chain.instances):
        value += chain.problem(segment).value(np.array([states[v] for v in instance.variables], np.int64))
    return ChainSolution(states=states, value=value, tied_bound=0.0)


def _choose_layout_states(graph: CostGraph, states: dict[Variable, int]) -> dict[Variable, int]:
    costs = {leaf: graph.layout_matrix(leaf)[states[leaf[0], -1]] for leaf in graph.variables.shared_layouts}
    for node in graph.flow.nodes:
        if graph.is_cheap_to_recompute[node.index]:
            continue
        for use in node.uses:
            if use.source in costs and graph.variables.source(node, use) == use.source:
                costs[use.source] = costs[use.source] + graph.use_matrix(node, use)[:, states[node.index, -1]]
    return {leaf: int(np.argmin(cost)) for leaf, cost in costs.items()}
