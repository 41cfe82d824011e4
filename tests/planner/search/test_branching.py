"""Branches where prices of memory leave a gap: their parts, their bounds, and the plans that are found in them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest

from shardwright.options.plan_options import PlanOptions
from shardwright.planner.clock import OutOfTimeError
from shardwright.planner.constraints.forced import ForcedStrategy
from shardwright.planner.graph.dataflow import Leaf
from shardwright.planner.limits import SearchLimits
from shardwright.planner.memory.constraint import BranchingBound, MemoryConstraint
from shardwright.planner.memory.ilp_with_memory_rows import solve_with_memory_rows
from shardwright.planner.memory.lagrangian import LagrangianSearch, fit_plan
from shardwright.planner.memory.terms import value_bytes
from shardwright.planner.plans.assemble import decide
from shardwright.planner.search.branching import (
    Branch,
    bound_branch,
    branch_and_bound,
    bytes_taken,
    split_branch,
    tighten_branch,
    with_higher_multiplier,
)
from shardwright.planner.search.certify import BackgroundBound, bound_plan
from shardwright.planner.search.dual_bound import DualCut, LagrangianDual
from shardwright.planner.search.search import Search
from shardwright.planner.search.solutions import CandidatePlan
from shardwright.planner.search.tuning import CUT_GAP
from shardwright.planner.segments.bound import solve_tied
from shardwright.planner.segments.descent import descend, lift_plan
from shardwright.planner.segments.segment_chain import Chain, ChainSolution
from shardwright.planner.segments.variables import Variable
from shardwright.plans.plan import CostSummary
from tests.planner.programs import lower, mlp
from tests.planner.search.test_gap_closing_memory import dual_and_optimum
from tests.planner.segments.test_descent import COARSE, EIGHT, FINE, large_program

#: Gap down to which branches are divided.
MOST_OPEN = 0.01


def root_and_optimum(
    seed: int, limits: SearchLimits = SearchLimits(), kind: type[Search] = Search
) -> tuple[Branch, float]:
    """All plans of a random program, bounded by prices, and the fastest one that fits."""
    root, best_s = _root_and_optimum(seed, kind)
    return with_own_search(root, limits), best_s


@cache
def _root_and_optimum(seed: int, kind: type[Search]) -> tuple[Branch, float]:
    dual, low, best_s = dual_and_optimum(seed, kind=kind)
    return bound_root(dual, low, best_s), best_s


def with_own_search(root: Branch, limits: SearchLimits) -> Branch:
    """The same plans and bounds in a search that nobody else changes."""
    search = copy(root.dual.search)
    assert isinstance(search, Search)
    search.limits = limits
    return replace(root, dual=replace(root.dual, search=search))


def bound_root(dual: LagrangianDual, low: DualCut, likely_s: float) -> Branch:
    """All plans of a dual. low: its cut at no price. likely_s: about the seconds of the best plan."""
    bound_s, high = low.bound_s, None
    for item in dual.maximize(low, dual.evaluate(low.multiplier_for(likely_s))):
        bound_s = max(bound_s, item.bound_s)
        low, high = (item, high) if item.slope > 0 else (low, item)
    return Branch(bound_s=bound_s, dual=dual, low=low, high=high)


def root_of_perceptron(limits: SearchLimits = SearchLimits(), kind: type[Search] = Search) -> Branch:
    """All plans of a perceptron's step that need at most half of what the fastest one does at its peak: branches of it
    can be divided again and again."""
    return with_own_search(_root_of_perceptron(kind), limits)


@cache
def _root_of_perceptron(kind: type[Search]) -> Branch:
    step, arguments, _ = mlp(batch=4096, width=1024, hidden=4096)
    search = kind(lower((step, arguments, ())), EIGHT, PlanOptions())
    chain = search.build_bounding_chain(FINE).untie()
    fastest = solve_tied(chain)
    model, decisions = search.memory_model(chain.graph.variables.shared_layouts), decide(chain.graph, fastest.states)
    peak = model.constraint_at_peak(decisions)
    search.limit_bytes = model.bytes_at(peak, decisions) // 2
    dual = LagrangianDual(search=search, chain=chain, constraints=[peak], solve=solve_tied)
    return bound_root(dual, dual.to_cut(0.0, chain, fastest), 1.2 * fastest.value)


class _OnlyBounds(Search):
    """Branches are bounded, and no plan is looked for in them."""

    def fit_over_all_strategies(
        self, incumbent: CandidatePlan, chain: Chain, assignment: ChainSolution, within: tuple[BranchingBound, ...] = ()
    ) -> CandidatePlan:
        return incumbent


class _RecordsSearches(Search):
    """Plans are looked for in branches as often as is asked, and found at the attempts of these numbers.

    branches: those that were searched, by their bounds on values.
    """

    gains: frozenset[int] = frozenset()

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.branches: list[tuple[BranchingBound, ...]] = []

    def fit_over_all_strategies(
        self, incumbent: CandidatePlan, chain: Chain, assignment: ChainSolution, within: tuple[BranchingBound, ...] = ()
    ) -> CandidatePlan:
        self.branches = [*self.branches, within]
        return replace(incumbent) if len(self.branches) in self.gains else incumbent


def incumbent_of(root: Branch, step_s: float) -> tuple[Search, CandidatePlan]:
    """A plan that takes so long, with the bound of all plans."""
    search = root.dual.search
    assert isinstance(search, Search)
    cost = CostSummary(compute_s=step_s, communication_s=0.0, lower_bound_s=root.bound_s, bound_scope="all plans")
    return search, replace(search.evaluate(root.low.chain, root.low.solution, ()), cost=cost)


@pytest.mark.dear
@pytest.mark.parametrize("seed", [0, 6, 11, 13, 16])
def test_branches_bound_nearly_what_the_fastest_plan_that_fits_takes(seed: int) -> None:
    """Prices alone leave more open; no branch is bounded by more than the best plan of all."""
    root, best_s = root_and_optimum(seed, kind=_OnlyBounds)
    candidate = branch_and_bound(*incumbent_of(root, 1.5 * best_s), root, MOST_OPEN)
    assert root.bound_s < best_s * (1 - MOST_OPEN)
    assert best_s * (1 - MOST_OPEN) <= candidate.cost.lower_bound_s <= best_s * (1 + 1e-6)


@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.dear), 13])
def test_the_two_parts_of_a_branch_hold_all_of_its_plans(seed: int) -> None:
    """The plan that takes too much is in the first, the one that has room in the second; at any price the cheapest
    plan of all is the cheapest of one of them, and each keeps to its range."""
    root, _ = root_and_optimum(seed)
    assert root.high is not None
    (first,), (second,) = split_branch(root)
    assert first.lower_bytes == second.upper_bytes
    assert first.leaf == second.leaf
    assert bytes_taken(root.low, first.leaf) > first.lower_bytes >= bytes_taken(root.high, first.leaf)
    for price in (root.low.multiplier, root.high.multiplier):
        parts = [replace(root.dual, branching_bounds=(part,)).evaluate(price) for part in (first, second)]
        assert min(part.lagrangian_s for part in parts) == pytest.approx(
            root.dual.evaluate(price).lagrangian_s, rel=1e-3
        )
        assert bytes_taken(parts[0], first.leaf) > first.lower_bytes >= bytes_taken(parts[1], first.leaf)


def test_the_value_that_divides_is_the_one_that_differs_most() -> None:
    root, _ = root_and_optimum(13)
    assert root.high is not None
    (peak,), high = root.dual.constraints, root.high
    decided = [leaf for leaf in peak.values if (leaf[0], -1) in root.low.solution.states]
    differs = {
        leaf: peak.value_weight(leaf) * (bytes_taken(root.low, leaf) - bytes_taken(high, leaf)) for leaf in decided
    }
    assert differs[split_branch(root)[0][0].leaf] == max(differs.values()) > 0


def test_what_differs_in_no_value_is_not_divided() -> None:
    root, best_s = root_and_optimum(13)
    alike = replace(root, high=root.low)
    assert split_branch(alike) == split_branch(replace(root, high=None)) == ()
    assert branch_and_bound(*incumbent_of(root, 2 * best_s), alike, MOST_OPEN).cost.lower_bound_s == root.bound_s


@pytest.mark.dear
def test_what_differs_in_copies_alone_is_divided_by_what_a_dearer_price_changes() -> None:
    """Two plans that are alike in all values: the second one gives way to that of twice its price."""
    root, best_s = root_and_optimum(16, SearchLimits(max_branched=1), _OnlyBounds)
    alike = replace(root, high=root.low)
    assert split_branch(alike) == ()
    dearer = with_higher_multiplier(alike)
    assert dearer.high is not None
    assert dearer.high.multiplier == 2 * root.low.multiplier > 0
    candidate = branch_and_bound(*incumbent_of(root, 2 * best_s), alike, MOST_OPEN)
    bound_s = min(bound_branch(dearer, within, math.inf).bound_s for within in split_branch(dearer))
    assert root.bound_s < candidate.cost.lower_bound_s == pytest.approx(bound_s, rel=1e-4)


@pytest.mark.parametrize("most", [1, 2, 3])
def test_the_branch_that_bounds_least_is_divided_next_and_only_so_many_are(most: int) -> None:
    root = root_of_perceptron(SearchLimits(max_branched=most), _OnlyBounds)
    candidate = branch_and_bound(*incumbent_of(root, 100 * root.bound_s), root, 0.0)
    branches = [root]
    for _ in range(most):
        least = min(branches, key=lambda branch: branch.bound_s)
        branches.remove(least)
        branches += [bound_branch(least, within, math.inf) for within in split_branch(least)]
    assert len(branches) == most + 1
    assert candidate.cost.lower_bound_s == min(branch.bound_s for branch in branches) > root.bound_s


def test_a_branch_that_can_have_nothing_better_is_not_searched() -> None:
    root, _ = root_and_optimum(13, kind=_RecordsSearches)
    bounds_s = {within: bound_branch(root, within, math.inf).bound_s for within in split_branch(root)}
    assert min(bounds_s.values()) < max(bounds_s.values()) * (1 - MOST_OPEN)
    search, result = incumbent_of(root, max(bounds_s.values()))
    branch_and_bound(search, result, root, MOST_OPEN)
    assert isinstance(search, _RecordsSearches)
    assert search.branches == [min(bounds_s, key=bounds_s.__getitem__)]


def test_plans_are_looked_for_until_three_branches_in_a_row_have_none() -> None:
    root = root_of_perceptron(kind=_RecordsSearches)
    search, result = incumbent_of(root, 1e6 * root.bound_s)
    assert isinstance(search, _RecordsSearches)
    search.gains = frozenset({2})
    branch_and_bound(search, result, root, 0.0)
    assert len(search.branches) == 5, "one in vain, one not, and three in vain"
    assert search.limits.max_branched > 2, "more could be divided"


def test_a_bound_that_is_nearly_enough_is_made_finer() -> None:
    """Once; one that is far from it is not, nor one that is enough."""
    root, _ = root_and_optimum(13)
    rough = replace(root, bound_s=root.bound_s * (1 - CUT_GAP / 2))
    result = tighten_branch(rough, root.bound_s)
    assert result.bound_s == pytest.approx(root.bound_s)
    assert tighten_branch(result, 1.0001 * result.bound_s) is result
    assert tighten_branch(rough, root.bound_s * (1 + CUT_GAP)) is rough
    assert tighten_branch(rough, rough.bound_s) is rough


def with_less_memory(
    seed: int, eight: int, limits: SearchLimits = SearchLimits(), kind: type[Search] = Search
) -> tuple[Search, CandidatePlan]:
    """A random program's plan descended to on three axes, on devices with three quarters of what it needs."""
    options = PlanOptions(remat="none", micro_batches=1)
    search = kind(large_program(seed, eight), EIGHT, options, limits=limits)
    coarse = search.build_chain(COARSE, ForcedStrategy(), frozenset())
    start = search.to_mesh_solution(coarse, coarse.solve(20.0), ())
    at, axes = lift_plan(coarse, start.solution.states, FINE)
    near, solved = descend(coarse, at, search.refine_graph(coarse, FINE), axes, time_limit_s=20.0)
    result = replace(search.evaluate(near, solved, ()), coarse_solution=start)
    search.limit_bytes = search.bytes_needed(result) * 3 // 4
    return search, result


