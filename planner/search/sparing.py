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
from shardwright.planner.memory.fitting import fitted
from shardwright.planner.memory.recompute import PRICES, Recomputation, recomputations
from shardwright.planner.memory.words import TooLargeError, too_large
from shardwright.planner.search.experts import fully_sharded
from shardwright.planner.search.found import Outcome

if TYPE_CHECKING:
    from shardwright.planner.search.found import Found
    from shardwright.planner.search.search import Search

#: Most micro-batches that are searched unless more are asked for.
MOST_MICRO_BATCHES = 16

#: Most that are tried where a plan of no fewer fits: each part has work of its own for every device.
MOST_IN_NEED = 256

#: Makes the plan in so many micro-batches, a price of memory looking for one that needs less or not: see `_in_so_many`.
Maker = Callable[[int, bool], "Outcome | None"]

_SCOPE = (
    "this plan is fully sharded and computes again what it can, for that takes little memory: the search, as far as it "
    "came, found none faster"
)


def sparing_plan(search: Search, plain: Found | None = None) -> Outcome | None:
    """Such a plan, if one fits the memory; else the refusal of the one that needs least. None where what was asked for
    leaves no choice, or none can be had.

    plain: the fully sharded one of the program as it is, where it is known.
    """
    make = _maker(search, plain)
    if make is None:
        return None
    refused: list[Outcome] = []
    for most, is_priced in ((MOST_MICRO_BATCHES, False), (MOST_IN_NEED, True)):
        for made in _in_parts(search, make, most, is_priced):
            if made.found is not None:
                return made
            refused.append(made)
        if search.is_late():
            break
    return min(refused, key=lambda outcome: outcome.least_bytes, default=None)


def thriftiest_plan(search: Search) -> Outcome | None:
    """One of those plans that fits, or else the refusal of the one that needs least, of as many parts as there may be
    or of fewer, if that needs less: known sooner than `sparing_plan`, and slower to run. None as there."""
    make = _maker(search)
    if make is None:
        return None
    fewest = search.program.micro_batches
    number = MOST_IN_NEED if search.options.micro_batches is None else fewest
    least: Outcome | None = None
    while number >= fewest:
        made = make(number, True)
        if made is not None:
            if made.found is not None:
                return made
            if least is not None and made.least_bytes > least.least_bytes:
                break
            least = made
        number //= 2
    return least


def _maker(search: Search, plain: Found | None = None) -> Maker | None:
    """What makes such plans; None where there can be none. plain: as above."""
    if not search.is_free:
        return None
    plain = plain or fully_sharded(search)
    return partial(_in_so_many, search, _all_that_can_be(search, plain)) if plain is not None else None


def _in_parts(search: Search, make: Maker, most: int, is_priced: bool) -> Iterator[Outcome]:
    """Such plans of ever more micro-batches, those left out that cannot be enough."""
    last, number = 0, search.program.micro_batches
    most = most if search.options.micro_batches is None else number
    while last < number <= most:
        made = make(number, is_priced)
        if made is None:  # the step does not split so far, or leaves nothing to shard
            most = number = number // 2
            continue
        yield made
        last, number = number, _next_number(search, made, number, most)


def _in_so_many(search: Search, again: Recomputation | None, number: int, is_priced: bool) -> Outcome | None:
    """The fully sharded plan in so many micro-batches, or its refusal; None where there is none.

    is_priced: whether a price of memory looks for one that needs less.
    """
    try:
        variant = search.computing(again, number)
    except OutOfTimeError:
        raise
    except (PlanError, AnnotationError):
        return None
    found = fully_sharded(variant)
    if found is None:
        return None
    made = Outcome(search=variant, tried=[], refusals={})
    try:
        fits = fitted(variant, found) if is_priced else _as_it_is(variant, found)
    except MemoryBudgetError as error:
        made.refuse(error)
        return made
    made.found = replace(fits, cost=replace(fits.cost, bound_scope=_SCOPE))
    variant.offer(made.found)
    return made


def _as_it_is(search: Search, found: Found) -> Found:
    if not search.fits(found):
        raise too_large(search, found)
    return found


def _next_number(search: Search, made: Outcome, number: int, most: int) -> int:
    """The number of micro-batches to try after this one, with which the fully sharded plan does not fit: the first that
    may be enough, for parts of a batch take at best as much less as they are more."""
    number *= 2
    if isinstance(made.refusal, TooLargeError):
        needed, stored = made.least_bytes, made.refusal.stored_bytes
        while number < most and stored + (needed - stored) / 2 > search.limit_bytes:
            number, needed = 2 * number, stored + (needed - stored) / 2
    return number


def _all_that_can_be(search: Search, found: Found) -> Recomputation | None:
    if search.options.remat == "none" or search.program.micro_batches > 1:  # what is, is told from the whole batch
        return None
    ladder = recomputations(found.decisions, found.chain, found.cost.step_s, found.memory.peak_bytes, PRICES[-1:])
    return ladder[-1] if ladder else None
