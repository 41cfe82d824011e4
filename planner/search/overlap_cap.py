"""Caps the communication hidden by a plan at the compute available after the first gradient.

With G seconds of gradient communication, a hideable fraction o, and H seconds of compute after the first gradient, a
step takes the rest plus G − min(o·G, H). This minimum is not a sum over instructions. Any λ in [0, 1] bounds it from
above by λ·o·G + (1 − λ)·H, a sum. Hence a search with gradients at 1 − λ·o of their time, and compute behind them at λ
of its time, bounds every plan from below (Lagrangian relaxation: Fisher, "The Lagrangian Relaxation Method for Solving
Integer Programming Problems", 1981). λ = 1 is the first search. When its plan exceeds the cap, bisection searches λ
between plans within and beyond the cap; each search yields a plan, evaluated with the true cap, and a bound.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING

from shardwright.planner.clock import OutOfTimeError
from shardwright.planner.search.memory_tradeoffs import fit_with_remat
from shardwright.planner.search.tuning import MAX_OVERLAP_ROUNDS, MIN_EXCESS_OVERLAP

if TYPE_CHECKING:
    from shardwright.planner.search.search import Search
    from shardwright.planner.search.solutions import MeshSolution, SearchResult
    from shardwright.plans.shardings import Mesh


def enforce_overlap_cap(outcome: SearchResult) -> SearchResult:
    """The result, or a better one when its plan exceeds the overlap cap; with the better bound."""
    if outcome.best_plan is None or outcome.best_plan.overlap_excess_s <= MIN_EXCESS_OVERLAP * outcome.step_s:
        return outcome
    best, outcomes = outcome, [outcome]
    low, high = 0.0, 1.0
    for _ in range(MAX_OVERLAP_ROUNDS):
        share = (low + high) / 2
        try:
            other = fit_with_remat(_with_hidden_share(outcome.search, share).search_meshes())
        except OutOfTimeError:
            break
        outcomes.append(other)
        best = min(best, other, key=lambda solution: solution.step_s)
        if other.best_plan is not None and other.best_plan.overlap_excess_s > 0:
            high = share
        else:
            low = share
    assert best.best_plan is not None
    if best.best_plan.coarse_solution is None:  # otherwise bounded by all strategies of its mesh
        relaxed = tuple(_solution_on(result, best.best_plan.mesh) for result in outcomes if result is not best)
        best.best_plan = replace(
            best.best_plan, relaxed_solutions=tuple(solution for solution in relaxed if solution is not None)
        )
    return best


def _with_hidden_share(search: Search, share: float) -> Search:
    variant = copy(search)
    variant.hidden_share = share
    return variant


def _solution_on(outcome: SearchResult, mesh: Mesh) -> MeshSolution | None:
    return next((solution for solution in outcome.solutions if solution.mesh == mesh), None)
