"""A plan that takes little memory whatever else it takes, known early where memory binds.

State fully sharded, everything computed again that can be, the batch in as few parts as make that fit: what an expert
would write for a model that is too large. It is forced, and so found in a second or two: a deadline can leave with it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardwright.errors import AnnotationError, PlanError
from shardwright.planner.experts import fully_sharded
from shardwright.planner.found import Outcome
from shardwright.planner.recompute import PRICES, Recomputation, recomputations

if TYPE_CHECKING:
    from shardwright.planner.found import Found
    from shardwright.planner.search import Search

#: Most micro-batches that are tried unless more are asked for.
MOST_MICRO_BATCHES = 16

_SCOPE = (
    "this plan is fully sharded and computes again what it can, for that takes little memory: the search, as far as it "
    "came, found none faster"
)


def sparing_plan(search: Search) -> Outcome | None:
    """Such a plan, if one fits the memory and what was asked for leaves the choice."""
    if not search.is_free:
        return None
    plain = fully_sharded(search)
    if plain is None:
        return None
    again = _all_that_can_be(search, plain)
    number = search.program.micro_batches
    most = MOST_MICRO_BATCHES if search.options.micro_batches is None else number
    while number <= most:
        try:
            variant = search.computing(again, number)
        except (PlanError, AnnotationError):
            return None
        found = fully_sharded(variant)
        if found is not None and search.needed_bytes(found) <= search.limit_bytes:
            found = replace(found, cost=replace(found.cost, bound_scope=_SCOPE))
            variant.offer(found)
            return Outcome(search=variant, tried=[], refusals={}, found=found)
        number *= 2
    return None


def _all_that_can_be(search: Search, found: Found) -> Recomputation | None:
    if search.options.remat == "none" or search.program.micro_batches > 1:  # what is, is told from the whole batch
        return None
    ladder = recomputations(found.decisions, found.chain, found.cost.step_s, found.memory.peak_bytes, PRICES[-1:])
    return ladder[-1] if ladder else None
