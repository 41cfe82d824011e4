"""The chain of segments: the costs of each kind of segment between its boundaries, and the whole program of them.

A segment's *boundary* is the shared layouts in common with other segments. All its other variables are eliminated
exactly, once per kind (`pbqp.reduce` with the boundary protected); the rest is its core.

A run (a stack of equal layers) is tied: all its repeats take the same decisions. The whole program then costs as much
to solve as one repeat and the segments around it. `bound` shows the small loss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from shardwright.planner.memory.constraint import Multipliers
from shardwright.planner.memory.loop_gathers import argument_of_use
from shardwright.planner.memory.terms import (
    layout_copy_bytes,
    loop_gather_bytes,
    operand_bytes,
    partial_sum_bytes,
    reader_copy_bytes,
    reshard_bytes,
    transpose_bytes,
    value_bytes,
)
from shardwright.planner.segments.cost_graph import CostGraph
from shardwright.planner.segments.dominator_cut import Run, SegmentInstance
from shardwright.planner.segments.variables import Variable
from shardwright.planner.solver.pbqp import EdgeJoinCache, FloatArray, IntArray, Problem, Reduction, reduce, submatrix
from shardwright.planner.solver.solve import contradiction_error, solve
from shardwright.planner.solver.warm_start import VariableImage, WarmStart, positions_in, translate
from shardwright.planner.strategies.expansion import Strategy

#: A variable in the tied program: (first segment of the run, offset in the period, variable), one for all repeats;
#: outside runs (segment, 0, variable).
Key = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SegmentKind:
    """One kind of segment on one mesh.

    boundary: positions in `SegmentInstance.variables` shared with other segments.
    """

    boundary: tuple[int, ...]
    reduction: Reduction


@dataclass(slots=True, kw_only=True, eq=False)
class Chain:
    """All segments of a program on one mesh; `kinds` are solved on first use.

    multipliers: on memory.
    is_for_bound: whether only a bound is wanted (`bound`), with repeats untied.
    warm_start: the messages that `solve` starts from, by all states of each key's variable, and then its last ones;
        None when no other search will use them.
    target_s: an assignment this cheap is accepted at once, when runs have bounds of their own.
    """

    graph: CostGraph
    instances: Sequence[SegmentInstance]
    runs: Sequence[Run]
    multipliers: Multipliers | None = None
    is_for_bound: bool = False
    warm_start: WarmStart[Key] | None = None
    target_s: float = -np.inf
    _kinds: dict[Hashable, SegmentKind] = field(default_factory=dict)
    _problems: dict[int, Problem] = field(default_factory=dict)
    _joins: EdgeJoinCache = field(default_factory=EdgeJoinCache)
    _owner: dict[Variable, tuple[int, int]] = field(default_factory=dict)
    _run_of: dict[int, Run] = field(default_factory=dict)
    _cores: list[tuple[SegmentKind, tuple[Key, ...]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for segment, instance in enumerate(self.instances):
            for i, variable in enumerate(instance.variables[: instance.own_count]):
                self._owner[variable] = (segment, i)
        for run in self.runs:
            self._run_of.update(dict.fromkeys(range(run.first, run.stop), run))

    def kind(self, segment: int) -> SegmentKind:
        """The solved kind of a segment."""
        instance = self.instances[segment]
        key: Hashable = instance.kind
        if self.multipliers is not None:  # a value's lifetime differs between segments
            run = self._run_of.get(segment)
            key = (instance.kind, segment if run is None else (run.first, (segment - run.first) % run.period))
        kind = self._kinds.get(key)
        if kind is None:
            crossing = self.graph.variables.cross_segment
            self.graph.clock.check()
            boundary = tuple(i for i, v in enumerate(instance.variables) if i >= instance.own_count or v in crossing)
            problem = self.problem(segment)
            kind = self._kinds[key] = SegmentKind(
                boundary=boundary,
                reduction=reduce(problem, boundary, drops_dear=not self.is_for_bound, joins=self._joins),
            )
        return kind

    def problem(self, segment: int) -> Problem:
        """The problem of a segment. With multipliers on memory, repeats have their mean price; for a bound, the
        minimum: a constraint on buffers live at the peak in all repeats excludes no more plans."""
        instance = self.instances[segment]
        problem = self._problems.get(instance.kind)
        if problem is None:
            problem = self._problems[instance.kind] = self.graph.problem(instance.nodes, instance.variables)
        if self.multipliers is None:
            return problem
        priced = Problem(costs=list(problem.costs), edges=dict(problem.edges))
        run = self._run_of.get(segment)
        alike = (
            [segment] if run is None else range(run.first + (segment - run.first) % run.period, run.stop, run.period)
        )
        position = {variable: i for i, variable in enumerate(instance.variables)}
        for i, (node, leaf) in enumerate(instance.variables[: instance.own_count]):
            same = [self.instances[segment_alike].variables[i][0] for segment_alike in alike]
            if leaf < 0:
                self._add_result_terms(priced, position, node, same)
                for number in range(len(self.graph.flow.nodes[node].uses)):
                    self._add_use_terms(priced, position, node, number, same)
            elif seconds := self._repeat_multiplier(
                self.multipliers.of_layout_copies, [(other, leaf) for other in same]
            ):
                priced.add_edge(position[node, -1], i, seconds * layout_copy_bytes(self.graph, (node, leaf)))
        return priced

    def _add_result_terms(
        self, priced: Problem, position: Mapping[Variable, int], node: int, same: Sequence[int]
    ) -> None:
        """Add the priced bytes of a node's results to its costs. same: the corresponding nodes in the run's repeats."""
        assert self.multipliers is not None
        mine = position[node, -1]
        for leaf in range(len(self.graph.flow.nodes[node].shapes)):
            value, alike = (node, leaf), [(other, leaf) for other in same]
            if seconds := self._repeat_multiplier(self.multipliers.of_results, alike):
                priced.costs[mine] = priced.costs[mine] + seconds * value_bytes(self.graph, value)
            if seconds := self._repeat_multiplier(self.multipliers.of_reduced_results, alike):
                priced.costs[mine] = priced.costs[mine] + seconds * value_bytes(self.graph, value, reduced=True)
                partial_sums = partial_sum_bytes(self.graph, value)
                if partial_sums is not None:
                    priced.add_edge(mine, position[partial_sums[0]], seconds * partial_sums[1])
        for bound in self.multipliers.branching_bounds_of(same):
            size = value_bytes(self.graph, (node, bound.leaf[1]))
            priced.costs[mine] = np.where(
                (bound.lower_bytes < size) & (size <= bound.upper_bytes), priced.costs[mine], np.inf
            )

    def _add_use_terms(
        self, priced: Problem, position: Mapping[Variable, int], index: int, number: int, same: Sequence[int]
    ) -> None:
        """Add the priced bytes of a node's operand: recomputed, copied, transposed, resharded, or gathered for the loop
        around it."""
        assert self.multipliers is not None
        node, mine, graph = self.graph.flow.nodes[index], position[index, -1], self.graph
        use, operand = node.uses[number], (index, node.uses[number].position)
        if seconds := self._mean_or_min([self._use_multiplier(self.multipliers, other, number) for other in same]):
            priced.costs[mine] = priced.costs[mine] + seconds * operand_bytes(graph, index, use)
        operands = [(other, use.position) for other in same]
        if seconds := self._repeat_multiplier(self.multipliers.of_transposed, operands):
            priced.costs[mine] = priced.costs[mine] + seconds * transpose_bytes(graph, operand)
        if seconds := self._repeat_multiplier(self.multipliers.of_resharded, operands):
            priced.add_edge(position[graph.variables.source(node, use)], mine, seconds * reshard_bytes(graph, operand))
        if seconds := self._repeat_multiplier(self.multipliers.of_loop_gathers, [(other, number) for other in same]):
            argument = argument_of_use(graph.flow, (index, number))
            priced.add_edge(position[argument, -1], mine, seconds * loop_gather_bytes(graph, (index, number)))
        if graph.is_cheap_to_recompute[use.source[0]] or not self.multipliers.of_reader_copies:
            return
        sources = [graph.flow.nodes[other].uses[number].source for other in same]
        if seconds := self._repeat_multiplier(self.multipliers.of_reader_copies, sources):
            priced.add_edge(
                position[graph.variables.source(node, use)], mine, seconds * reader_copy_bytes(graph, node, use)
            )

    def _repeat_multiplier(self, price: Mapping[tuple[int, int], float], alike: Sequence[tuple[int, int]]) -> float:
        """Seconds per byte of corresponding items in all repeats of a run."""
        return self._mean_or_min([price.get(item, 0.0) for item in alike]) if price else 0.0

    def _mean_or_min(self, prices: Sequence[float]) -> float:
        return min(prices) if self.is_for_bound else sum(prices) / len(prices)

    def _use_multiplier(self, price: Multipliers, index: int, number: int) -> float:
        """Seconds per byte of an operand, when the node decides its bytes."""
        node = self.graph.flow.nodes[index]
        use = node.uses[number]
        return price.value_multiplier(use.source) if self.graph.variables.pays_for(node, use) else 0.0

    def with_multipliers(self, price: Multipliers | None) -> Chain:
        """The same chain with other multipliers on memory; itself with its own."""
        if price is self.multipliers:
            return self
        chain = Chain(
            graph=self.graph,
            instances=self.instances,
            runs=self.runs,
            multipliers=price,
            is_for_bound=self.is_for_bound,
        )
        chain._problems = self._problems  # without prices of memory, so they serve here, too
        return chain

    def forget_reductions(self) -> None:
        """Drop all reductions; they are redone on demand. All strategies on three axes take hundreds of megabytes."""
        self._kinds, self._cores, self._joins = {}, [], EdgeJoinCache()

    def untie(self) -> Chain:
        """The same chain without runs: repeats decide separately, and each pays its own memory."""
        chain = Chain(
            graph=self.graph,
            instances=self.instances,
            runs=(),
            multipliers=self.multipliers,
            is_for_bound=self.is_for_bound,
        )
        chain._problems, chain._joins = self._problems, self._joins
        if self.multipliers is None:  # with them a kind holds the mean price over a run
            chain._kinds = self._kinds
        return chain

    def key(self, segment: int, position: int) -> Key:
        """The key of a segment's variable in the tied program."""
        instance = self.instances[segment]
        if position >= instance.own_count:
            segment, position = self._owner[instance.variables[position]]
        run = self._run_of.get(segment)
        if run is None:
            return segment, 0, position
        return run.first, (segment - run.first) % run.period, position

    def build_tied_problem(self) -> tuple[Problem, dict[Key, int], dict[Key, IntArray]]:
        """The whole program with tied runs: problem, variable per key, and the states left to each key.

        The constants of the kinds' reductions are left out of its value: see `constant`.
        """
        states = self.states()
        variables = {key: i for i, key in enumerate(states)}
        problem = Problem(costs=[np.zeros(len(state_numbers)) for state_numbers in states.values()])
        core_counts = Counter(self.cores())  # tied repeats are equal cores over the same keys
        for (kind, keys), times in core_counts.items():
            costs, edges = align_core(kind, keys, states)
            for key, cost in zip(keys, costs, strict=True):
                problem.costs[variables[key]] = problem.costs[variables[key]] + times * cost
            for (v, w), matrix in edges.items():
                problem.add_edge(variables[keys[v]], variables[keys[w]], matrix if times == 1 else times * matrix)
        return problem, variables, states

    def cores(self) -> list[tuple[SegmentKind, tuple[Key, ...]]]:
        """Every segment's `core`."""
        if not self._cores:
            self._cores = [self.core(segment) for segment in range(len(self.instances))]
        return self._cores

    def core(self, segment: int) -> tuple[SegmentKind, tuple[Key, ...]]:
        """A segment's kind, and the keys of its core's variables in the tied program."""
        kind = self.kind(segment)
        return kind, tuple(self.key(segment, v) for v in kind.reduction.variables)

    @property
    def kind_count(self) -> int:
        return len({instance.kind for instance in self.instances})

    def solve(
        self, time_limit_s: float, close: float = 0.0, plan: Mapping[Variable, Strategy] | None = None
    ) -> ChainSolution:
        """The best states of all variables with tied runs, within a relative gap of `close`.

        plan: the solution is no worse than it.

        Raises PlanError when no plan satisfies the pins.
        """
        try:
            problem, variables, states = self.build_tied_problem()
        except ValueError as error:
            raise contradiction_error(error) from None
        solution = solve(
            problem,
            time_limit_s=time_limit_s,
            close=close,
            clock=self.graph.clock,
            start=self.translate_warm_start(variables, states, plan),
            enough=self.target_s - self.constant if self.runs else -np.inf,
        )
        self.save_messages(solution.warm_start, variables, states)
        chosen = {key: int(states[key][solution.states[i]]) for key, i in variables.items()}
        return ChainSolution(
            states=self.expand_tied(chosen),
            value=solution.value + self.constant,
            tied_bound=solution.lower_bound + self.constant,
        )

    def translate_warm_start(
        self,
        variables: Mapping[Key, int],
        states: Mapping[Key, IntArray],
        plan: Mapping[Variable, Strategy] | None = None,
    ) -> WarmStart[int] | None:
        """The warm start by variables of the tied program and the states left to them; with the remaining states of a
        known plan."""
        start: WarmStart[int] | None = None
        if self.warm_start is not None:
            start = translate(self.warm_start, {key: [VariableImage(i, states[key])] for key, i in variables.items()})
        if plan is None:
            return start
        at = {i: np.flatnonzero(states[key] == self._state(key, plan)) for key, i in variables.items()}
        return replace(start or WarmStart(), states={i: int(place[0]) for i, place in at.items() if len(place)})

    def save_messages(
        self, end: WarmStart[int] | None, variables: Mapping[Key, int], states: Mapping[Key, IntArray]
    ) -> None:
        """Save the last messages over the tied program, if another search is to start from them."""
        if end is not None:
            places = {
                i: [VariableImage(key, positions_in(states[key], self.state_count(key)))]
                for key, i in variables.items()
            }
            self.warm_start = translate(end, places)

    def _state(self, key: Key, plan: Mapping[Variable, Strategy]) -> int:
        """The state of a key's variable in a plan; -1 without one."""
        variable = self.variable(key)
        choices, strategy = self.graph.set_of(variable).strategies, plan[variable]
        return choices.index(strategy) if strategy in choices else -1

    def variable(self, key: Key) -> Variable:
        """The variable of a key; that of the first repeat."""
        segment, offset, position = key
        return self.instances[segment + offset].variables[position]

    def state_count(self, key: Key) -> int:
        """The number of states of a key's variable, dropped ones included."""
        return len(self.graph.set_of(self.variable(key)))

    def repeats(self, key: Key) -> int:
        """The number of variables of a key."""
        run = self._run_of.get(key[0])
        return 1 if run is None else run.repeats

    def strategies(self, states: Mapping[Variable, int]) -> dict[Variable, Strategy]:
        """The strategies of variables' states."""
        return {variable: self.graph.set_of(variable).strategies[state] for variable, state in states.items()}

    def states_of(self, strategies: Mapping[Variable, Strategy]) -> dict[Variable, int] | None:
        """The states of all variables' strategies; None when one is missing."""
        states: dict[Variable, int] = {}
        for variable, strategy in strategies.items():
            choices = self.graph.set_of(variable).strategies
            if strategy not in choices:
                return None
            states[variable] = choices.index(strategy)
        return states

    def owner(self, variable: Variable) -> tuple[int, int]:
        """The segment of a variable, and its position there."""
        return self._owner[variable]

    def key_of(self, variable: Variable) -> Key:
        """The key of a variable in the tied program."""
        return self.key(*self._owner[variable])

    @property
    def constant(self) -> float:
        """Seconds decided inside the segments, at any boundary."""
        return sum(self.kind(segment).reduction.constant for segment in range(len(self.instances)))

    def states(self) -> dict[Key, IntArray]:
        """Per key, the states left by all its segments."""
        states: dict[Key, IntArray] = {}
        for kind, keys in dict.fromkeys(self.cores()):
            for key, kind_states in zip(keys, kind.reduction.states, strict=True):
                states[key] = np.intersect1d(states[key], kind_states) if key in states else kind_states
        return states

    def expand_tied(self, tied_states: dict[Key, int]) -> dict[Variable, int]:
        """The state of every variable of the program, from the chosen ones per key."""
        expanded: dict[Variable, int] = {}
        completed: dict[tuple[SegmentKind, tuple[Key, ...]], list[int]] = {}
        for core, instance in zip(self.cores(), self.instances, strict=True):
            states = completed.get(core)
            if states is None:
                reduction = core[0].reduction
                positions = [
                    np.searchsorted(kind_states, tied_states[key])
                    for kind_states, key in zip(reduction.states, core[1], strict=True)
                ]
                states = completed[core] = reduction.complete(np.array(positions, np.int64)).tolist()
            expanded.update(zip(instance.variables[: instance.own_count], states, strict=False))
        return expanded


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainSolution:
    """states: of every variable.
    value: their cost, seconds.
    tied_bound: lower bound on plans with tied repeats.
    """

    states: dict[Variable, int]
    value: float
    tied_bound: float


def align_core(
    kind: SegmentKind, keys: Sequence[Key], states: Mapping[Key, IntArray]
) -> tuple[list[FloatArray], dict[tuple[int, int], FloatArray]]:
    """Costs and edges of a kind's core, restricted to the states left to its variables' keys.

    An unrestricted matrix is the kind's own object, possibly shared by many edges.
    """
    reduction = kind.reduction
    picks = [np.searchsorted(kind_states, states[key]) for kind_states, key in zip(reduction.states, keys, strict=True)]
    costs = [cost[pick] for cost, pick in zip(reduction.core.costs, picks, strict=True)]
    return costs, {(v, w): submatrix(m, picks[v], picks[w]) for (v, w), m in reduction.core.edges.items()}
