"""Branch and bound on the remaining duality gap: one value's size at a time.

The Lagrangian bound interpolates between an over-budget plan and one with slack (`dual_bound`). When one value accounts
for most of their difference in bytes, no plan may lie near that line, and the multiplier search skips plans with
savings elsewhere. Branching then splits on that value: above the midpoint of its two sizes, or below. Within a branch
the two plans are closer together. Each branch gets its own multipliers and bound; the minimum over all branches bounds
every feasible plan. A branch within the target gap is pruned; the others are searched with multipliers restricted to
the branch (`lagrangian`). Next comes the open branch with the least bound (Land and Doig, "An automatic method of
solving discrete programming problems", 1960).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardwright.planner.graph.dataflow import Leaf
from shardwright.planner.memory.constraint import BranchingBound
from shardwright.planner.memory.terms import value_bytes
from shardwright.planner.search.dual_bound import DualCut, LagrangianDual, LowerBound
from shardwright.planner.search.mesh_search import MeshSearch
from shardwright.planner.search.solutions import CandidatePlan
from shardwright.planner.search.tuning import BRANCH_MULTIPLIER_GROWTH, CUT_GAP, FINE_CUT_GAP, MAX_FAILED_SEARCHES

if TYPE_CHECKING:
    from shardwright.planner.search.search import Search


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """Plans with values restricted to size ranges (`LagrangianDual.branching_bounds`).

    bound_s: lower bound on its feasible plans, seconds.
    dual: the Lagrangian dual of these plans.
    low: cut of the multiplier with an over-budget plan.
    high: cut of the multiplier with slack; None without such a multiplier.
    is_tight: whether both were solved to the fine tolerance.
    """

    bound_s: float
    dual: LagrangianDual
    low: DualCut
    high: DualCut | None
    is_tight: bool = False


def branch_and_bound(search: Search, incumbent: CandidatePlan, root: Branch, most_open: float) -> CandidatePlan:
    """The plan that fits, or a faster one, with the bound of the branches.

    root: the branch of all plans.
    most_open: target optimality gap.
    """
    assert not root.dual.chain.runs, "what one repeat takes is no branch of what all of them take"
    branches = [tighten_branch(root, incumbent.cost.step_s * (1 - most_open))]
    incumbent = _raise_bound(search, incumbent, branches)
    in_vain = 0
    for _ in range(search.limits.max_branched):
        widest = min(branches, key=lambda branch: branch.bound_s)
        if _is_pruned(incumbent, widest.bound_s, most_open) or search.must_stop():
            break
        parted, ranges = widest, split_branch(widest)
        if not ranges:
            parted = with_higher_multiplier(widest)
            ranges = split_branch(parted)
        if not ranges:
            break
        branches.remove(widest)
        for within in ranges:
            branch = bound_branch(parted, within, incumbent.cost.step_s * (1 - most_open))
            branches.append(branch)
            if not _is_pruned(incumbent, branch.bound_s, most_open) and in_vain < MAX_FAILED_SEARCHES:
                plan = search.fit_over_all_strategies(incumbent, branch.low.chain, branch.low.solution, within)
                in_vain = 0 if plan is not incumbent else in_vain + 1
                incumbent = plan
        branches = [tighten_branch(branch, incumbent.cost.step_s * (1 - most_open)) for branch in branches]
        incumbent = _raise_bound(search, incumbent, branches)
    return incumbent


def _raise_bound(search: MeshSearch, incumbent: CandidatePlan, branches: Sequence[Branch]) -> CandidatePlan:
    """The plan with the minimum bound of exhaustive branches, when that is higher."""
    least = min(branches, key=lambda branch: branch.bound_s)
    if least.bound_s <= incumbent.cost.lower_bound_s:
        return incumbent
    incumbent = replace(incumbent, cost=LowerBound(least.bound_s, least.low.chain).apply_to(incumbent.cost))
    search.report_plan(incumbent)
    return incumbent


def _is_pruned(incumbent: CandidatePlan, bound_s: float, most_open: float) -> bool:
    """Whether the bound leaves the branch no plan faster by more than the target gap."""
    return bound_s >= incumbent.cost.step_s * (1 - most_open)


def tighten_branch(branch: Branch, enough_s: float) -> Branch:
    """The branch with a finer bound when its own nearly suffices: multiplier search and solver tolerances leave some
    slack."""
    if branch.is_tight or not branch.bound_s < enough_s <= branch.bound_s * (1 + CUT_GAP):
        return branch
    low, high = (cut and branch.dual.evaluate(cut.multiplier, cut, FINE_CUT_GAP) for cut in (branch.low, branch.high))
    assert low is not None, "every branch has a plan that is its cheapest"
    bound_s = max(branch.bound_s, low.bound_s)
    for cut in branch.dual.maximize(low, high, bound_s, FINE_CUT_GAP) if high is not None else ():
        bound_s = max(bound_s, cut.bound_s)
        if bound_s >= enough_s:
            break
    return replace(branch, bound_s=bound_s, is_tight=True)


def split_branch(branch: Branch) -> tuple[tuple[BranchingBound, ...], ...]:
    """Size ranges of the two sub-branches: the branch's own, plus the most different value above or below the midpoint;
    none when the two plans agree."""
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
    """The branch with a higher second multiplier: two nearby plans may differ in copies alone, and branching does not
    split on copies."""
    if branch.high is None:
        return branch
    return replace(branch, high=branch.dual.evaluate(BRANCH_MULTIPLIER_GROWTH * branch.high.multiplier, branch.high))


def bytes_taken(tangent: DualCut, leaf: Leaf) -> float:
    """Bytes of a value in its producer's layout, in the plan of a cut."""
    return float(value_bytes(tangent.chain.graph, leaf)[tangent.solution.states[leaf[0], -1]])


def bound_branch(parent: Branch, within: tuple[BranchingBound, ...], enough_s: float) -> Branch:
    """The sub-branch with the bound of its own multipliers, maximized up to `enough_s`."""
    dual, bound_s = replace(parent.dual, branching_bounds=within), parent.bound_s
    assert parent.high is not None, "what has no two plans is not divided"

    def keeps(tangent: DualCut) -> bool:
        return all(bound.lower_bytes < bytes_taken(tangent, bound.leaf) <= bound.upper_bytes for bound in within)

    low = parent.low if keeps(parent.low) else dual.evaluate(parent.low.multiplier, parent.low)
    high = parent.high if low.slope > 0 and keeps(parent.high) else None
    if low.slope <= 0:  # the lower multiplier already leaves slack
        low, high = dual.evaluate(0.0, low), low
    bound_s = max(bound_s, low.bound_s)
    if low.slope <= 0:
        return Branch(bound_s=bound_s, dual=dual, low=low, high=None)
    first_cut = high or dual.evaluate(parent.high.multiplier, parent.high)
    for cut in dual.maximize(low, first_cut, bound_s):
        bound_s = max(bound_s, cut.bound_s)
        low, high = (cut, high) if cut.slope > 0 else (low, cut)
        if bound_s >= enough_s:
            break
    return Branch(bound_s=bound_s, dual=dual, low=low, high=high)
