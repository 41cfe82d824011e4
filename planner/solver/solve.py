"""Solves the choice problem: exact reductions, bounds, and an integer program over the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardwright.errors import PlanError
from shardwright.planner.clock import Clock
from shardwright.planner.solver import dual, ilp, pbqp
from shardwright.planner.solver.ilp import Solution
from shardwright.planner.solver.pbqp import IntArray, Problem, Reduction
from shardwright.planner.solver.tuning import (
    EXACT,
    EXACT_STATES,
    GAP_SHARES,
    GAP_TOLERANCE,
    MAX_ENTRIES,
    MAX_ENTRIES_WITH_GAP,
    MOST_WORK,
    TIGHT,
)
from shardwright.planner.solver.warm_start import VariableImage, WarmStart, positions_in, translate

_ALL = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverResult:
    """States per variable, their value, and a lower bound on every assignment's value.

    warm_start: reusable by another search; None unless this one was warm-started.
    """

    states: IntArray
    value: float
    lower_bound: float
    warm_start: WarmStart[int] | None


def solve(
    problem: Problem,
    *,
    time_limit_s: float,
    close: float = 0.0,
    clock: Clock | None = None,
    start: WarmStart[int] | None = None,
    enough: float = -np.inf,
) -> SolverResult:
    """The best assignment, its value and a certified lower bound (equal when proven optimal).

    time_limit_s: of the integer program.
    close: acceptable relative gap.
    clock: once it has expired, the incumbent is returned.
    start: warm start of message passing, such as the end of a similar problem's.
    enough: a value; an incumbent at most this expensive is returned at once, almost without a bound.

    Raises PlanError when no assignment is finite.
    """
    try:
        reduction = pbqp.reduce(problem)
        begin, enough = to_core(start, reduction), enough - reduction.constant
        core, end = _solve_core(reduction.core, time_limit_s, close, clock or Clock(), begin, enough)
    except ValueError as error:
        raise contradiction_error(error) from None
    states = reduction.complete(core.states)
    if end is not None:
        end = replace(to_problem(end, reduction, problem), states=dict(enumerate(states.tolist())))
    return SolverResult(
        states=states,
        value=reduction.constant + core.value,
        lower_bound=reduction.constant + core.lower_bound,
        warm_start=end,
    )


def to_core(start: WarmStart[int] | None, reduction: Reduction) -> WarmStart[int] | None:
    """A problem's warm start, translated to its core."""
    pairs = enumerate(zip(reduction.variables, reduction.states, strict=True))
    return (
        None
        if start is None
        else translate(start, {v: [VariableImage(number, states)] for number, (v, states) in pairs})
    )


def to_problem(start: WarmStart[int], reduction: Reduction, problem: Problem) -> WarmStart[int]:
    """A core's warm start, translated to the problem."""
    pairs = enumerate(zip(reduction.variables, reduction.states, strict=True))
    return translate(
        start,
        {number: [VariableImage(v, positions_in(states, len(problem.costs[v])))] for number, (v, states) in pairs},
    )


def contradiction_error(error: ValueError) -> PlanError:
    """The user's error of a problem without any finite assignment."""
    return PlanError(f"the pins contradict each other: {error}", remedy="pin or force less")


def _solve_core(
    core: Problem, time_limit_s: float, good_enough: float, clock: Clock, start: WarmStart[int] | None, enough: float
) -> tuple[Solution, WarmStart[int] | None]:
    """Bound the core, then give the states of possibly better assignments to the integer program. Returns the solution
    and the final messages."""
    if not core.costs:
        return Solution(states=np.zeros(0, np.int64), value=0.0, lower_bound=0.0), start
    close = max(good_enough, TIGHT if sum(map(len, core.costs)) <= EXACT_STATES else GAP_TOLERANCE)
    bounded = dual.tighten(core, close, clock, start, enough)
    incumbent = Solution(states=bounded.states, value=bounded.value, lower_bound=bounded.lower_bound)
    # Without an incumbent there is no gap to take a share of.
    for part in (*GAP_SHARES, _ALL) if np.isfinite(incumbent.value) else (_ALL,):
        is_close = incumbent.value - incumbent.lower_bound <= close * abs(incumbent.value) or incumbent.value <= enough
        if is_close or (clock.is_expired and np.isfinite(incumbent.value)):
            break
        reach = incumbent.lower_bound + part * (incumbent.value - incumbent.lower_bound)
        limit_s, gap = clock.time_left_s(time_limit_s), good_enough or EXACT
        solution = _solve_surviving(core, incumbent, bounded.surviving_states(reach), limit_s, gap, is_all=part == _ALL)
        if solution is None:  # too many: those that remain are more
            break
        incumbent = solution
    return incumbent, bounded.warm_start


def _solve_surviving(
    core: Problem, incumbent: Solution, survivors: Sequence[IntArray], time_limit_s: float, gap: float, *, is_all: bool
) -> Solution | None:
    """The better of `incumbent` and the best assignment of the states `survivors`; None when these are too many.

    is_all: every better assignment consists of these states.
    """
    if not all(map(len, survivors)):
        return incumbent
    try:
        rest = pbqp.reduce(core.restrict(tuple(survivors)))
        most = MAX_ENTRIES_WITH_GAP if gap > EXACT else MAX_ENTRIES
        if _entries(rest.core) > most and np.isfinite(incumbent.value):
            return None
        below = incumbent.value - rest.constant
        solved = ilp.solve(rest.core, time_limit_s=time_limit_s, gap=gap, below=below, most_work=MOST_WORK)
    except (ValueError, PlanError):  # no finite assignment among these
        if np.isfinite(incumbent.value):
            return incumbent
        raise
    value = rest.constant + solved.value
    bound = incumbent.lower_bound
    if is_all:  # no better assignment is outside of the program: its bound holds for all
        bound = max(bound, min(rest.constant + solved.lower_bound, incumbent.value))
    if value >= incumbent.value:
        return Solution(states=incumbent.states, value=incumbent.value, lower_bound=bound)
    states = np.array(
        [numbers[i] for numbers, i in zip(survivors, rest.complete(solved.states), strict=True)], np.int64
    )
    return Solution(states=states, value=value, lower_bound=min(bound, value))


def _entries(problem: Problem) -> int:
    return sum(matrix.size for matrix in problem.edges.values())
