"""The variables of a program on one mesh (listed in `variables`), and the choice problem of any of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from shardwright.cost.moves.relayout import MoveEnds
from shardwright.planner.clock import Clock
from shardwright.planner.constraints.carried import CarriedDecisions
from shardwright.planner.constraints.confine import Confinement
from shardwright.planner.costs.prices import FloatArray, IntArray, Prices
from shardwright.planner.costs.rounded_uses import rounded_shape
from shardwright.planner.graph.dataflow import Dataflow, Leaf, Node, Use
from shardwright.planner.segments.neighborhood_cache import NeighborhoodCache
from shardwright.planner.segments.readiness import Readiness
from shardwright.planner.segments.tuning import STORAGE_TIE_BREAK
from shardwright.planner.segments.variables import FILL_OPCODES, ProgramVariables, Variable
from shardwright.planner.solver.pbqp import Problem
from shardwright.planner.strategies.expansion import Restriction
from shardwright.planner.strategies.strategy_set import StrategyBuilder, StrategySet
from shardwright.planner.strategies.tie_break import TieBreak


@dataclass(slots=True, kw_only=True, eq=False)
class CostGraph:
    """The variables of a program on one mesh.

    pinned: strategies of pinned nodes; all others are enumerated on demand.
    in_place: nodes with values used in their own sharding or split further, never gathered.
    kept_axes: the axes over which they are not; none: over any.
    fed_arguments: nodes of arguments sent by the client with every step.
    restrictions: strategies left to each variable, in the neighbourhood of one plan.
    combinable_bytes: value → bytes of all values with collectives combinable with its own.
    overlappable: values with overlapped collectives; only `exposed_fraction` of these is priced.
    hiding_nodes: nodes with overlapping compute; only `counted_fraction` of it is priced.
    readiness: of overlapped values.
    isomorphic_variables: variable of a repeated segment → its equal in the first such segment, with the same states.
    clock: ends the construction of problems.
    neighborhood_cache: common parts of neighbourhoods on this mesh.
    """

    variables: ProgramVariables
    prices: Prices
    builder: StrategyBuilder
    pinned: Mapping[int, StrategySet]
    in_place: frozenset[int] = frozenset()
    kept_axes: frozenset[str] = frozenset()
    fed_arguments: frozenset[int] = frozenset()
    confinement: Confinement | CarriedDecisions | None = None
    preference: TieBreak | None = None
    restrictions: Mapping[Variable, Restriction] = field(default_factory=dict)
    combinable_bytes: Mapping[Leaf, int] = field(default_factory=dict)
    overlappable: frozenset[Leaf] = frozenset()
    exposed_fraction: float = 1.0
    readiness: Readiness | None = None
    hiding_nodes: frozenset[int] = frozenset()
    counted_fraction: float = 1.0
    isomorphic_variables: Mapping[Variable, Variable] = field(default_factory=dict)
    clock: Clock = field(default_factory=Clock)
    neighborhood_cache: NeighborhoodCache = field(default_factory=NeighborhoodCache)
    _min_seconds: dict[bool, float] = field(default_factory=dict)
    _partial: dict[tuple[int, bytes, bytes], tuple[FloatArray, FloatArray]] = field(default_factory=dict)
    _sets: dict[Variable, StrategySet] = field(default_factory=dict)

    @property
    def flow(self) -> Dataflow:
        return self.variables.flow

    @property
    def is_cheap_to_recompute(self) -> Sequence[bool]:
        return self.variables.is_cheap_to_recompute

    def set_of(self, variable: Variable) -> StrategySet:
        """The strategies of a node, or the shardings of a shared layout."""
        strategies = self._sets.get(variable)
        if strategies is None:
            # Restrictions are of single variables: equal segments may have different ones.
            model = None if self.restrictions else self.isomorphic_variables.get(variable)
            strategies = self._sets[variable] = self._build_set(*variable) if model is None else self.set_of(model)
        return strategies

    def reason(self, index: int) -> str:
        """Why a node has no choice; empty if it has one."""
        number = self.variables.signatures[index]
        if number < 0 or not self.builder.rules.of_number(number).reason:
            return ""  # without enumerating its strategies
        return self.set_of((index, -1)).reason

    def _build_set(self, index: int, leaf: int) -> StrategySet:
        node, layout, near = self.flow.nodes[index], self.variables, self.restrictions.get((index, leaf))
        inside = layout.inside.get(index, frozenset())
        if leaf >= 0:
            partial = layout.can_be_partial[index] and (index, leaf) not in layout.always_reduced
            return self.builder.of_value(node.shapes[leaf], partial=partial, near=near, inside=inside)
        strategies = self.pinned.get(index)
        if strategies is not None:
            return strategies if near is None else self.builder.restrict_values(strategies, near)
        if node.is_value:
            partial = layout.can_be_partial[index]
            strategies = self.builder.of_value(node.shapes[0], partial=partial, near=near, inside=inside)
        else:
            ways, number, ends = layout.partial_operand_sets[index], layout.signatures[index], layout.ends_kernel(index)
            traffic = layout.kernels.traffic[index]
            strategies = self.builder.of_instruction(
                node.instruction, ways, number, near, ends_kernel=ends, traffic=traffic
            )
        if self.confinement is None or layout.is_cheap_to_recompute[index] or self._is_manual(index):
            return strategies
        return self.confinement.narrow(node, strategies)

    def _is_manual(self, index: int) -> bool:
        """Whether a node is in a manual region, or at its border: what is forced is forced outside."""
        number = self.variables.signatures[index]
        at_border = number >= 0 and self.builder.rules.of_number(number).manual is not None
        return at_border or index in self.variables.inside

    # ---- the problem of some nodes -------------------------------------------
    def min_compute_s(self) -> float:
        """Lower bound, seconds a step: every node with a choice in its cheapest strategy, no moves."""
        return self._min_s(free=False)

    def min_recompute_s(self) -> float:
        """The same for values recomputed per reader."""
        return self._min_s(free=True)

    def _min_s(self, *, free: bool) -> float:
        if free not in self._min_seconds:
            least: dict[int, float] = {}
            total = 0.0
            is_free = self.is_cheap_to_recompute
            for node in self.flow.nodes:
                if not node.is_value and is_free[node.index] == free:
                    self.clock.check()
                    strategies = self.set_of((node.index, -1))
                    if id(strategies) not in least:
                        least[id(strategies)] = float(strategies.time_s.min())
                    total += self._weight(node) * least[id(strategies)]
            self._min_seconds[free] = total
        return self._min_seconds[free]

    def problem(self, nodes: Sequence[int], variables: Sequence[Variable]) -> Problem:
        """Costs of `nodes`: seconds a step of compute, and of moves between them and their shared layouts."""
        layout, all_nodes = self.variables, self.flow.nodes
        position = {variable: i for i, variable in enumerate(variables)}
        problem = Problem(costs=[np.zeros(len(self.set_of(variable))) for variable in variables])
        for index in nodes:
            self.clock.check()
            node = all_nodes[index]
            mine = position[index, -1]
            problem.costs[mine] = problem.costs[mine] + self._node_costs(node)
            for leaf in range(len(node.shapes)):
                if (index, leaf) in layout.shared_layouts:
                    problem.add_edge(mine, position[index, leaf], self.layout_matrix((index, leaf)))
                if (index, leaf) in layout.after_loops:
                    hub = position[index, leaf]
                    problem.costs[hub] = problem.costs[hub] + self._storage_tie_break_s((index, leaf))
            for use in node.uses:
                if not layout.is_cheap_to_recompute[use.source[0]]:
                    problem.add_edge(position[layout.source(node, use)], mine, self.use_matrix(node, use))
        return problem

    def _weight(self, node: Node) -> float:
        """Executions a step, times the computed part and the counted fraction."""
        weight = node.weight * self.variables.kernels.parts[node.index]
        return weight * self.counted_fraction if node.index in self.hiding_nodes else weight

    def _node_costs(self, node: Node) -> FloatArray:
        """Seconds of each strategy of a node, a step: compute, sums combined, arrival of an argument, tie breaks.
        Infinite for a partial sum of a value recomputed per reader."""
        strategies = self.set_of((node.index, -1))
        costs = self._weight(node) * strategies.time_s
        if self.preference is not None:
            costs = costs + self.preference.penalty_s(strategies)
        if node.instruction.opcode in FILL_OPCODES and not node.is_value:  # stored, though computed for free
            shardings = [strategy.results[0] for strategy in strategies.strategies]
            costs = costs + node.weight * STORAGE_TIE_BREAK * self.prices.write_s(node.shapes[0], shardings)
        if node.index in self.fed_arguments:
            costs = costs + [
                self.prices.arrival_s(node.shapes[0], strategy.results[0]) for strategy in strategies.strategies
            ]
        is_free = self.is_cheap_to_recompute
        for use in node.uses:  # a cheap value can be a partial sum only if it is zero
            if is_free[use.source[0]] and not self.variables.can_be_partial[use.source[0]]:
                partial = np.array(
                    [bool(strategy.operands[use.position].unreduced) for strategy in strategies.strategies]
                )
                costs = np.where(partial, np.inf, costs)
        return costs

    def _storage_tie_break_s(self, hub: Leaf) -> FloatArray:
        """Tie break between equally fast layouts of a loop's accumulated value: the smaller wins."""
        shardings = [strategy.results[0] for strategy in self.set_of(hub).strategies]
        return STORAGE_TIE_BREAK * self.prices.write_s(self.flow.nodes[hub[0]].shapes[hub[1]], shardings)

    def layout_matrix(self, hub: Leaf) -> FloatArray:
        """Seconds of resharding a value from its producer's sharding (rows) to its shared layout."""
        index, leaf = hub
        produced = self.set_of((index, -1)).result_ids[:, leaf]
        shared = self.set_of(hub).result_ids[:, 0]
        is_rounded = hub in self.variables.rounded.hubs  # readers for which it is not are mostly content without a move
        weight, ends = self.variables.shared_layouts[hub], self.variables.layout_ends[hub]
        return self._move_costs(hub, produced, shared, weight, ends, is_rounded=is_rounded)

    def use_matrix(self, node: Node, use: Use) -> FloatArray:
        """Seconds of resharding an operand from its producer's sharding, or its shared layout (rows), to the node's
        sharding of it."""
        source = self.variables.source(node, use)
        is_hub = source[1] >= 0
        stored = self.set_of(source).result_ids[:, 0 if is_hub else use.source[1]]
        wanted = self.set_of((node.index, -1)).operand_ids[:, use.position]
        if use.hard:
            return np.where(stored[:, None] == wanted[None, :], 0.0, np.inf)
        is_rounded = (node.index, use.position) in self.variables.rounded.uses
        ends = self.variables.ends(node, use)
        matrix = self._move_costs(use.source, stored, wanted, use.weight, ends, is_rounded=is_rounded)
        if not is_hub:
            return matrix
        return self._forbid_new_partial_sums(
            matrix, stored, wanted
        )  # a whole value may be stored in its producer's split

    def _forbid_new_partial_sums(self, matrix: FloatArray, origins: IntArray, targets: IntArray) -> FloatArray:
        """A matrix of moves without those from a whole value to a partial sum; the same object for equal edges."""
        key = (id(matrix), origins.tobytes(), targets.tobytes())
        matrices = self._partial.get(key)
        if matrices is None:
            is_becoming = self.prices.is_made_partial(origins, targets)
            matrices = matrix, np.where(is_becoming, np.inf, matrix) if is_becoming.any() else matrix
            self._partial[key] = matrices  # with the matrix: its number stays its own
        return matrices[1]

    def _move_costs(
        self, source: Leaf, origins: IntArray, targets: IntArray, weight: float, ends: MoveEnds, *, is_rounded: bool
    ) -> FloatArray:
        index, leaf = source
        shape, combinable_bytes = self.flow.nodes[index].shapes[leaf], self.combinable_bytes.get(source, 0)
        shape = rounded_shape(shape) if is_rounded else shape
        waited = weight * self.exposed_fraction if source in self.overlappable else weight
        matrix = self.prices.reshard_matrix(shape, origins, targets, waited, combinable_bytes)
        if self.variables.kernels.is_fused[index]:
            matrix = self.prices.with_launch(matrix, waited)
        matrix = self.prices.with_transposes(matrix, shape, origins, targets, weight, ends)
        if index not in self.in_place:
            return matrix
        is_gathered = self.prices.is_gathered(origins, targets, self.kept_axes) if self.kept_axes else matrix > 0
        return np.where(is_gathered, np.inf, matrix)