def best_that_fits_s(search: Search, fastest: CandidatePlan) -> float:
    """Seconds a step of the best plan that fits on three axes, by integer programs over all strategies. fastest: the
    plan that memory is short for."""
    fine = search.build_chain(FINE, ForcedStrategy(), frozenset())
    model = search.memory_model(fine.graph.variables.shared_layouts)

    def judge(states: Mapping[Variable, int]) -> tuple[int, MemoryConstraint]:
        candidate = search.evaluate(fine, ChainSolution(states=dict(states), value=0.0, tied_bound=0.0), ())
        return search.bytes_needed(candidate), model.constraint_at_peak(candidate.decisions)

    best = solve_with_memory_rows(fine, search.limit_bytes, [model.constraint_at_peak(fastest.decisions)], judge, 20.0)
    assert best is not None
    return search.evaluate(fine, best, ()).cost.step_s


def test_prices_are_tried_in_a_branch_alone() -> None:
    """A value takes as much as the branch says at a price at which it takes less without."""
    search, start = with_less_memory(29, 2048)
    price = 32 * start.cost.step_s / start.memory.peak_bytes

    def at_price(within: tuple[BranchingBound, ...]) -> CandidatePlan:
        fitting = LagrangianSearch(search, start, math.inf, within)
        fitting._add_constraint(start)
        return fitting._evaluate(price).candidate

    def made(candidate: CandidatePlan, leaf: Leaf) -> float:
        return float(value_bytes(candidate.chain.graph, leaf)[candidate.solution.states[leaf[0], -1]])

    free = at_price(())
    leaves = [(node, 0) for node, leaf in start.solution.states if leaf < 0]
    saving = next(leaf for leaf in leaves if made(free, leaf) < made(start, leaf))
    halfway = (made(free, saving) + made(start, saving)) / 2
    assert made(at_price((BranchingBound(saving, lower_bytes=halfway, upper_bytes=math.inf),)), saving) > halfway


