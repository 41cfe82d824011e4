"""Where memory binds: the program computes some values again, if that makes a faster plan that fits, or any at all.

The search plans the program as it is first. Where the fastest plan is over the budget, the choices that `recompute`
offers form a ladder of less memory for more time. A bisection finds the first rung whose fastest plan fits as it is:
higher ones only take longer. From there it goes down, each rung fitted by a price of memory (`fitting`), as long
as that gives a faster plan; the bound that comes with every price ends that soon where it does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardwright.planner.recompute import Recomputation, recomputations

if TYPE_CHECKING:
    from shardwright.planner.search import Outcome, Search

#: Part of the step time that a choice must save over one tried before it.
LEAST_GAIN = 1e-3


def relieved(outcome: Outcome) -> Outcome:
    """`outcome` with the fastest plan that fits, or that of the program computing values again, where it is faster
    under the budget."""
    search = outcome.search
    remat = search.options.remat
    if remat == "none" or (remat == "auto" and search.fit(outcome, at_once=True)):
        search.fit(outcome)
        return outcome
    fastest = min(outcome.tried, key=lambda each: each.step_s)
    plan = search.found(fastest.chain, fastest.solved, fastest.notes)
    ladder = recomputations(plan.decisions, fastest.chain, plan.cost.step_s, plan.memory.peak_bytes)
    if remat == "full" and ladder:
        outcome = _computing_again(search, ladder[-1])
    if remat == "full" or not ladder:
        outcome.search.fit(outcome)
        return outcome
    return _best_rung(outcome, ladder)


def _best_rung(outcome: Outcome, ladder: Sequence[Recomputation]) -> Outcome:
    """The fastest of the outcomes that fit, or the one that needs least."""
    search = outcome.search
    tried = {-1: outcome}

    def at(rung: int) -> Outcome:
        if rung not in tried:
            tried[rung] = _computing_again(search, ladder[rung])
        return tried[rung]

    low, high = 0, len(ladder)  # the first rung whose fastest plan fits as it is
    while low < high and not search.is_late():
        middle = (low + high) // 2
        if at(middle).search.fit(at(middle), at_once=True):
            high = middle
        else:
            low = middle + 1
    best = at(min(low, len(ladder) - 1))
    if best.found is None and not best.search.fit(best):
        return best
    for rung in reversed(range(-1, min(low, len(ladder) - 1))):  # less computed again, and memory at a price instead
        below_s = best.step_s * (1 - LEAST_GAIN)
        if search.is_late() or not at(rung).search.fit(at(rung), below_s=below_s):
            break
        best = at(rung)
    best.others = [candidate for each in tried.values() if each is not best for candidate in each.summary()]
    return best


def _computing_again(search: Search, choice: Recomputation) -> Outcome:
    """What the search makes of the program with a choice of values computed again."""
    search.report("rematerialize", f"{len(choice.instructions)} values, {choice.saved_bytes / 2**20:.0f} MiB")
    return search.of(search.program.computing(choice, search.program.micro_batches), choice).outcome()
