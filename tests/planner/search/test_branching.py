"""Branches where prices of memory leave a gap: their parts, their bounds, and the plans that are found in them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

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
from shardwright.planner.search import branching
from shardwright.planner.search.branching import Branch, branch_and_bound, bytes_taken, split_branch, tighten_branch
from shardwright.planner.search.certify import BackgroundBound, bound_plan
from shardwright.planner.search.dual_bound import GAP_TOLERANCE, DualCut, LagrangianDual
from shardwright.planner.search.mesh_search import MeshSearch
from shardwright.planner.search.search import Search
from shardwright.planner.search.solutions import CandidatePlan
from shardwright.planner.segments.descent import descend, lift_plan
from shardwright.planner.segments.segment_chain import ChainSolution
from shardwright.planner.segments.variables import Variable
from shardwright.plans.plan import CostSummary
from tests.planner.search.test_gap_closing_memory import dual_and_optimum
from tests.planner.segments.test_descent import COARSE, EIGHT, FINE, large_program

#: Gap down to which branches are divided.
MOST_OPEN = 0.01


def root_and_optimum(seed: int, limits: SearchLimits = SearchLimits()) -> tuple[Branch, float]:
    """All plans of a random program, bounded by prices, and the fastest one that fits."""
    dual, low, best_s = dual_and_optimum(seed, limits)
    bound_s, high = low.bound_s, None
    for made in dual.maximize(low, dual.evaluate(low.multiplier_for(best_s))):
        bound_s = max(bound_s, made.bound_s)
        low, high = (made, high) if made.slope > 0 else (low, made)
    return Branch(bound_s=bound_s, dual=dual, low=low, high=high), best_s


def known(root: Branch, step_s: float) -> tuple[MeshSearch, CandidatePlan]:
    """A plan that takes so long, with the bound of all plans."""
    search = root.dual.search
    cost = CostSummary(compute_s=step_s, communication_s=0.0, lower_bound_s=root.bound_s, bound_scope="all plans")
    return search, replace(search.evaluate(root.low.chain, root.low.solution, ()), cost=cost)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 6, 11, 13, 16])
def test_branches_bound_nearly_what_the_fastest_plan_that_fits_takes(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prices alone leave more open; no branch is bounded by more than the best plan of all."""
    monkeypatch.setattr(branching, "_search_branch", lambda search, found, branch: found)
    root, best_s = root_and_optimum(seed)
    made = branch_and_bound(*known(root, 1.5 * best_s), root, MOST_OPEN)
    assert root.bound_s < best_s * (1 - MOST_OPEN)
    assert best_s * (1 - MOST_OPEN) <= made.cost.lower_bound_s <= best_s * (1 + 1e-6)


@pytest.mark.parametrize("seed", [0, 13])
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
    assert branch_and_bound(*known(root, 2 * best_s), alike, MOST_OPEN).cost.lower_bound_s == root.bound_s


def test_what_differs_in_copies_alone_is_divided_by_what_a_dearer_price_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = list[float]()

    def noted(self: LagrangianDual, price: float, near: DualCut) -> DualCut:
        asked.append(price / near.multiplier)
        assert root.high is not None
        return root.high

    root, best_s = root_and_optimum(13, SearchLimits(max_branched=1))
    monkeypatch.setattr(LagrangianDual, "evaluate", noted)
    monkeypatch.setattr(branching, "_search_branch", lambda search, found, branch: found)
    monkeypatch.setattr(branching, "bound_branch", lambda parent, within, enough_s: replace(parent, bound_s=best_s))
    low = root.low._replace(multiplier=1.0)
    alike = replace(root, low=low, high=low)
    assert split_branch(alike) == ()
    assert branch_and_bound(*known(root, 2 * best_s), alike, MOST_OPEN).cost.lower_bound_s == best_s
    assert asked == [2.0]


