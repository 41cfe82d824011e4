"""No plan hides more communication than it has compute to hide it behind.

With G seconds of gradients moving, of which the part o can be hidden, and H seconds of compute after the first
gradient, a step takes the rest and G − min(o·G, H). That minimum is no sum over instructions, but for every λ between 0
and 1 it is at most λ·o·G + (1 − λ)·H, which is one: a search with gradients at 1 − λ·o of their time, and what is
computed behind them at λ of its time, bounds every plan from below (Lagrangian relaxation: Fisher, "The Lagrangian
Relaxation Method for Solving Integer Programming Problems", 1981). λ = 1 is the first search. Where its plan promises
more than it can keep, bisection looks for the λ between plans that do and plans that do not; each search gives a plan,
judged by what it really takes, and a bound.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING

from shardwright.planner.clock import OutOfTimeError
from shardwright.planner.search.memory_tradeoffs import fit_with_remat

if TYPE_CHECKING:
    from shardwright.planner.search.search import Search
    from shardwright.planner.search.solutions import MeshSolution, SearchResult
    from shardwright.shardings import Mesh

#: Searches beside the first, at most; and the part of a step that a plan may promise in vain.
_MAX_ROUNDS = 3
_MIN_EXCESS = 1e-3


def enforce_overlap_cap(outcome: SearchResult) -> SearchResult:
    """The outcome of a search, or a better one where its plan would hide more than it can; with the better bound."""
    if outcome.best_plan is None or outcome.best_plan.overlap_excess_s <= _MIN_EXCESS * outcome.step_s:
        return outcome
    best, outcomes = outcome, [outcome]
    low, high = 0.0, 1.0
    for _ in range(_MAX_ROUNDS):
        share = (low + high) / 2
        try:
            other = fit_with_remat(_with_hidden_share(outcome.search, share).search_meshes())
        except OutOfTimeError:
            break
        outcomes.append(other)
        best = min(best, other, key=lambda each: each.step_s)
        if other.best_plan is not None and other.best_plan.overlap_excess_s > 0:
            high = share
        else:
            low = share
    assert best.best_plan is not None
    if best.best_plan.coarse_solution is None:  # else it is bounded by all strategies on its mesh
        relaxed = tuple(_solution_on(each, best.best_plan.mesh) for each in outcomes if each is not best)
        best.best_plan = replace(best.best_plan, relaxed_solutions=tuple(each for each in relaxed if each is not None))
    return best


def _with_hidden_share(search: Search, share: float) -> Search:
    made = copy(search)
    made.hidden_share = share
    return made


def _solution_on(outcome: SearchResult, mesh: Mesh) -> MeshSolution | None:
    return next((each for each in outcome.solutions if each.mesh == mesh), None)
