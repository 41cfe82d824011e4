"""A plan that takes little memory whatever else it takes, known early where memory binds.

State fully sharded, everything computed again that can be, the batch in as few parts as make that fit: what an expert
would write for a model that is too large. It is forced, and so found in a second or two: a deadline can leave with it.
Where the fastest such plan does not fit, however many the parts, the thriftiest is looked for by a price of memory, for
the fastest may gather all state ahead of the loop over the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from shardwright.errors import AnnotationError, MemoryBudgetError, PlanError
from shardwright.planner.clock import OutOfTimeError
from shardwright.planner.memory.lagrangian import fit_plan
from shardwright.planner.memory.messages import TooLargeError, too_large_error
from shardwright.planner.memory.recompute import BYTE_PRICES, Recomputation, list_recomputations
from shardwright.planner.search.experts import build_fully_sharded_plan
from shardwright.planner.search.solutions import SearchResult

if TYPE_CHECKING:
    from shardwright.planner.search.search import Search
    from shardwright.planner.search.solutions import CandidatePlan

#: Most micro-batches that are searched unless more are asked for.
MAX_MICRO_BATCHES = 16

#: Most that are tried where a plan of no fewer fits: each part has work of its own for every device.
MAX_MICRO_BATCHES_IN_NEED = 256

#: Makes the plan in so many micro-batches, a price of memory looking for one that needs less or not: see
#: `_plan_with_micro_batches`.
PlanMaker = Callable[[int, bool], "SearchResult | None"]

_BOUND_SCOPE = (
    "this plan is fully sharded and computes again what it can, for that takes little memory: the search, as far as it "
    "came, found none faster"
)


def find_fallback_plan(search: Search, plain: CandidatePlan | None = None) -> SearchResult | None:
    """Such a plan, if one fits the memory; else the refusal of the one that needs least. None where what was asked for
    leaves no choice, or none can be had.

    plain: the fully sharded one of the program as it is, where it is known.
    """
    make = _plan_maker(search, plain)
    if make is None:
        return None
    refused: list[SearchResult] = []
    for most, is_priced in ((MAX_MICRO_BATCHES, False), (MAX_MICRO_BATCHES_IN_NEED, True)):
        for made in _plans_by_micro_batches(search, make, most, is_priced):
            if made.best_plan is not None:
                return made
            refused.append(made)
        if search.must_stop():
            break
    return min(refused, key=lambda outcome: outcome.min_needed_bytes, default=None)


def find_min_memory_plan(search: Search) -> SearchResult | None:
    """One of those plans that fits, or else the refusal of the one that needs least, of as many parts as there may be
    or of fewer, if that needs less: known sooner than `find_fallback_plan`, and slower to run. None as there."""
    make = _plan_maker(search)
    if make is None:
        return None
    fewest = search.program.micro_batches
    number = MAX_MICRO_BATCHES_IN_NEED if search.options.micro_batches is None else fewest
    least: SearchResult | None = None
    while number >= fewest:
        made = make(number, True)
        if made is not None:
            if made.best_plan is not None:
                return made
            if least is not None and made.min_needed_bytes > least.min_needed_bytes:
                break
            least = made
        number //= 2
    return least


def _plan_maker(search: Search, plain: CandidatePlan | None = None) -> PlanMaker | None:
    """What makes such plans; None where there can be none. plain: as above."""
    if not search.is_unforced:
        return None
    plain = plain or build_fully_sharded_plan(search)
    return partial(_plan_with_micro_batches, search, _full_recomputation(search, plain)) if plain is not None else None


def _plans_by_micro_batches(search: Search, make: PlanMaker, most: int, is_priced: bool) -> Iterator[SearchResult]:
    """Such plans of ever more micro-batches, those left out that cannot be enough."""
    last, number = 0, search.program.micro_batches
    most = most if search.options.micro_batches is None else number
    while last < number <= most:
        made = make(number, is_priced)
        if made is None:  # the step does not split so far, or leaves nothing to shard
            most = number = number // 2
            continue
        yield made
        last, number = number, _next_micro_batches(search, made, number, most)


def _plan_with_micro_batches(
    search: Search, again: Recomputation | None, number: int, is_priced: bool
) -> SearchResult | None:
    """The fully sharded plan in so many micro-batches, or its refusal; None where there is none.

    is_priced: whether a price of memory looks for one that needs less.
    """
    try:
        variant = search.for_variant(again, number)
    except OutOfTimeError:
        raise
    except (PlanError, AnnotationError):
        return None
    found = build_fully_sharded_plan(variant)
    if found is None:
        return None
    made = SearchResult(search=variant, solutions=[], mesh_errors={})
    try:
        fits = fit_plan(variant, found) if is_priced else _check_type(variant, found)
    except MemoryBudgetError as error:
        made.add_memory_error(error)
        return made
    made.best_plan = replace(fits, cost=replace(fits.cost, bound_scope=_BOUND_SCOPE))
    variant.offer(made.best_plan)
    return made


def _check_type(search: Search, found: CandidatePlan) -> CandidatePlan:
    if not search.fits(found):
        raise too_large_error(search, found)
    return found


def _next_micro_batches(search: Search, made: SearchResult, number: int, most: int) -> int:
    """The number of micro-batches to try after this one, with which the fully sharded plan does not fit: the first that
    may be enough, for parts of a batch take at best as much less as they are more."""
    number *= 2
    if isinstance(made.memory_error, TooLargeError):
        needed, stored = made.min_needed_bytes, made.memory_error.stored_bytes
        while number < most and stored + (needed - stored) / 2 > search.limit_bytes:
            number, needed = 2 * number, stored + (needed - stored) / 2
    return number


def _full_recomputation(search: Search, found: CandidatePlan) -> Recomputation | None:
    if search.options.remat == "none" or search.program.micro_batches > 1:  # what is, is told from the whole batch
        return None
    ladder = list_recomputations(
        found.decisions, found.chain, found.cost.step_s, found.memory.peak_bytes, BYTE_PRICES[-1:]
    )
    return ladder[-1] if ladder else None
