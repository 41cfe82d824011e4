"""The choice problem solved: exact reductions, bounds, and an integer program for what they leave."""

from __future__ import annotations

import numpy as np

from shardwright.errors import PlanError
from shardwright.planner import dual, ilp, pbqp
from shardwright.planner.clock import Clock
from shardwright.planner.ilp import Solution
from shardwright.planner.pbqp import Problem

#: Cores of up to so many states are solved to optimality; larger ones until this relative gap is proven.
EXACT_STATES = 2000
CLOSE = 1e-4


def solve(problem: Problem, *, time_limit_s: float, close: float = 0.0, clock: Clock | None = None) -> Solution:
    """The best states found, their value and a certified lower bound (equal where proven optimal).

    time_limit_s: for the integer program. close: relative gap that is good enough. clock: when it is late, what is
    known is taken.

    Raises PlanError where no assignment is finite.
    """
    try:
        reduction = pbqp.reduce(problem)
        core = _solve_core(reduction.core, time_limit_s, close, clock or Clock())
    except ValueError as error:
        raise contradiction(error) from None
    return Solution(
        states=reduction.complete(core.states),
        value=reduction.constant + core.value,
        lower_bound=reduction.constant + core.lower_bound,
    )


def contradiction(error: ValueError) -> PlanError:
    """What a problem without any finite assignment means to the user."""
    return PlanError(f"the pins contradict each other: {error}", remedy="pin or force less")


def _solve_core(core: Problem, time_limit_s: float, good_enough: float, clock: Clock) -> Solution:
    """Bound the core; what may still be better than the best known assignment goes to the integer program."""
    if not core.costs:
        return Solution(states=np.zeros(0, np.int64), value=0.0, lower_bound=0.0)
    close = max(good_enough, dual.TIGHT if sum(map(len, core.costs)) <= EXACT_STATES else CLOSE)
    bounded = dual.tighten(core, close, clock)
    known = Solution(states=bounded.states, value=bounded.value, lower_bound=bounded.lower_bound)
    if known.value - known.lower_bound <= close * abs(known.value) or (clock.is_late and np.isfinite(known.value)):
        return known
    rest = pbqp.reduce(core.restricted(bounded.kept))
    solved = ilp.solve(rest.core, time_limit_s=clock.within(time_limit_s), gap=good_enough or ilp.EXACT)
    value = rest.constant + solved.value
    bound = max(known.lower_bound, min(rest.constant + solved.lower_bound, known.value))
    if value >= known.value:
        return Solution(states=known.states, value=known.value, lower_bound=bound)
    chosen = rest.complete(solved.states)
    states = np.array([kept[i] for kept, i in zip(bounded.kept, chosen, strict=True)], np.int64)
    return Solution(states=states, value=value, lower_bound=min(bound, value))
