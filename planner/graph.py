"""The graph of decisions: every node, or clusters of nodes that decide together; and the choice problem over them.

In a program of up to `FINE_NODES` nodes each one chooses for itself: the exact reductions fold that as fast as a
coarsened graph, and nothing is lost. Larger programs are coarsened.
There a node follows the producer of one of its operands when each strategy of that producer's cluster leaves the node
exactly one strategy that uses the operand as it comes, and together they reach all strategies of the node. Then
nothing is chosen at the node: elementwise chains, transposes, most reshapes follow; products, reductions,
gathers and values with pins choose for themselves. Where operands of two clusters meet (a residual addition), the
node follows the cluster that chose last, and the other operand may be resharded on its way in.

What is made from constants, iota and scalars alone is left out: any device can make any part of it, so it takes
the sharding its readers want (`Graph.is_free`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from shardwright.planner.confine import Confinement
from shardwright.planner.dataflow import Dataflow, Node, Use
from shardwright.planner.pbqp import Problem
from shardwright.planner.prices import FloatArray, IntArray, Prices
from shardwright.planner.strategies import StrategyBuilder, StrategySet

#: Instructions that cost next to nothing to make anew in any sharding, when all they read is free too.
_REMADE = frozenset({
    "constant", "iota", "broadcast", "convert", "compare", "select", "add", "subtract", "multiply", "divide", "negate",
    "and", "or", "not", "xor", "maximum", "minimum", "reshape", "transpose", "sign", "abs", "clamp", "rsqrt", "sqrt",
    "exponential", "power", "copy", "floor", "shift-left", "shift-right-logical",
})  # fmt: skip

#: Largest program, in nodes, that is not coarsened.
FINE_NODES = 3000

_VIEWS = frozenset({"convert", "copy", "transpose", "reshape", "bitcast"})


@dataclass(slots=True, kw_only=True, eq=False)
class Graph:
    """Clusters over the nodes of a dataflow.

    sets: strategies per node. cluster_of: per node its cluster, or -1 for a free node.
    leaders: per cluster the node whose strategies are the cluster's states.
    strategy_of: per node, the strategy that goes with each state of its cluster.
    in_place: nodes whose value is used as it lies or split further, never gathered.
    arriving: nodes of arguments that the client sends with every step.
    """

    flow: Dataflow
    prices: Prices
    sets: list[StrategySet]
    is_free: list[bool]
    cluster_of: list[int] = field(default_factory=list)
    leaders: list[int] = field(default_factory=list)
    strategy_of: list[IntArray] = field(default_factory=list)
    in_place: frozenset[int] = frozenset()
    arriving: frozenset[int] = frozenset()

    def problem(self) -> Problem:
        """Costs of all clusters' states, and of resharding between every pair of clusters."""
        problem = Problem(costs=[np.zeros(len(self.sets[leader])) for leader in self.leaders])
        for node in self.flow.nodes:
            if self.is_free[node.index]:
                continue
            cluster = self.cluster_of[node.index]
            problem.costs[cluster] += node.weight * self.sets[node.index].time_s[self.strategy_of[node.index]]
            if node.index in self.arriving:
                problem.costs[cluster] += self._arrival_s(node)
            for use in node.uses:
                if not self.is_free[use.source[0]]:
                    problem.add_edge(self.cluster_of[use.source[0]], cluster, self._use_matrix(node, use))
        return problem

    def _arrival_s(self, node: Node) -> FloatArray:
        """Seconds of sending an argument, per state of its cluster."""
        strategies = self.sets[node.index].strategies
        seconds = [self.prices.arrival_s(node.shapes[0], strategy.results[0]) for strategy in strategies]
        return np.array(seconds)[self.strategy_of[node.index]]

    def _use_matrix(self, node: Node, use: Use) -> FloatArray:
        """Seconds a step of resharding one operand: states of its producer's cluster × of the node's."""
        source, leaf = use.source
        made = self.sets[source].result_ids[self.strategy_of[source], leaf]
        wanted = self.sets[node.index].operand_ids[self.strategy_of[node.index], use.position]
        if use.hard:
            return np.where(made[:, None] == wanted[None, :], 0.0, np.inf)
        matrix = use.weight * self.prices.reshard_matrix(self.flow.nodes[source].shapes[leaf], made, wanted)
        return np.where(matrix > 0, np.inf, matrix) if source in self.in_place else matrix


