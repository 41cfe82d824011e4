"""The minimum-memory plan: found early under a binding memory budget.

Fully sharded state, full rematerialization, as few micro-batches as fit: an expert's choice on an oversized model.
Being forced, it is found in a second or two and can serve as the result at a deadline. When the fastest such plan fits
with no number of micro-batches, a memory multiplier searches a smaller one: the fastest may gather all state ahead of
the loop over micro-batches.
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
from shardwright.planner.memory.recompute import Recomputation, list_recomputations
from shardwright.planner.memory.tuning import BYTE_PRICES
from shardwright.planner.search.experts import build_fully_sharded_plan
from shardwright.planner.search.solutions import SearchResult
from shardwright.planner.search.tuning import MAX_MICRO_BATCHES, MAX_MICRO_BATCHES_IN_NEED

if TYPE_CHECKING:
    from shardwright.planner.search.search import Search
    from shardwright.planner.search.solutions import CandidatePlan


#: Builds the plan of (micro-batches, whether a memory multiplier searches a smaller one): see
#: `_plan_with_micro_batches`.
PlanMaker = Callable[[int, bool], "SearchResult | None"]

_BOUND_SCOPE = (
    "this plan is fully sharded and computes again what it can, for that takes little memory: the search, as far as it "
    "came, found none faster"
)


def find_fallback_plan(search: Search, plain: CandidatePlan | None = None) -> SearchResult | None:
    """A minimum-memory plan that fits; otherwise the refusal needing least memory. None when the options exclude it, or
    none exists.

    plain: the unchanged program's fully sharded plan, when already known.
    """
    make = _plan_maker(search, plain)
    if make is None:
        return None
    refused: list[SearchResult] = []
    for most, is_priced in ((MAX_MICRO_BATCHES, False), (MAX_MICRO_BATCHES_IN_NEED, True)):
        for result in _plans_by_micro_batches(search, make, most, is_priced):
            if result.best_plan is not None:
                return result
            refused.append(result)
        if search.must_stop():
            break
    return min(refused, key=lambda outcome: outcome.min_needed_bytes, default=None)


def find_min_memory_plan(search: Search) -> SearchResult | None:
    """A feasible minimum-memory plan, or the refusal needing least memory, starting from the maximum number of
    micro-batches and halving while that reduces the need. Found sooner than with `find_fallback_plan`, but slower to
    run. None in the same cases."""
    make = _plan_maker(search)
    if make is None:
        return None
    fewest = search.program.micro_batches
    number = MAX_MICRO_BATCHES_IN_NEED if search.options.micro_batches is None else fewest
    least: SearchResult | None = None
    while number >= fewest:
        result = make(number, True)
        if result is not None:
            if result.best_plan is not None:
                return result
            if least is not None and result.min_needed_bytes > least.min_needed_bytes:
                break
            least = result
        number //= 2
    return least


def _plan_maker(search: Search, plain: CandidatePlan | None = None) -> PlanMaker | None:
    """The builder of these plans; None without one. plain: see `find_fallback_plan`."""
    if not search.is_unforced:
        return None
    plain = plain or build_fully_sharded_plan(search)
    return partial(_plan_with_micro_batches, search, _full_recomputation(search, plain)) if plain is not None else None


def _plans_by_micro_batches(search: Search, make: PlanMaker, most: int, is_priced: bool) -> Iterator[SearchResult]:
    """Such plans with increasing micro-batches, omitting insufficient numbers."""
    last, number = 0, search.program.micro_batches
    most = most if search.options.micro_batches is None else number
    while last < number <= most:
        result = make(number, is_priced)
        if result is None:  # the step does not split that often, or nothing is left to shard
            most = number = number // 2
            continue
        yield result
        last, number = number, _next_micro_batches(search, result, number, most)


def _plan_with_micro_batches(
    search: Search, again: Recomputation | None, number: int, is_priced: bool
) -> SearchResult | None:
    """The fully sharded plan with this many micro-batches, or its refusal; None without one.

    is_priced: whether a memory multiplier searches a smaller plan.
    """
    try:
        variant = search.for_variant(again, number)
    except OutOfTimeError:
        raise
    except (PlanError, AnnotationError):
        return None
    plan = build_fully_sharded_plan(variant)
    if plan is None:
        return None
    result = SearchResult(search=variant, solutions=[], mesh_errors={})
    try:
        fits = fit_plan(variant, plan) if is_priced else _check_type(variant, plan)
    except MemoryBudgetError as error:
        result.add_memory_error(error)
        return result
    result.best_plan = replace(fits, cost=replace(fits.cost, bound_scope=_BOUND_SCOPE))
    variant.offer(result.best_plan)
    return result


def _check_type(search: Search, plan: CandidatePlan) -> CandidatePlan:
    if not search.fits(plan):
        raise too_large_error(search, plan)
    return plan


def _next_micro_batches(search: Search, result: SearchResult, number: int, most: int) -> int:
    """The next number of micro-batches after a refusal: the first possibly sufficient one, assuming per-part memory
    inversely proportional to the number."""
    number *= 2
    if isinstance(result.memory_error, TooLargeError):
        needed, stored = result.min_needed_bytes, result.memory_error.stored_bytes
        while number < most and stored + (needed - stored) / 2 > search.limit_bytes:
            number, needed = 2 * number, stored + (needed - stored) / 2
    return number


def _full_recomputation(search: Search, plan: CandidatePlan) -> Recomputation | None:
    if search.options.remat == "none" or search.program.micro_batches > 1:  # levels derive from the whole batch
        return None
    ladder = list_recomputations(plan.decisions, plan.chain, plan.cost.step_s, plan.memory.peak_bytes, BYTE_PRICES[-1:])
    return ladder[-1] if ladder else None
