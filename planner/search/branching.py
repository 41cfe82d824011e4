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
from shardwright.planner.memory.constraint import BranchingBound
from shardwright.planner.memory.terms import value_bytes
from shardwright.planner.search.dual_bound import FINE_GAP_TOLERANCE, GAP_TOLERANCE, DualCut, LagrangianDual, LowerBound
from shardwright.planner.search.mesh_search import MeshSearch
from shardwright.planner.search.primal_recovery import fit_over_all_strategies
from shardwright.planner.search.solutions import CandidatePlan

#: Branches that are divided in two, at most.
MAX_BRANCHED = 4

#: How much dearer memory is for a plan that differs in what it is made of, where the one at the price that bounds most
#: does not.
_MULTIPLIER_GROWTH = 2.0

#: Branches in which a plan is looked for in vain, one after the other, before all others are only bounded.
MAX_FAILED_SEARCHES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """Plans whose values keep to ranges of sizes (`LagrangianDual.within`).

    bound_s: those of them that fit take at least so long. low, high: what two prices of memory give, of which the first
    takes more than there is and the second has room; None where no price gives one that has. is_tight: whether
    these were solved finely.
    """

    bound_s: float
    dual: LagrangianDual
    low: DualCut
    high: DualCut | None
    is_tight: bool = False


def branch_and_bound(search: MeshSearch, found: CandidatePlan, root: Branch, most_open: float) -> CandidatePlan:
    """A plan that fits, or a faster one that does, with the bound that branches give.

    root: all plans. most_open: the gap that a plan may have.
    """
    assert not root.dual.chain.runs, "what one repeat takes is no branch of what all of them take"
    branches = [tighten_branch(root, found.cost.step_s * (1 - most_open))]
    found = _raise_bound(search, found, branches)
    in_vain = 0
    for _ in range(MAX_BRANCHED):
        widest = min(branches, key=lambda branch: branch.bound_s)
        if _is_pruned(found, widest.bound_s, most_open) or search.must_stop():
            break
        parted, ranges = widest, split_branch(widest)
        if not ranges:
            parted = with_higher_multiplier(widest)
            ranges = split_branch(parted)
        if not ranges:
            break
        branches.remove(widest)
        for within in ranges:
            branch = bound_branch(parted, within, found.cost.step_s * (1 - most_open))
            branches.append(branch)
            if not _is_pruned(found, branch.bound_s, most_open) and in_vain < MAX_FAILED_SEARCHES:
                made = _search_branch(search, found, branch)
                in_vain = 0 if made is not found else in_vain + 1
                found = made
        branches = [tighten_branch(branch, found.cost.step_s * (1 - most_open)) for branch in branches]
        found = _raise_bound(search, found, branches)
    return found


def _raise_bound(search: MeshSearch, found: CandidatePlan, branches: Sequence[Branch]) -> CandidatePlan:
    """A plan with the bound of branches that hold all plans, if that is a better one."""
    least = min(branches, key=lambda branch: branch.bound_s)
    if least.bound_s <= found.cost.lower_bound_s:
        return found
    found = replace(found, cost=LowerBound(least.bound_s, least.low.chain).apply_to(found.cost))
    search.report_plan(found)
    return found


def _is_pruned(found: CandidatePlan, bound_s: float, most_open: float) -> bool:
    """Whether a branch with that bound has no plan that is faster by more than may be left open."""
    return bound_s >= found.cost.step_s * (1 - most_open)


def tighten_branch(branch: Branch, enough_s: float) -> Branch:
    """A branch with a finer bound, if its own is nearly enough: as prices are looked for, and solved, some of it is
    left open."""
    if branch.is_tight or not branch.bound_s < enough_s <= branch.bound_s * (1 + GAP_TOLERANCE):
        return branch
    low, high = (
        each and branch.dual.evaluate(each.multiplier, each, FINE_GAP_TOLERANCE) for each in (branch.low, branch.high)
    )
    assert low is not None, "every branch has a plan that is its cheapest"
    bound_s = max(branch.bound_s, low.bound_s)
    for made in branch.dual.maximize(low, high, bound_s, FINE_GAP_TOLERANCE) if high is not None else ():
        bound_s = max(bound_s, made.bound_s)
        if bound_s >= enough_s:
            break
    return replace(branch, bound_s=bound_s, is_tight=True)


def split_branch(branch: Branch) -> tuple[tuple[BranchingBound, ...], ...]:
    """The ranges of the two parts of a branch: its own, and that the value by which its two plans differ most takes
    more than halfway between, or less; none where they are alike."""
    low, high, within = branch.low, branch.high, branch.dual.branching_bounds
    if high is None:
        return ()
    saved = dict[Leaf, float]()
    for peak in branch.dual.constraints:
        for leaf in sorted(peak.values):
            if (leaf[0], -1) in low.solution.states:
                saved[leaf] = peak.value_weight(leaf) * (bytes_taken(low, leaf) - bytes_taken(high, leaf))
    decisive = max(saved, key=saved.__getitem__, default=None)
    if decisive is None or saved[decisive] <= 0:
        return ()
    halfway = (bytes_taken(low, decisive) + bytes_taken(high, decisive)) / 2
    more = BranchingBound(decisive, lower_bytes=halfway, upper_bytes=math.inf)
    less = BranchingBound(decisive, lower_bytes=-1.0, upper_bytes=halfway)
    return (*within, more), (*within, less)


def with_higher_multiplier(branch: Branch) -> Branch:
    """A branch with a dearer price for the second one: near each other two plans may differ in copies alone, which
    nothing is divided by."""
    if branch.high is None:
        return branch
    return replace(branch, high=branch.dual.evaluate(_MULTIPLIER_GROWTH * branch.high.multiplier, branch.high))


def bytes_taken(tangent: DualCut, leaf: Leaf) -> float:
    """Bytes of a value as it is made in the plan of a tangent."""
    return float(value_bytes(tangent.chain.graph, leaf)[tangent.solution.states[leaf[0], -1]])


def bound_branch(parent: Branch, within: tuple[BranchingBound, ...], enough_s: float) -> Branch:
    """A part of a branch with the bound that prices of its own give, or one that is enough."""
    dual, bound_s = replace(parent.dual, branching_bounds=within), parent.bound_s
    assert parent.high is not None, "what has no two plans is not divided"

    def keeps(tangent: DualCut) -> bool:
        return all(each.lower_bytes < bytes_taken(tangent, each.leaf) <= each.upper_bytes for each in within)

    low = parent.low if keeps(parent.low) else dual.evaluate(parent.low.multiplier, parent.low)
    high = parent.high if low.slope > 0 and keeps(parent.high) else None
    if low.slope <= 0:  # the cheaper price leaves room already
        low, high = dual.evaluate(0.0, low), low
    bound_s = max(bound_s, low.bound_s)
    if low.slope <= 0:
        return Branch(bound_s=bound_s, dual=dual, low=low, high=None)
    begun = high or dual.evaluate(parent.high.multiplier, parent.high)
    for made in dual.maximize(low, begun, bound_s):
        bound_s = max(bound_s, made.bound_s)
        low, high = (made, high) if made.slope > 0 else (low, made)
        if bound_s >= enough_s:
            break
    return Branch(bound_s=bound_s, dual=dual, low=low, high=high)


def _search_branch(search: MeshSearch, found: CandidatePlan, branch: Branch) -> CandidatePlan:
    """The cheapest plan of a branch, or one of the branch that fits, if that is faster than one that is known."""
    return fit_over_all_strategies(search, found, branch.low.chain, branch.low.solution, branch.dual.branching_bounds)
