"""Lower bound on all plans, with repeats of a run untied.

The search ties a run: all repeats decide alike. This bound is for the untied program. Every repeat is the same function
of its own decisions and of the shared layouts on its borders. Message passing moves its costs onto those layouts (see
`dual`; a layout made by one repeat and read by the next is one variable), until

    seconds of a repeat ≥ b + Σ messages(layout states)

holds with the largest b. The same b and messages hold for each of n repeats. So the run costs at least n × b, plus the
minimum of the summed messages for every shared layout inside it. Messages about layouts in common with the rest of the
program are added to that rest, which is solved directly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from shardwright.planner.clock import Clock
from shardwright.planner.segments.dominator_cut import Run
from shardwright.planner.segments.segment_chain import Chain, ChainSolution, Key, align_core
from shardwright.planner.segments.tuning import FINE_STOP, MAX_BOUND_ROUNDS, REST_GAP, ROUGH_STOP, TIED_GAP
from shardwright.planner.segments.variables import Variable
from shardwright.planner.solver.dual import tighten
from shardwright.planner.solver.message_passing import Edge, MessagePassing
from shardwright.planner.solver.pbqp import FloatArray, IntArray, Problem, reduce
from shardwright.planner.solver.solve import solve, to_core, to_problem


def lower_bound(chain: Chain, time_limit_s: float) -> float:
    """Lower bound on all assignments of the chain's variables, seconds a step; looser when time is short."""
    states = chain.states()
    total = chain.constant
    shared: dict[Variable, FloatArray] = {}
    for run in chain.runs:
        repeat = _Repeat(chain, run, states)
        repeat.tighten(chain.graph.clock)
        total += run.repeats * repeat.constant()
        for variable, messages in repeat.messages_on_layouts():
            if _is_inside(chain, run, variable):
                total += float(messages.min())  # no other segment has a say about this layout
            else:
                previous = shared.get(variable)
                shared[variable] = messages if previous is None else previous + messages
    return total + _bound_rest(chain, states, shared, total, time_limit_s)


def solve_tied(chain: Chain, close: float = TIED_GAP) -> ChainSolution:
    """The best states decoded by message passing on a chain with tied repeats, and its final bound: closer to the
    relaxation's optimum than `lower_bound`, and a bound on all plans when the chain has no runs.

    close: relative gap that ends it.
    """
    problem, variables, states = chain.build_tied_problem()
    reduction = reduce(problem, drops_dear=False)
    begin = to_core(chain.translate_warm_start(variables, states), reduction)
    bounded = tighten(reduction.core, close, chain.graph.clock, begin)
    if bounded.warm_start is not None:
        chain.save_messages(to_problem(bounded.warm_start, reduction, problem), variables, states)
    assignment, decided_s = reduction.complete(bounded.states), chain.constant + reduction.constant
    return ChainSolution(
        states=chain.expand_tied({key: int(states[key][assignment[i]]) for key, i in variables.items()}),
        value=decided_s + bounded.value,
        tied_bound=decided_s + bounded.lower_bound,
    )


def _is_inside(chain: Chain, run: Run, variable: Variable) -> bool:
    """Whether only segments of the run share a layout."""
    touching = {chain.owner(variable)[0], *chain.graph.variables.cross_segment.get(variable, ())}
    return all(run.first <= segment < run.stop for segment in touching)


def _bound_rest(
    chain: Chain, states: dict[Key, IntArray], shared: dict[Variable, FloatArray], beside_s: float, time_limit_s: float
) -> float:
    """Lower bound on all segments outside the runs together, with the runs' messages about common layouts.

    beside_s: lower bound on the runs.
    """
    inside = {segment for run in chain.runs for segment in range(run.first, run.stop)}
    variables: dict[Variable, int] = {}
    problem = Problem()

    def variable(program_variable: Variable, key: Key) -> int:
        if program_variable not in variables:
            variables[program_variable] = len(problem.costs)
            problem.costs.append(np.zeros(len(states[key])))
        return variables[program_variable]

    for layout, messages in shared.items():
        problem.costs[variable(layout, chain.key_of(layout))] += messages
    for segment, instance in enumerate(chain.instances):
        if segment in inside:
            continue
        kind, keys = chain.core(segment)
        names = [instance.variables[v] for v in kind.reduction.variables]
        numbers = [variable(name, key) for name, key in zip(names, keys, strict=True)]
        costs, edges = align_core(kind, keys, states)
        for number, cost in zip(numbers, costs, strict=True):
            problem.costs[number] = problem.costs[number] + cost
        for (v, w), matrix in edges.items():
            problem.add_edge(numbers[v], numbers[w], matrix)
    if not problem.costs:
        return 0.0
    if chain.is_for_bound:
        reduction = reduce(problem, drops_dear=False)
        core = reduction.core
        passing = MessagePassing(core.costs, [(*edge, core.edges[edge]) for edge in sorted(core.edges)])
        return reduction.constant + _raise_bound(passing, *ROUGH_STOP, chain.graph.clock, beside_s + reduction.constant)
    return solve(problem, time_limit_s=time_limit_s, close=REST_GAP, clock=chain.graph.clock).lower_bound


