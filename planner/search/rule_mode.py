"""Rule mode: the annotations are propagated, nothing is searched (`propagate`), written as the states of a chain."""

from __future__ import annotations

import numpy as np

from shardwright.planner.constraints.propagate import propagate
from shardwright.planner.segments.chain import Chain, SolvedChain
from shardwright.planner.segments.choices import Graph
from shardwright.planner.segments.layout import Variable


def propagated(chain: Chain) -> SolvedChain:
    """The states that follow from the pins; hubs lie as is cheapest for how they are made and read."""
    graph = chain.graph
    sets = [graph.set_of((node.index, -1)) for node in graph.flow.nodes]
    chosen = propagate(graph.flow, graph.prices.mesh, sets)
    states: dict[Variable, int] = {
        (node.index, -1): chosen[node.index] for node in graph.flow.nodes if not graph.is_free[node.index]
    }
    states.update(_hub_states(graph, states))
    value = 0.0
    for segment, instance in enumerate(chain.instances):
        value += chain.problem(segment).value(np.array([states[v] for v in instance.variables], np.int64))
    return SolvedChain(states=states, value=value, rolled_bound=0.0)


def _hub_states(graph: Graph, states: dict[Variable, int]) -> dict[Variable, int]:
    costs = {leaf: graph.spread_matrix(leaf)[states[leaf[0], -1]] for leaf in graph.layout.hubs}
    for node in graph.flow.nodes:
        if graph.is_free[node.index]:
            continue
        for use in node.uses:
            if use.source in costs and graph.layout.source(node, use) == use.source:
                costs[use.source] = costs[use.source] + graph.use_matrix(node, use)[:, states[node.index, -1]]
    return {leaf: int(np.argmin(cost)) for leaf, cost in costs.items()}
