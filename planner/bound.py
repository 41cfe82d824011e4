"""What no plan costs less than, repeats of a run deciding each for itself.

The search rolls a run up: all repeats decide alike. This bound is for the program as it is. Every repeat is
the same function of its own decisions and of the hubs that it shares with its neighbours. Message passing moves its
costs onto those hubs (as `dual` does, the hub that one repeat makes and the next one reads being one and the same),
until

    seconds of a repeat ≥ b + Σ messages(hub states)

holds with b as large as it gets. The same b and messages hold for each of n repeats. So the run costs at least n × b,
and for every hub inside it the least that the messages of those who share it add up to. What they say about hubs
that the rest of the program shares is added to that rest, which is solved as it stands.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from shardwright.planner.chain import Chain, Key, aligned
from shardwright.planner.clock import Clock
from shardwright.planner.dual import tighten
from shardwright.planner.graph import Variable
from shardwright.planner.pbqp import LEAST, FloatArray, IntArray, Problem, reduce
from shardwright.planner.segments import Run
from shardwright.planner.solve import solve

#: Sweeps over the edges of a repeat, at most; and the relative gain of `_PATIENCE` sweeps below which they end.
_SWEEPS = 400
_PATIENCE = 10
_LEAST_GAIN = 3e-5

#: The same where every strategy on three axes is in the problem, and a sweep is dear: sweeps, and their relative gain.
_ROUGH = 4, 1e-3

#: Relative gap at which the segments outside the runs count as bounded.
_CLOSE = 5e-4
_CLOSE_ENOUGH = 1e-3


def lower_bound(chain: Chain, time_limit_s: float) -> float:
    """Seconds a step that no assignment of the chain's variables is under; the less, the later it is."""
    states = chain.states()
    total = chain.constant
    shared: dict[Variable, FloatArray] = {}
    for run in chain.runs:
        repeat = _Repeat(chain, run, states)
        repeat.tighten(chain.graph.clock)
        total += run.repeats * repeat.constant()
        for variable, messages in repeat.on_hubs():
            if _is_inside(chain, run, variable):
                total += float(messages.min())
            else:
                known = shared.get(variable)
                shared[variable] = messages if known is None else known + messages
    return total + _rest(chain, states, shared, time_limit_s)


def _is_inside(chain: Chain, run: Run, variable: Variable) -> bool:
    """Whether only segments of the run share a hub."""
    touching = {chain.owner(variable)[0], *chain.graph.layout.crossing.get(variable, ())}
    return all(run.first <= segment < run.stop for segment in touching)


def _rest(chain: Chain, states: dict[Key, IntArray], shared: dict[Variable, FloatArray], time_limit_s: float) -> float:
    """The least that all segments outside the runs cost together, with what the runs say about hubs they share."""
    inside = {segment for run in chain.runs for segment in range(run.first, run.stop)}
    variables: dict[Variable, int] = {}
    problem = Problem()

    def variable(found: Variable, key: Key) -> int:
        if found not in variables:
            variables[found] = len(problem.costs)
            problem.costs.append(np.zeros(len(states[key])))
        return variables[found]

    for found, messages in shared.items():
        problem.costs[variable(found, chain.key_of(found))] += messages
    for segment, instance in enumerate(chain.instances):
        if segment in inside:
            continue
        kind, keys = chain.core(segment)
        names = [instance.variables[v] for v in kind.reduction.variables]
        numbers = [variable(name, key) for name, key in zip(names, keys, strict=True)]
        costs, edges = aligned(kind, keys, states)
        for number, cost in zip(numbers, costs, strict=True):
            problem.costs[number] = problem.costs[number] + cost
        for (v, w), matrix in edges.items():
            problem.add_edge(numbers[v], numbers[w], matrix)
    if not problem.costs:
        return 0.0
    if chain.is_for_bound:
        reduction = reduce(problem, drops_dear=False)
        return reduction.constant + tighten(reduction.core, _CLOSE_ENOUGH, chain.graph.clock).lower_bound
    return solve(problem, time_limit_s=time_limit_s, close=_CLOSE, clock=chain.graph.clock).lower_bound