def _raise_bound(
    passing: MessagePassing, patience: int, least_gain: float, clock: Clock, beside_s: float = 0.0
) -> float:
    """The bound after rounds of messages, until `patience` of them gain little relative to the total bound, or time is
    up."""
    history: list[float] = []
    for number in range(MAX_BOUND_ROUNDS):
        history.append(passing.round())
        if number >= patience and history[-1] - history[-1 - patience] <= least_gain * abs(beside_s + history[-1]):
            break
        if clock.is_expired:
            break
    return history[-1]


#: A core variable of a repeat: offset of its segment in the period, position in the reduction.
_Role = tuple[int, int]


class _Repeat:
    """One repeat of a run: core variables (roles), the program's variables (slots; several roles may share one), edges.

    messages: role → its costs on its variable; infinite at states that no assignment has.
    passing: over slots, without those states.
    shared_layouts: slots of variables shared with other repeats or segments, in order.
    """

    def __init__(self, chain: Chain, run: Run, states: dict[Key, IntArray]) -> None:
        self.chain, self.run = chain, run
        self.messages: dict[_Role, FloatArray] = {}
        self.shared_layouts: dict[int, None] = {}
        self._slot_of: dict[_Role, int] = {}
        self._edge_ends: list[tuple[_Role, _Role]] = []
        numbers: dict[Key, int] = {}
        unary: list[FloatArray] = []
        matrices = []
        for offset in range(run.period):
            segment = run.first + run.period + offset  # of the second repeat: it has neighbours on both sides
            kind, keys = chain.core(segment)
            costs, edges = align_core(kind, keys, states)
            for i, (v, key, cost) in enumerate(zip(kind.reduction.variables, keys, costs, strict=True)):
                slot = self._slot_of[offset, i] = numbers.setdefault(key, len(numbers))
                self.messages[offset, i] = cost
                if slot == len(unary):
                    unary.append(np.zeros(len(cost)))
                unary[slot] = unary[slot] + cost
                if v in kind.boundary:
                    self.shared_layouts[slot] = None
            for (v, w), matrix in sorted(edges.items()):
                self._edge_ends.append(((offset, v), (offset, w)))
                matrices.append(matrix)
        slots = [(self._slot_of[v], self._slot_of[w]) for v, w in self._edge_ends]
        self._possible = _find_possible(unary, [(v, w, matrix) for (v, w), matrix in zip(slots, matrices, strict=True)])
        self.passing = MessagePassing(
            [cost[states] for cost, states in zip(unary, self._possible, strict=True)],
            [
                (v, w, matrix[np.ix_(self._possible[v], self._possible[w])])
                for (v, w), matrix in zip(slots, matrices, strict=True)
            ],
        )

    def tighten(self, clock: Clock) -> None:
        """Raise the bound by message passing until time is up, and add the edges' messages to each role's."""
        _raise_bound(self.passing, *(ROUGH_STOP if self.chain.is_for_bound else FINE_STOP), clock)
        for ends, messages in zip(self._edge_ends, self.passing.messages, strict=True):
            for role, message in zip(ends, messages, strict=True):
                total = np.full(len(self.messages[role]), np.inf)
                possible = self._possible[self._slot_of[role]]
                total[possible] = self.messages[role][possible] + message
                self.messages[role] = total

    def constant(self) -> float:
        """Lower bound on one repeat, without its messages about shared layouts."""
        return self.passing.bound() - sum(float(self.passing.unary[slot].min()) for slot in self.shared_layouts)

    def messages_on_layouts(self) -> Iterator[tuple[Variable, FloatArray]]:
        """Every layout shared by segments of the run, with the sum of their messages about it."""
        totals: dict[Variable, FloatArray] = {}
        for segment in range(self.run.first, self.run.stop):
            offset = (segment - self.run.first) % self.run.period
            instance = self.chain.instances[segment]
            for i, v in enumerate(self.chain.kind(segment).reduction.variables):
                if self._slot_of[offset, i] in self.shared_layouts:
                    variable = instance.variables[v]
                    previous = totals.get(variable)
                    added = self.messages[offset, i]
                    totals[variable] = added if previous is None else previous + added
        yield from totals.items()


def _find_possible(costs: Sequence[FloatArray], edges: Sequence[Edge]) -> list[IntArray]:
    """Per variable, its states of finite cost that go with such a state of each neighbour's, and so on.

    Message passing needs a finite entry in every row and column. Raises ValueError where a variable has none.
    """
    possible = [np.isfinite(cost) for cost in costs]
    is_finite = [(v, w, np.isfinite(matrix)) for v, w, matrix in edges]
    changes = True
    while changes:
        changes = False
        for v, w, matrix in is_finite:
            for one, other, pairs in ((v, w, matrix), (w, v, matrix.T)):
                compatible = possible[one] & pairs[:, possible[other]].any(axis=1)
                changes |= bool((compatible != possible[one]).any())
                possible[one] = compatible
    if not all(states.any() for states in possible):
        raise ValueError("no assignment is finite")
    return [np.flatnonzero(states) for states in possible]
