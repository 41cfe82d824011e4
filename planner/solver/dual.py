"""The dual of the linear relaxation: a certified lower bound, and elimination of suboptimal states.

Message passing (`message_passing`) raises a lower bound. A state that raises it above the incumbent's value is in no
better assignment and is dropped. Early drops shrink the rest and make rounds cheaper. On training steps the relaxation
is mostly tight; next to nothing is left to the integer program. Warm-started from the final messages of a similar
problem (`warm_start`), it takes few rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.planner.clock import Clock
from shardwright.planner.solver.local_search import find_incumbent, improve
from shardwright.planner.solver.message_passing import MessagePassing
from shardwright.planner.solver.pbqp import FloatArray, IntArray, Problem
from shardwright.planner.solver.tuning import (
    DECODE_EVERY,
    MAX_MESSAGE,
    MAX_MESSAGE_ROUNDS,
    MESSAGE_PATIENCE,
    MIN_MESSAGE_GAIN,
    TIGHT,
    WORTH_DROPPING,
)
from shardwright.planner.solver.warm_start import WarmStart


@dataclass(frozen=True, slots=True, kw_only=True)
class DualBound:
    """Result of message passing.

    states / value: the incumbent and its value.
    lower_bound: of every assignment's value.
    min_marginals: per variable, the rise of the bound by each state; infinite at states in no assignment better than
        the incumbent.
    warm_start: final messages, reusable by another search; None unless this one was warm-started.
    """

    states: IntArray
    value: float
    lower_bound: float
    min_marginals: tuple[FloatArray, ...]
    warm_start: WarmStart[int] | None

    def surviving_states(self, value: float) -> tuple[IntArray, ...]:
        """Per variable, the states that may be in an assignment of value below `value`."""
        return tuple(_surviving_states(self.min_marginals, value, self.lower_bound))


def tighten(
    problem: Problem,
    close: float = TIGHT,
    clock: Clock | None = None,
    start: WarmStart[int] | None = None,
    enough: float = -np.inf,
) -> DualBound:
    """Bound `problem` and drop states. Every row and column of an edge must have a finite entry.

    close: relative gap at which to stop.
    clock: once it has expired, no further round starts.
    start: warm start; edges unknown to the problem are skipped.
    enough: a value; with an assignment at most this expensive, no round starts.
    """
    work = _Work(problem)
    if start is not None:
        work.take_warm_start(start)
    history = [work.passing.bound()]
    for number in range(MAX_MESSAGE_ROUNDS if work.value > enough else 0):
        bound = work.passing.round()
        history.append(bound)
        if number == 0 or number % DECODE_EVERY == DECODE_EVERY - 1:
            work.decode_and_drop(bound)
        gain = bound - history[-1 - MESSAGE_PATIENCE] if number >= MESSAGE_PATIENCE else np.inf
        if work.value - bound <= close * abs(work.value) or gain <= MIN_MESSAGE_GAIN * abs(bound):
            break
        if clock is not None and clock.is_expired:
            break
    return work.to_bound(history[-1], has_end=start is not None)


class _Work:
    """A problem restricted to its remaining states, with the incumbent.

    left: per variable, the original numbers of its states.
    states / value: the incumbent, in remaining states.
    moved: per edge, the last noted messages over all states of its ends; at dropped states, those before the drop.
    """

    def __init__(self, problem: Problem) -> None:
        self.sizes = [len(cost) for cost in problem.costs]
        self.left = [np.arange(size) for size in self.sizes]
        self.problem = problem
        self.passing = MessagePassing(problem.costs, [(*edge, problem.edges[edge]) for edge in sorted(problem.edges)])
        self.states = find_incumbent(problem)
        self.value = problem.value(self.states)
        self.moved: dict[tuple[int, int], tuple[FloatArray, FloatArray]] = {}

    def take_warm_start(self, start: WarmStart[int]) -> None:
        """Adopt the warm start's assignment if it is better, then apply its messages."""
        incumbent = find_incumbent(self.problem, start.states)
        if self.problem.value(incumbent) < self.value:
            self.states, self.value = incumbent, self.problem.value(incumbent)
        self.passing.move(start.moved, MAX_MESSAGE * abs(self.value))

    def decode_and_drop(self, bound: float) -> None:
        """Decode an assignment, and drop states in none better than the incumbent."""
        states = improve(self.problem, self.passing.decode())
        value = self.problem.value(states)
        if value < self.value:
            self.states, self.value = states, value
        surviving = _surviving_states(self.passing.min_marginals(), self.value, bound)
        if sum(map(len, surviving)) <= WORTH_DROPPING * sum(map(len, self.left)) and self._has_only_finite(surviving):
            self._restrict(surviving)

    def _has_only_finite(self, survivors: Sequence[IntArray]) -> bool:
        """Whether every surviving state is compatible with some of each neighbour's."""
        # Message passing needs a finite entry in every row and column.
        edges = (matrix[np.ix_(survivors[v], survivors[w])] for v, w, matrix in self.passing.edges)
        return all(np.isfinite(edge.min(axis=0)).all() and np.isfinite(edge.min(axis=1)).all() for edge in edges)

    def _restrict(self, survivors: Sequence[IntArray]) -> None:
        self._note_messages()
        self.left = [numbers[states] for numbers, states in zip(self.left, survivors, strict=True)]
        self.problem, self.passing = self.problem.restrict(survivors), self.passing.restrict(survivors)
        self.states = np.array([np.searchsorted(k, s) for k, s in zip(survivors, self.states, strict=True)], np.int64)

    def to_bound(self, bound: float, *, has_end: bool) -> DualBound:
        raised = [np.full(size, np.inf) for size in self.sizes]
        for whole, numbers, marginals in zip(raised, self.left, self.passing.min_marginals(), strict=True):
            whole[numbers] = marginals
        states = np.array([numbers[state] for numbers, state in zip(self.left, self.states, strict=True)], np.int64)
        return DualBound(
            states=states,
            value=self.value,
            lower_bound=min(bound, self.value),
            min_marginals=tuple(raised),
            warm_start=self._save_messages() if has_end else None,
        )

    def _note_messages(self) -> None:
        for (v, w, _), messages in zip(self.passing.edges, self.passing.messages, strict=True):
            of_v, of_w = self.moved.setdefault((v, w), (np.zeros(self.sizes[v]), np.zeros(self.sizes[w])))
            # Messages are what moved to the variables; noted is what moved away from them.
            of_v[self.left[v]], of_w[self.left[w]] = -messages[0], -messages[1]

    def _save_messages(self) -> WarmStart[int]:
        self._note_messages()
        return WarmStart(moved=self.moved)


def _surviving_states(raised: Sequence[FloatArray], value: float, bound: float) -> list[IntArray]:
    """Per variable, the states raising the bound to at most `value`."""
    slack = value - bound + TIGHT * abs(value)  # rounding must not drop a state of the best assignment
    return [np.flatnonzero(marginals <= slack) for marginals in raised]
