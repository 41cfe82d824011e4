"""The choice problem solved: exact reductions, bounds, and an integer program for what they leave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardwright.errors import PlanError
from shardwright.planner.clock import Clock
from shardwright.planner.solver import dual, ilp, pbqp
from shardwright.planner.solver.ilp import Solution
from shardwright.planner.solver.pbqp import IntArray, Problem, Reduction
from shardwright.planner.solver.warm_start import VariableImage, WarmStart, positions_in, translate

#: Cores of up to so many states are solved to optimality; larger ones until this relative gap is proven.
EXACT_STATES = 2000
GAP_TOLERANCE = 1e-4

#: Where the bound is nearly exact and the assignment known is not, the best one has states that hardly raise the bound:
#: parts of the distance between the two up to which states are looked at, one after the other; then all that remain.
GAP_SHARES = (1e-4, 1e-3, 3e-3, 1e-2, 4e-2)
_ALL = 1.0

#: Entries of the edges of the largest integer program that is begun, where a gap is good enough and where none is, and
#: the work that it may take (`ilp.solve`): with many equally good choices the first linear relaxation of 60,000 entries
#: takes 5 s, and of 13,000 entries each further one 0.1 s, mostly for a bound that nobody waits for.
MAX_ENTRIES_WITH_GAP, MAX_ENTRIES = 15_000, 25_000
MOST_WORK = 60_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverResult:
    """States per variable, their value, and a bound that no assignment is under. end: what another search may begin
    with, if this one was given something to begin with."""

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
    """The best states found, their value and a certified lower bound (equal where proven optimal).

    time_limit_s: for the integer program. close: relative gap that is good enough. clock: when it is late, what is
    known is taken. start: where message passing begins, such as where it ended for a problem much like this one.
    enough: what may be taken at once if it costs no more; then there is hardly a bound.

    Raises PlanError where no assignment is finite.
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
    """What a start for a problem says of its core."""
    pairs = enumerate(zip(reduction.variables, reduction.states, strict=True))
    return (
        None
        if start is None
        else translate(start, {v: [VariableImage(number, states)] for number, (v, states) in pairs})
    )


def to_problem(start: WarmStart[int], reduction: Reduction, problem: Problem) -> WarmStart[int]:
    """What a start for a problem's core says of the problem."""
    pairs = enumerate(zip(reduction.variables, reduction.states, strict=True))
    return translate(
        start,
        {number: [VariableImage(v, positions_in(states, len(problem.costs[v])))] for number, (v, states) in pairs},
    )


def contradiction_error(error: ValueError) -> PlanError:
    """What a problem without any finite assignment means to the user."""
    return PlanError(f"the pins contradict each other: {error}", remedy="pin or force less")


def _solve_core(
    core: Problem, time_limit_s: float, good_enough: float, clock: Clock, start: WarmStart[int] | None, enough: float
) -> tuple[Solution, WarmStart[int] | None]:
    """Bound the core; what may still be better than the best known assignment goes to the integer program. And where
    message passing ended."""
    if not core.costs:
        return Solution(states=np.zeros(0, np.int64), value=0.0, lower_bound=0.0), start
    close = max(good_enough, dual.TIGHT if sum(map(len, core.costs)) <= EXACT_STATES else GAP_TOLERANCE)
    bounded = dual.tighten(core, close, clock, start, enough)
    known = Solution(states=bounded.states, value=bounded.value, lower_bound=bounded.lower_bound)
    for part in (*GAP_SHARES, _ALL) if np.isfinite(known.value) else (_ALL,):
        is_close = known.value - known.lower_bound <= close * abs(known.value) or known.value <= enough
        if is_close or (clock.is_expired and np.isfinite(known.value)):
            break
        reach = known.lower_bound + part * (known.value - known.lower_bound)
        limit_s, gap = clock.time_left_s(time_limit_s), good_enough or ilp.EXACT
        found = _solve_surviving(core, known, bounded.surviving_states(reach), limit_s, gap, is_all=part == _ALL)
        if found is None:  # too many: those that remain are more
            break
        known = found
    return known, bounded.warm_start


def _solve_surviving(
    core: Problem, known: Solution, kept: Sequence[IntArray], time_limit_s: float, gap: float, *, is_all: bool
) -> Solution | None:
    """The better of what is known and the best assignment of the states `kept`; None where these are too many.

    is_all: a better one has only those.
    """
    if not all(map(len, kept)):
        return known
    try:
        rest = pbqp.reduce(core.restrict(tuple(kept)))
        most = MAX_ENTRIES_WITH_GAP if gap > ilp.EXACT else MAX_ENTRIES
        if _entries(rest.core) > most and np.isfinite(known.value):
            return None
        below = known.value - rest.constant
        solved = ilp.solve(rest.core, time_limit_s=time_limit_s, gap=gap, below=below, most_work=MOST_WORK)
    except (ValueError, PlanError):  # no finite assignment among these
        if np.isfinite(known.value):
            return known
        raise
    value = rest.constant + solved.value
    bound = known.lower_bound
    if is_all:
        bound = max(bound, min(rest.constant + solved.lower_bound, known.value))
    if value >= known.value:
        return Solution(states=known.states, value=known.value, lower_bound=bound)
    states = np.array([left[i] for left, i in zip(kept, rest.complete(solved.states), strict=True)], np.int64)
    return Solution(states=states, value=value, lower_bound=min(bound, value))


def _entries(problem: Problem) -> int:
    return sum(matrix.size for matrix in problem.edges.values())
