"""A plan that takes little memory whatever else it takes, known early where memory binds.

State fully sharded, everything computed again that can be, the batch in as few parts as make that fit: what an expert
would write for a model that is too large. It is forced, and so found in a second or two: a deadline can leave with it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardwright.errors import AnnotationError, PlanError
from shardwright.planner.memory.recompute import PRICES, Recomputation, recomputations
from shardwright.planner.search.experts import fully_sharded
from shardwright.planner.search.found import Outcome

if TYPE_CHECKING:
    from shardwright.planner.search.found import Found
    from shardwright.planner.search.search import Search

#: Most micro-batches that are tried unless more are asked for.
MOST_MICRO_BATCHES = 16

_SCOPE = (
    "this plan is fully sharded and computes again what it can, for that takes little memory: the search, as far as it "
    "came, found none faster"
)


def sparing_plan(search: Search, plain: Found | None = None) -> Outcome | None:
    """Such a plan, if one fits the memory and what was asked for leaves the choice.

    plain: the fully sharded one of the program as it is, where it is known.
    """
    if not search.is_free:
        return None
    plain = plain or fully_sharded(search)
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
        number = _next_number(search, found, number)
    return None


def _next_number(search: Search, found: Found | None, number: int) -> int:
    """The number of micro-batches to try after this one, with which the fully sharded plan does not fit: the first that
    may be enough, for parts of a batch take at best as much less as they are more."""
    number *= 2
    if found is not None:
        needed, stored = search.needed_bytes(found), found.memory.arguments_bytes
        while number < MOST_MICRO_BATCHES and stored + (needed - stored) / 2 > search.limit_bytes:
            number, needed = 2 * number, stored + (needed - stored) // 2
    return number


def _all_that_can_be(search: Search, found: Found) -> Recomputation | None:
    if search.options.remat == "none" or search.program.micro_batches > 1:  # what is, is told from the whole batch
        return None
    ladder = recomputations(found.decisions, found.chain, found.cost.step_s, found.memory.peak_bytes, PRICES[-1:])
    return ladder[-1] if ladder else None