def build_graph(
    flow: Dataflow,
    builder: StrategyBuilder,
    prices: Prices,
    pinned: Mapping[int, StrategySet],
    in_place: frozenset[int] = frozenset(),
    confinement: Confinement | None = None,
    *,
    arriving: frozenset[int] = frozenset(),
    coarsen: bool | None = None,
) -> Graph:
    """Cluster the nodes of `flow`.

    pinned: the strategies of nodes that may not choose freely. in_place: nodes whose value may not be
    gathered for use, nor what is converted or transposed from it. confinement: what a forced strategy leaves
    to the nodes that are not pinned. arriving: as in `Graph`. coarsen: whether nodes may follow others;
    None decides by size.
    """
    coarsen = len(flow.nodes) > FINE_NODES if coarsen is None else coarsen
    free = free_nodes(flow, pinned)

    def strategies(node: Node) -> StrategySet:
        found = pinned.get(node.index)
        if found is not None:
            return found
        found = builder.of_value(node.shapes[0]) if node.is_value else builder.of_instruction(node.instruction)
        return found if confinement is None or free[node.index] else confinement.narrow(node, found)

    sets = [strategies(node) for node in flow.nodes]
    graph = Graph(
        flow=flow, prices=prices, sets=sets, is_free=free, in_place=_with_views(flow, in_place), arriving=arriving
    )
    follow = _Follow(graph)
    for node in flow.nodes:
        if free[node.index]:
            graph.cluster_of.append(-1)
            graph.strategy_of.append(np.zeros(0, np.int64))
            continue
        found = follow.leader(node) if coarsen and node.index not in pinned else None
        if found is None:
            graph.cluster_of.append(len(graph.leaders))
            graph.leaders.append(node.index)
            graph.strategy_of.append(np.arange(len(sets[node.index])))
        else:
            graph.cluster_of.append(found[0])
            graph.strategy_of.append(found[1])
    return graph


def _with_views(flow: Dataflow, nodes: frozenset[int]) -> frozenset[int]:
    """`nodes`, and what only rearranges or converts their values."""
    found = set(nodes)
    if nodes:
        for node in flow.nodes:
            if node.instruction.opcode in _VIEWS and not node.is_value and node.uses[0].source[0] in found:
                found.add(node.index)
    return frozenset(found)


def free_nodes(flow: Dataflow, pinned: Mapping[int, StrategySet]) -> list[bool]:
    """Per node, whether each reader gets it made anew, in the sharding that it wants."""
    free: list[bool] = []
    for node in flow.nodes:
        free.append(
            not node.is_value
            and len(node.shapes) == 1
            and node.index not in pinned
            and node.instruction.opcode in _REMADE
            and all(
                source < node.index and (free[source] or flow.nodes[source].shapes[leaf].rank == 0)
                for source, leaf in (use.source for use in node.uses)
            )
        )
    return free


class _Follow:
    """Finds the cluster a node can follow; equal questions are answered once."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._maps: dict[tuple[bytes, bytes], IntArray | None] = {}

    def leader(self, node: Node) -> tuple[int, IntArray] | None:
        """(cluster, the node's strategy per state of it), or None where the node must choose itself."""
        if not node.uses or (node.is_value and (len(node.uses) != 1 or node.uses[0].source[0] > node.index)):
            return None
        for use in self._by_preference(node):
            mapping = self._mapping(node, use)
            if mapping is not None:
                return self._graph.cluster_of[use.source[0]], mapping
        return None

    def _by_preference(self, node: Node) -> list[Use]:
        """Operands that could lead: those whose cluster chose last first, broadcasts last."""
        graph = self._graph
        uses = [use for use in node.uses if not graph.is_free[use.source[0]] and use.source[0] < node.index]

        def preference(use: Use) -> tuple[bool, int]:
            leader = graph.leaders[graph.cluster_of[use.source[0]]]
            return graph.flow.nodes[leader].instruction.opcode == "broadcast", -leader

        return sorted(uses, key=preference)

    def _mapping(self, node: Node, use: Use) -> IntArray | None:
        graph = self._graph
        source, leaf = use.source
        made = graph.sets[source].result_ids[graph.strategy_of[source], leaf]
        wanted = graph.sets[node.index].operand_ids[:, use.position]
        key = (made.tobytes(), wanted.tobytes())
        if key not in self._maps:
            self._maps[key] = _one_to_one(made, wanted)
        return self._maps[key]


def _one_to_one(made: IntArray, wanted: IntArray) -> IntArray | None:
    """The only strategy that wants each sharding made; None unless there is just one, and all are reached."""
    strategy = {int(sharding): i for i, sharding in enumerate(wanted)}
    if len(strategy) != len(wanted) or set(strategy) != set(made.tolist()):
        return None
    return np.array([strategy[int(sharding)] for sharding in made], np.int64)
