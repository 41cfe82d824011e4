"""The dual of the linear relaxation: a certified bound, and states that cannot be optimal.

Message passing (`passing`) raises a lower bound. A state that raises it above a known assignment's value is in no
better assignment: it can go. Those that go early make what is left smaller, and the rounds cheaper. Where
the relaxation is tight, which it mostly is on training steps, this leaves the integer program next to nothing. Begun
where the passing over a problem much like this one ended (`starts`), it takes few rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.planner.clock import Clock
from shardwright.planner.solver.local_search import find_incumbent, improve
from shardwright.planner.solver.message_passing import MessagePassing
from shardwright.planner.solver.pbqp import FloatArray, IntArray, Problem
from shardwright.planner.solver.warm_start import WarmStart

#: Rounds, of a sweep there and back, at most; and the relative gain over the last `_PATIENCE` of them below which they
#: end. After the first and every `_DECODED`-th an assignment is read off.
_ROUNDS = 150
_PATIENCE = 5
_MIN_GAIN = 1e-5
_DECODED = 3

#: Part of the states that must be left at most for the others to be dropped.
_WORTH_DROPPING = 0.8

#: What of a state's costs may be moved to begin with, as a multiple of an assignment's value: beside large numbers the
#: last digits are lost.
MAX_MESSAGE = 1e3

#: Relative gap that counts as none: rounding in the last digits, over thousands of additions.
TIGHT = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class DualBound:
    """What message passing found.

    states / value: the best assignment so far. lower_bound: no assignment is under it.
    raised: per variable, how far each of its states raises the bound; infinite where it is in no assignment that is
    better than the best one. end: what another search may begin with, if this one was given something to begin with.
    """

    states: IntArray
    value: float
    lower_bound: float
    min_marginals: tuple[FloatArray, ...]
    warm_start: WarmStart[int] | None

    def surviving_states(self, value: float) -> tuple[IntArray, ...]:
        """Per variable, the states that may be part of a better assignment than one of `value`."""
        return tuple(_surviving_states(self.min_marginals, value, self.lower_bound))


def tighten(
    problem: Problem,
    close: float = TIGHT,
    clock: Clock | None = None,
    start: WarmStart[int] | None = None,
    enough: float = -np.inf,
) -> DualBound:
    """Bound `problem` and drop states. Every row and column of an edge must have a finite entry.

    close: relative gap at which to stop. clock: when it is late, no further round begins. start: where to begin; edges
    that the problem has not are passed over. enough: where an assignment of at most that value is known, no round
    begins.
    """
    work = _Work(problem)
    if start is not None:
        work.take_warm_start(start)
    history = [work.passing.bound()]
    for number in range(_ROUNDS if work.value > enough else 0):
        bound = work.passing.round()
        history.append(bound)
        if number == 0 or number % _DECODED == _DECODED - 1:
            work.decode_and_drop(bound)
        gain = bound - history[-1 - _PATIENCE] if number >= _PATIENCE else np.inf
        if work.value - bound <= close * abs(work.value) or gain <= _MIN_GAIN * abs(bound):
            break
        if clock is not None and clock.is_expired:
            break
    return work.to_bound(history[-1], has_end=start is not None)


class _Work:
    """A problem with the states that are left, and the best assignment known of it.

    left: per variable, the original numbers of its states. states / value: that assignment, by what is left.
    moved: per edge, by all states of its ends, what was moved onto it when last looked at: of states that went, then.
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
        """Take the assignment that is known, if it is better, and move costs to where they lay."""
        known = find_incumbent(self.problem, start.states)
        if self.problem.value(known) < self.value:
            self.states, self.value = known, self.problem.value(known)
        self.passing.move(start.moved, MAX_MESSAGE * abs(self.value))

    def decode_and_drop(self, bound: float) -> None:
        """Read an assignment off, and drop what is in none that is better than the best one."""
        found = improve(self.problem, self.passing.decode())
        value = self.problem.value(found)
        if value < self.value:
            self.states, self.value = found, value
        kept = _surviving_states(self.passing.min_marginals(), self.value, bound)
        if sum(map(len, kept)) <= _WORTH_DROPPING * sum(map(len, self.left)) and self._has_only_finite(kept):
            self._restrict(kept)

    def _has_only_finite(self, kept: Sequence[IntArray]) -> bool:
        """Whether every state that is kept can be with some that are kept of each neighbour."""
        edges = (matrix[np.ix_(kept[v], kept[w])] for v, w, matrix in self.passing.edges)
        return all(np.isfinite(edge.min(axis=0)).all() and np.isfinite(edge.min(axis=1)).all() for edge in edges)

    def _restrict(self, kept: Sequence[IntArray]) -> None:
        self._note_messages()
        self.left = [left[states] for left, states in zip(self.left, kept, strict=True)]
        self.problem, self.passing = self.problem.restrict(kept), self.passing.restrict(kept)
        self.states = np.array([np.searchsorted(k, s) for k, s in zip(kept, self.states, strict=True)], np.int64)

    def to_bound(self, bound: float, *, has_end: bool) -> DualBound:
        raised = [np.full(size, np.inf) for size in self.sizes]
        for whole, left, found in zip(raised, self.left, self.passing.min_marginals(), strict=True):
            whole[left] = found
        states = np.array([left[state] for left, state in zip(self.left, self.states, strict=True)], np.int64)
        return DualBound(
            states=states,
            value=self.value,
            lower_bound=min(bound, self.value),
            min_marginals=tuple(raised),
            warm_start=self._save_messages() if has_end else None,
        )

    def _note_messages(self) -> None:
        for (v, w, _), told in zip(self.passing.edges, self.passing.messages, strict=True):
            of_v, of_w = self.moved.setdefault((v, w), (np.zeros(self.sizes[v]), np.zeros(self.sizes[w])))
            of_v[self.left[v]], of_w[self.left[w]] = -told[0], -told[1]

    def _save_messages(self) -> WarmStart[int]:
        self._note_messages()
        return WarmStart(moved=self.moved)


def _surviving_states(raised: Sequence[FloatArray], value: float, bound: float) -> list[IntArray]:
    """Per variable, the states that raise a bound no further than to a value."""
    slack = value - bound + TIGHT * abs(value)
    return [np.flatnonzero(each <= slack) for each in raised]
