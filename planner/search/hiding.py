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
from shardwright.planner.search.relief import relieved

if TYPE_CHECKING:
    from shardwright.planner.search.found import Outcome, Tried
    from shardwright.planner.search.search import Search
    from shardwright.shardings import Mesh

#: Searches beside the first, at most; and the part of a step that a plan may promise in vain.
_ROUNDS = 3
_LEAST = 1e-3


def kept_promises(outcome: Outcome) -> Outcome:
    """The outcome of a search, or a better one where its plan would hide more than it can; with the better bound."""
    if outcome.found is None or outcome.found.promised_s <= _LEAST * outcome.step_s:
        return outcome
    best, outcomes = outcome, [outcome]
    low, high = 0.0, 1.0
    for _ in range(_ROUNDS):
        share = (low + high) / 2
        try:
            other = relieved(_counting(outcome.search, share).outcome())
        except OutOfTimeError:
            break
        outcomes.append(other)
        best = min(best, other, key=lambda each: each.step_s)
        if other.found is not None and other.found.promised_s > 0:
            high = share
        else:
            low = share
    assert best.found is not None
    if best.found.start is None:  # else it is bounded by all strategies on its mesh
        relaxed = tuple(_on(each, best.found.mesh) for each in outcomes if each is not best)
        best.found = replace(best.found, relaxed=tuple(each for each in relaxed if each is not None))
    return best


def _counting(search: Search, share: float) -> Search:
    made = copy(search)
    made.hidden_share = share
    return made


def _on(outcome: Outcome, mesh: Mesh) -> Tried | None:
    return next((each for each in outcome.tried if each.mesh == mesh), None)