#: A core variable of a repeat: offset of its segment in the period, position in the reduction.
_Role = tuple[int, int]


@dataclass(slots=True, eq=False)
class _Repeat:
    """One repeat of a run: core variables (roles), which of them are one variable in the program (slots), edges.

    messages: per role, what it asks of its variable. unary: per slot, the sum over its roles.
    hubs: slots of variables that other repeats or segments share, in order.
    """

    chain: Chain
    run: Run
    states: dict[Key, IntArray]
    slot_of: dict[_Role, Key] = field(default_factory=dict)
    messages: dict[_Role, FloatArray] = field(default_factory=dict)
    unary: dict[Key, FloatArray] = field(default_factory=dict)
    edges: list[tuple[_Role, _Role, FloatArray]] = field(default_factory=list)
    hubs: dict[Key, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for offset in range(self.run.period):
            segment = self.run.first + self.run.period + offset  # of the second repeat: it has neighbours on both sides
            kind, keys = self.chain.core(segment)
            costs, edges = aligned(kind, keys, self.states)
            for i, (v, key, cost) in enumerate(zip(kind.reduction.variables, keys, costs, strict=True)):
                self.slot_of[offset, i] = key
                self.messages[offset, i] = cost
                self.unary[key] = self.unary.get(key, 0.0) + cost
                if v in kind.boundary:
                    self.hubs[key] = None
            for (v, w), matrix in sorted(edges.items()):
                self.edges.append(((offset, v), (offset, w), matrix))

    def tighten(self, clock: Clock) -> None:
        """Raise the bound by handshakes between edges and the slots at their ends, until it is late."""
        patience, least_gain = _ROUGH if self.chain.is_for_bound else (_PATIENCE, _LEAST_GAIN)
        history: list[float] = []
        for sweep in range(_SWEEPS):
            for v, w, matrix in self.edges if sweep % 2 == 0 else reversed(self.edges):
                self._handshake(v, w, matrix)
            history.append(self.constant() + sum(float(self.unary[key].min()) for key in self.hubs))
            if sweep >= patience and history[-1] - history[-1 - patience] <= least_gain * abs(history[-1]):
                break
            if clock.is_late:
                break

    def _handshake(self, v: _Role, w: _Role, matrix: FloatArray) -> None:
        left_slot, right_slot = self.slot_of[v], self.slot_of[w]
        if left_slot == right_slot:
            taken_left = taken_right = 0.5 * self.unary[left_slot]
        else:
            taken_left, taken_right = self.unary[left_slot], self.unary[right_slot]
        matrix += taken_left[:, None] + taken_right
        left = 0.5 * LEAST(matrix, 1)
        matrix -= left[:, None]
        right = LEAST(matrix, 0)
        matrix -= right
        rest = LEAST(matrix, 1)
        matrix -= rest[:, None]
        self.messages[v] = self.messages[v] - taken_left + left + rest
        self.messages[w] = self.messages[w] - taken_right + right
        if left_slot == right_slot:
            self.unary[left_slot] = left + rest + right
        else:
            self.unary[left_slot], self.unary[right_slot] = left + rest, right

    def constant(self) -> float:
        """What one repeat costs at least, besides what its messages say about hubs."""
        inner = sum(float(unary.min()) for key, unary in self.unary.items() if key not in self.hubs)
        return inner + sum(float(matrix.min()) for *_, matrix in self.edges)

    def on_hubs(self) -> Iterator[tuple[Variable, FloatArray]]:
        """Every hub that segments of the run share, with the sum of their messages about it."""
        totals: dict[Variable, FloatArray] = {}
        for segment in range(self.run.first, self.run.stop):
            offset = (segment - self.run.first) % self.run.period
            instance = self.chain.instances[segment]
            for i, v in enumerate(self.chain.kind(segment).reduction.variables):
                if self.slot_of[offset, i] in self.hubs:
                    variable = instance.variables[v]
                    known = totals.get(variable)
                    added = self.messages[offset, i]
                    totals[variable] = added if known is None else known + added
        yield from totals.items()
