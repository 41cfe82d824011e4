"""Branch and bound where prices of memory leave a gap: one value at a time takes much, or little.

A price of memory bounds what fits by the line between a plan that takes too much and one that has room
(`memory_bound`). Where one value takes most of what the two differ by, no plan may be near that line, and the search
at prices steps past those that save elsewhere. So that value decides: plans in which it takes more than halfway between
what it takes in both are one branch, all others the other. In each the two plans that a price weighs are nearer to one
another. Every branch is bounded at prices of its own; all plans that fit are over the least of these bounds. A branch
whose bound leaves too little to gain is closed; in others a plan is looked for, at prices that are tried in the branch
alone (`fitting`). Of the branches that are open the one with the least bound is divided next (Land and Doig, "An
automatic method of solving discrete programming problems", 1960).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwright.planner.graph.dataflow import Leaf
from shardwright.planner.memory.budget import SizeRange
from shardwright.planner.memory.state_bytes import value_bytes
from shardwright.planner.search.found import Found
from shardwright.planner.search.memory_bound import CLOSE, FINE, Bound, Dual, Tangent
from shardwright.planner.search.mesh_search import MeshSearch
from shardwright.planner.search.read_off import fitted_among_all

#: Branches that are divided in two, at most.
MOST_DIVIDED = 4

#: How much dearer memory is for a plan that differs in what it is made of, where the one at the price that bounds most
#: does not.
_DEARER = 2.0

#: Branches in which a plan is looked for in vain, one after the other, before all others are only bounded.
MOST_IN_VAIN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """Plans whose values keep to ranges of sizes (`Dual.within`).

    bound_s: those of them that fit take at least so long. low, high: what two prices of memory give, of which the first
    takes more than there is and the second has room; None where no price gives one that has. is_tight: whether
    these were solved finely.
    """

    bound_s: float
    dual: Dual
    low: Tangent
    high: Tangent | None
    is_tight: bool = False


def branched(search: MeshSearch, found: Found, root: Branch, most_open: float) -> Found:
    """A plan that fits, or a faster one that does, with the bound that branches give.

    root: all plans. most_open: the gap that a plan may have.
    """
    assert not root.dual.chain.runs, "what one repeat takes is no branch of what all of them take"
    branches = [tightened(root, found.cost.step_s * (1 - most_open))]
    found = _with_bound(search, found, branches)
    in_vain = 0
    for _ in range(MOST_DIVIDED):
        widest = min(branches, key=lambda branch: branch.bound_s)
        if _is_closed(found, widest.bound_s, most_open) or search.is_late():
            break
        parted, ranges = widest, divided(widest)
        if not ranges:
            parted = with_dearer(widest)
            ranges = divided(parted)
        if not ranges:
            break
        branches.remove(widest)
        for within in ranges:
            branch = bounded(parted, within, found.cost.step_s * (1 - most_open))
            branches.append(branch)
            if not _is_closed(found, branch.bound_s, most_open) and in_vain < MOST_IN_VAIN:
                made = _searched(search, found, branch)
                in_vain = 0 if made is not found else in_vain + 1
                found = made
        branches = [tightened(branch, found.cost.step_s * (1 - most_open)) for branch in branches]
        found = _with_bound(search, found, branches)
    return found


def _with_bound(search: MeshSearch, found: Found, branches: Sequence[Branch]) -> Found:
    """A plan with the bound of branches that hold all plans, if that is a better one."""
    least = min(branches, key=lambda branch: branch.bound_s)
    if least.bound_s <= found.cost.lower_bound_s:
        return found
    found = replace(found, cost=Bound(least.bound_s, least.low.chain).of(found.cost))
    search.tell_of(found)
    return found


def _is_closed(found: Found, bound_s: float, most_open: float) -> bool:
    """Whether a branch with that bound has no plan that is faster by more than may be left open."""
    return bound_s >= found.cost.step_s * (1 - most_open)


def tightened(branch: Branch, enough_s: float) -> Branch:
    """A branch with a finer bound, if its own is nearly enough: as prices are looked for, and solved, some of it is
    left open."""
    if branch.is_tight or not branch.bound_s < enough_s <= branch.bound_s * (1 + CLOSE):
        return branch
    low, high = (each and branch.dual.at(each.price, each, FINE) for each in (branch.low, branch.high))
    assert low is not None, "every branch has a plan that is its cheapest"
    bound_s = max(branch.bound_s, low.bound_s)
    for made in branch.dual.climb(low, high, bound_s, FINE) if high is not None else ():
        bound_s = max(bound_s, made.bound_s)
        if bound_s >= enough_s:
            break
    return replace(branch, bound_s=bound_s, is_tight=True)


def divided(branch: Branch) -> tuple[tuple[SizeRange, ...], ...]:
    """The ranges of the two parts of a branch: its own, and that the value by which its two plans differ most takes
    more than halfway between, or less; none where they are alike."""
    low, high, within = branch.low, branch.high, branch.dual.within
    if high is None:
        return ()
    saved = dict[Leaf, float]()
    for peak in branch.dual.peaks:
        for leaf in sorted(peak.values):
            if (leaf[0], -1) in low.solved.states:
                saved[leaf] = peak.times_value(leaf) * (taken(low, leaf) - taken(high, leaf))
    decisive = max(saved, key=saved.__getitem__, default=None)
    if decisive is None or saved[decisive] <= 0:
        return ()
    halfway = (taken(low, decisive) + taken(high, decisive)) / 2
    more = SizeRange(decisive, over=halfway, up_to=math.inf)
    less = SizeRange(decisive, over=-1.0, up_to=halfway)
    return (*within, more), (*within, less)


def with_dearer(branch: Branch) -> Branch:
    """A branch with a dearer price for the second one: near each other two plans may differ in copies alone, which
    nothing is divided by."""
    if branch.high is None:
        return branch
    return replace(branch, high=branch.dual.at(_DEARER * branch.high.price, branch.high))


def taken(tangent: Tangent, leaf: Leaf) -> float:
    """Bytes of a value as it is made in the plan of a tangent."""
    return float(value_bytes(tangent.chain.graph, leaf)[tangent.solved.states[leaf[0], -1]])


def bounded(parent: Branch, within: tuple[SizeRange, ...], enough_s: float) -> Branch:
    """A part of a branch with the bound that prices of its own give, or one that is enough."""
    dual, bound_s = replace(parent.dual, within=within), parent.bound_s
    assert parent.high is not None, "what has no two plans is not divided"

    def keeps(tangent: Tangent) -> bool:
        return all(each.over < taken(tangent, each.leaf) <= each.up_to for each in within)

    low = parent.low if keeps(parent.low) else dual.at(parent.low.price, parent.low)
    high = parent.high if low.slope > 0 and keeps(parent.high) else None
    if low.slope <= 0:  # the cheaper price leaves room already
        low, high = dual.at(0.0, low), low
    bound_s = max(bound_s, low.bound_s)
    if low.slope <= 0:
        return Branch(bound_s=bound_s, dual=dual, low=low, high=None)
    begun = high or dual.at(parent.high.price, parent.high)
    for made in dual.climb(low, begun, bound_s):
        bound_s = max(bound_s, made.bound_s)
        low, high = (made, high) if made.slope > 0 else (low, made)
        if bound_s >= enough_s:
            break
    return Branch(bound_s=bound_s, dual=dual, low=low, high=high)


def _searched(search: MeshSearch, found: Found, branch: Branch) -> Found:
    """The cheapest plan of a branch, or one of the branch that fits, if that is faster than one that is known."""
    return fitted_among_all(search, found, branch.low.chain, branch.low.solved, branch.dual.within)