@pytest.mark.parametrize("eight", [2048, 2047])
def test_a_plan_that_prices_step_past_is_found_in_a_branch(eight: int) -> None:
    """Nearly the best one that fits, by integer programs over all strategies on three axes."""
    search, fastest = with_less_memory(29, eight, SearchLimits(max_exact_states=0))
    best_s = best_that_fits_s(search, fastest)
    priced = fit_plan(search, fastest)
    result = bound_plan(search, priced, BackgroundBound())
    assert priced.cost.step_s > 1.5 * best_s
    assert result.cost.step_s <= 1.01 * best_s
    assert search.bytes_needed(result) <= search.limit_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _LateInDepth(LagrangianDual):
    """The deadline comes once a branch of a branch is bounded."""

    def evaluate(self, price: float, near: DualCut | None = None, close: float = CUT_GAP) -> DualCut:
        if len(self.branching_bounds) > 1:
            raise OutOfTimeError("in the middle")
        return LagrangianDual.evaluate(self, price, near, close)


def test_a_deadline_leaves_the_bound_of_the_branches_that_are_done() -> None:
    root = root_of_perceptron(kind=_OnlyBounds)
    search, result = incumbent_of(root, 100 * root.bound_s)
    done = [bound_branch(root, within, math.inf) for within in split_branch(root)]
    dual = root.dual
    late = _LateInDepth(search=search, chain=dual.chain, constraints=dual.constraints, solve=dual.solve)
    with pytest.raises(OutOfTimeError):
        branch_and_bound(search, result, replace(root, dual=late), 0.0)
    assert search.reported_plan is not None
    assert search.reported_plan.cost.lower_bound_s == min(branch.bound_s for branch in done) > root.bound_s


class _LateWhenMerging(LagrangianSearch):
    def merge_plans(self, plans: Sequence[CandidatePlan], best: CandidatePlan) -> CandidatePlan:
        raise OutOfTimeError("in the middle")


def test_a_deadline_between_prices_leaves_the_fastest_plan_that_fits() -> None:
    search, result = with_less_memory(29, 2048, SearchLimits(max_exact_states=0))
    fitting = _LateWhenMerging(search, result, math.inf)
    candidate = fitting.find_best()
    fits = [each.candidate for each in fitting.evaluations if search.bytes_needed(each.candidate) <= search.limit_bytes]
    assert candidate.cost.step_s == min(each.cost.step_s for each in fits)