def test_the_branch_that_bounds_least_is_divided_next_and_only_so_many_are(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[Branch]()
    bound = branching.bound_branch

    def noted(parent: Branch, within: tuple[BranchingBound, ...], enough_s: float) -> Branch:
        asked.append(parent)
        made = bound(parent, within, enough_s)
        return replace(made, high=made.high or parent.high)

    monkeypatch.setattr(branching, "bound_branch", noted)
    monkeypatch.setattr(branching, "_search_branch", lambda search, found, branch: found)
    root, best_s = root_and_optimum(13, SearchLimits(max_branched=2))
    branch_and_bound(*known(root, 100 * best_s), root, 0.0)
    assert len(asked) == 4
    assert asked[0] is asked[1] is root
    assert asked[2] is asked[3]
    assert asked[2].bound_s == min(bound(root, within, math.inf).bound_s for within in split_branch(root))


def test_a_branch_that_can_have_nothing_better_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = list[float]()

    def noted(search: MeshSearch, found: CandidatePlan, branch: Branch) -> CandidatePlan:
        searched.append(branch.bound_s)
        return found

    monkeypatch.setattr(branching, "_search_branch", noted)
    root, _ = root_and_optimum(13)
    bounds_s = [branching.bound_branch(root, within, math.inf).bound_s for within in split_branch(root)]
    assert min(bounds_s) < max(bounds_s) * (1 - MOST_OPEN)
    branch_and_bound(*known(root, max(bounds_s)), root, MOST_OPEN)
    assert searched == [min(bounds_s)]


def test_plans_are_looked_for_until_three_branches_in_a_row_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = list[bool]()

    def noted(search: MeshSearch, found: CandidatePlan, branch: Branch) -> CandidatePlan:
        searched.append(gains := len(searched) == 1)
        return replace(found) if gains else found

    monkeypatch.setattr(branching, "_search_branch", noted)
    monkeypatch.setattr(branching, "bound_branch", lambda parent, within, enough_s: parent)
    root, best_s = root_and_optimum(13)
    branch_and_bound(*known(root, 100 * best_s), root, 0.0)
    assert searched == [False, True, False, False, False]


def test_a_bound_that_is_nearly_enough_is_made_finer() -> None:
    """Once; one that is far from it is not, nor one that is enough."""
    root, _ = root_and_optimum(13)
    rough = replace(root, bound_s=root.bound_s * (1 - GAP_TOLERANCE / 2))
    made = tighten_branch(rough, root.bound_s)
    assert made.bound_s == pytest.approx(root.bound_s)
    assert tighten_branch(made, 1.0001 * made.bound_s) is made
    assert tighten_branch(rough, root.bound_s * (1 + GAP_TOLERANCE)) is rough
    assert tighten_branch(rough, rough.bound_s) is rough


def with_less_memory(seed: int, eight: int, limits: SearchLimits = SearchLimits()) -> tuple[Search, CandidatePlan]:
    """A random program's plan descended to on three axes, on devices with three quarters of what it needs."""
    options = PlanOptions(remat="none", micro_batches=1)
    search = Search(large_program(seed, eight), EIGHT, options, limits=limits)
    coarse = search.build_chain(COARSE, ForcedStrategy(), frozenset())
    start = search.to_mesh_solution(coarse, coarse.solve(20.0), ())
    at, axes = lift_plan(coarse, start.solution.states, FINE)
    near, solved = descend(coarse, at, search.refine_graph(coarse, FINE), axes, time_limit_s=20.0)
    found = replace(search.evaluate(near, solved, ()), coarse_solution=start)
    search.limit_bytes = search.bytes_needed(found) * 3 // 4
    return search, found


def best_that_fits_s(search: Search, fastest: CandidatePlan) -> float:
    """Seconds a step of the best plan that fits on three axes, by integer programs over all strategies. fastest: the
    plan that memory is short for."""
    fine = search.build_chain(FINE, ForcedStrategy(), frozenset())
    model = search.memory_model(fine.graph.variables.shared_layouts)

    def judge(states: Mapping[Variable, int]) -> tuple[int, MemoryConstraint]:
        made = search.evaluate(fine, ChainSolution(states=dict(states), value=0.0, tied_bound=0.0), ())
        return search.bytes_needed(made), model.constraint_at_peak(made.decisions)

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

    def made(found: CandidatePlan, leaf: Leaf) -> float:
        return float(value_bytes(found.chain.graph, leaf)[found.solution.states[leaf[0], -1]])

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
    made = bound_plan(search, priced, BackgroundBound())
    assert priced.cost.step_s > 1.5 * best_s
    assert made.cost.step_s <= 1.01 * best_s
    assert search.bytes_needed(made) <= search.limit_bytes


def test_a_deadline_leaves_the_bound_of_the_branches_that_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    root, best_s = root_and_optimum(13)
    bound, asked = branching.bound_branch, list[Branch]()

    def late_at_the_second_division(parent: Branch, within: tuple[BranchingBound, ...], enough_s: float) -> Branch:
        if len(asked) == 2:
            raise OutOfTimeError("in the middle")
        asked.append(bound(parent, within, enough_s))
        return replace(asked[-1], high=asked[-1].high or parent.high)

    monkeypatch.setattr(branching, "bound_branch", late_at_the_second_division)
    monkeypatch.setattr(branching, "_search_branch", lambda search, found, branch: found)
    search, found = known(root, 100 * best_s)
    with pytest.raises(OutOfTimeError):
        branch_and_bound(search, found, root, 0.0)
    assert search.reported_plan is not None
    assert search.reported_plan.cost.lower_bound_s == min(branch.bound_s for branch in asked) > root.bound_s


def test_a_deadline_between_prices_leaves_the_fastest_plan_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(fitting: LagrangianSearch, over: CandidatePlan, fits: CandidatePlan) -> CandidatePlan:
        raise OutOfTimeError("in the middle")

    search, found = with_less_memory(29, 2048, SearchLimits(max_exact_states=0))
    monkeypatch.setattr(LagrangianSearch, "merge_plans", late)
    fitting = LagrangianSearch(search, found, math.inf)
    made = fitting.find_best()
    fits = [each.candidate for each in fitting.evaluations if search.bytes_needed(each.candidate) <= search.limit_bytes]
    assert made.cost.step_s == min(each.cost.step_s for each in fits)
