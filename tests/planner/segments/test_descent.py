"""Plans on three axes, descended from plans on two."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from shardwright.clusters.cluster import Cluster
from shardwright.errors import MemoryBudgetError
from shardwright.options.plan_options import PlanOptions
from shardwright.planner import plan
from shardwright.planner.constraints.forced import ForcedStrategy
from shardwright.planner.costs.prices import Prices
from shardwright.planner.limits import SearchLimits
from shardwright.planner.memory.constraint import MemoryConstraint, Multipliers
from shardwright.planner.memory.ilp_with_memory_rows import solve_with_memory_rows
from shardwright.planner.memory.lagrangian import fit_plan
from shardwright.planner.memory.restricted_master import to_one_chain
from shardwright.planner.search.certify import BackgroundBound, bound_plan
from shardwright.planner.search.dual_bound import bound_feasible_plans
from shardwright.planner.search.search import Search
from shardwright.planner.search.solutions import CandidatePlan
from shardwright.planner.segments.bound import lower_bound
from shardwright.planner.segments.cost_graph import CostGraph
from shardwright.planner.segments.descent import axis_parts, descend, lift_plan
from shardwright.planner.segments.segment_chain import Chain, ChainSolution
from shardwright.planner.segments.variables import Variable
from shardwright.planner.strategies.expansion import Strategy
from shardwright.planner.strategies.strategy_set import StrategyBuilder, StrategySet
from shardwright.planner.tuning import EXACT_RANK
from shardwright.plans.plan import Plan
from shardwright.plans.shardings import Mesh
from tests.planner.clocks import LookCountingClock, just_late
from tests.planner.programs import PLAIN_A100, gpt2, lower, mlp
from tests.planner.test_exact import random_program

EIGHT = replace(Cluster.local(8), hardware=PLAIN_A100)
COARSE = Mesh.of({"data": 4, "model": 2})
FINE = Mesh.of({"data": 2, "model": 2, "sequence": 2})

#: Relative tie-breaks of the search (`strategies.preference.MAX_SHARE`), and the gap at which a round counts as solved.
SLACK = 2e-3


def large_program(seed: int, eight: int = 2048, four: int = 4096, sixteen: int = 1024) -> str:
    """A random program with dimensions of 1024 to 4096, worth splitting over 8 devices. four, eight, sixteen: what the
    ones of so many elements become."""
    size = {"4": str(four), "8": str(eight), "16": str(sixteen)}
    return re.sub(r"\[(\d+),(\d+)\]", lambda shape: f"[{size[shape[1]]},{size[shape[2]]}]", random_program(seed))


@cache
def best_on_fine(seed: int, eight: int = 2048) -> tuple[Search, Chain, ChainSolution]:
    """The search for a random program, all strategies on three axes, and the best plan there."""
    search = Search(large_program(seed, eight), EIGHT, PlanOptions())
    fine = search.build_chain(FINE, ForcedStrategy(), frozenset())
    return search, fine, fine.solve(20.0)


def lift_from(
    coarse: Chain, start: ChainSolution, fine: Chain
) -> tuple[dict[Variable, Strategy], CostGraph, list[str]]:
    at, axes = lift_plan(coarse, start.states, fine.graph.prices.mesh)
    return at, fine.graph, axes


def test_axes_are_split_into_neighbours() -> None:
    assert axis_parts(COARSE, FINE) == {"data": ("data", "model"), "model": ("sequence",)}
    assert axis_parts(Mesh.of({"x": 8}), FINE) == {"x": ("data", "model", "sequence")}


@pytest.mark.parametrize("seed", range(12))
def test_between_the_plan_that_it_starts_from_and_the_best_one(seed: int) -> None:
    """The same plan costs as much on the finer mesh; the best one there is found by searching it outright."""
    search, fine, best = best_on_fine(seed)
    coarse = search.build_chain(COARSE, ForcedStrategy(), frozenset())
    start = coarse.solve(20.0)
    near, result = descend(coarse, *lift_from(coarse, start, fine), time_limit_s=20.0)
    assert best.value <= result.value * (1 + SLACK)
    assert result.value <= start.value * (1 + SLACK)
    chosen = {v: near.graph.set_of(v).strategies[state] for v, state in result.states.items()}
    states = {v: fine.graph.set_of(v).strategies.index(strategy) for v, strategy in chosen.items()}
    nodes = [node.index for node in fine.graph.flow.nodes if not fine.graph.is_cheap_to_recompute[node.index]]
    problem = fine.graph.problem(nodes, list(states))
    assert problem.value(list(states.values())) == pytest.approx(result.value, rel=1e-5)  # preferences differ


@pytest.mark.parametrize("seed", [14, 39, 72, 73, 97, 98, 100, 103, 115])
def test_it_finds_what_two_axes_cannot(seed: int) -> None:
    """Programs whose best plan on three axes beats every one on two: the descent ends there."""
    search, fine, best = best_on_fine(seed)
    coarse = search.build_chain(COARSE, ForcedStrategy(), frozenset())
    start = coarse.solve(20.0)
    _, result = descend(coarse, *lift_from(coarse, start, fine), time_limit_s=20.0)
    assert best.value < start.value * (1 - SLACK)
    assert result.value <= best.value * (1 + SLACK)


class _CountingBuilder(StrategyBuilder):
    """builds: how often strategies of an instruction were enumerated."""

    builds = 0

    def _build(self, *arguments: Any, **named: Any) -> StrategySet:
        self.builds += 1
        return super()._build(*arguments, **named)


class _CountingSearch(Search):
    def strategy_builder(self, prices: Prices) -> StrategyBuilder:
        return _CountingBuilder(prices, pads=self.options.rewrites != "none", rules=self.program.rules)


def test_what_is_left_again_is_made_once() -> None:
    """Descents from one plan, on the graphs of one another, at prices of memory or none, have the same strategies."""
    search = _CountingSearch(large_program(14), EIGHT, PlanOptions())
    coarse = search.build_chain(COARSE, ForcedStrategy(), frozenset())
    start = coarse.solve(20.0)
    at, axes = lift_plan(coarse, start.states, FINE)
    near, solved = descend(coarse, at, search.refine_graph(coarse, FINE), axes, time_limit_s=20.0)
    builder = near.graph.builder
    assert isinstance(builder, _CountingBuilder)
    before = builder.builds
    again, same = descend(coarse, at, near.graph, axes, time_limit_s=20.0, price=Multipliers(constraints=()))
    assert again.strategies(same.states) == near.strategies(solved.states)
    assert again.graph.builder is builder
    assert builder.builds == before > 0
    coarse_only = search.refine_graph(near, COARSE)
    assert coarse_only.neighborhood_cache is not near.graph.neighborhood_cache, "strategies of another mesh"


@pytest.mark.parametrize("seed", range(24))
def test_the_bound_on_three_axes_is_under_the_best_plan_there(seed: int) -> None:
    """The best one is found by searching three axes outright; the bound is not far from it."""
    search, _, best = best_on_fine(seed)
    bound_s = lower_bound(search.build_bounding_chain(FINE), 20.0)
    assert best.value * 0.9 <= bound_s <= best.value


@pytest.mark.parametrize("seed", range(24))
def test_with_uneven_moves_followed_it_is_closer_and_still_under(seed: int) -> None:
    search, _, best = best_on_fine(seed, eight=2047)
    rough_s = lower_bound(search.build_bounding_chain(FINE), 20.0)
    fine_s = lower_bound(search.build_bounding_chain(FINE, even_rank=9, uneven_rank=EXACT_RANK), 20.0)
    assert rough_s * (1 - SLACK) <= fine_s <= best.value


@pytest.mark.parametrize(("seed", "eight"), [(97, 2048), (98, 2048), (14, 2047), (39, 2047), (97, 2047), (100, 2047)])
def test_closing_a_gap_makes_no_plan_worse(seed: int, eight: int) -> None:
    text = large_program(seed, eight)
    before = plan(text, EIGHT, PlanOptions())
    after = plan(text, EIGHT, PlanOptions(), limits=SearchLimits(target_gap=-1.0))
    assert after.mesh == before.mesh
    assert after.cost.step_s <= before.cost.step_s
    assert before.cost.lower_bound_s * (1 - SLACK) <= after.cost.lower_bound_s <= after.cost.step_s
    assert len(before.mesh.axes) < 3 or after.cost.gap <= 0.01


@pytest.mark.parametrize(("seed", "eight"), [(97, 2048), (14, 2047), (100, 2047)])
def test_the_best_effort_finds_no_worse_plan(seed: int, eight: int) -> None:
    text = large_program(seed, eight)
    usual, best = (plan(text, EIGHT, PlanOptions(effort=effort)) for effort in ("default", "best"))
    assert best.cost.step_s <= usual.cost.step_s * (1 + SLACK)


class _ReadsNoPlanOff(Search):
    """While a gap is closed, plans may be evaluated in descents by blocks, and no others."""

    may_evaluate = True

    def close_gap(self, incumbent: CandidatePlan, bounding: Chain) -> CandidatePlan:
        self.may_evaluate = False
        try:
            return super().close_gap(incumbent, bounding)
        finally:
            self.may_evaluate = True

    def block_coordinate_descent(self, incumbent: CandidatePlan, most_open: float, *, together: int) -> CandidatePlan:
        self.may_evaluate = True
        try:
            return super().block_coordinate_descent(incumbent, most_open, together=together)
        finally:
            self.may_evaluate = False

    def evaluate(self, chain: Chain, solved: ChainSolution, notes: Sequence[str]) -> CandidatePlan:
        assert self.may_evaluate, "a plan is dearer than a bound"
        return super().evaluate(chain, solved, notes)


@pytest.mark.parametrize("seed", [39, 100])
def test_no_plan_is_read_off_where_the_bound_closes_the_gap(seed: int) -> None:
    text = large_program(seed, 2047)
    limits = SearchLimits(
        simplicity_tolerance=0.0,  # plans on two axes are nearly as fast
        target_gap=1.0,
    )
    rough = plan(text, EIGHT, PlanOptions(), limits=limits)
    limits = replace(limits, target_gap=rough.cost.gap / 2)
    result = _ReadsNoPlanOff(text, EIGHT, PlanOptions(), limits=limits).run()
    assert len(result.mesh.axes) == 3
    assert result.cost.step_s == rough.cost.step_s
    assert result.cost.gap <= rough.cost.gap / 2


@pytest.mark.parametrize("seed", [3, 85, 112])
def test_where_it_is_quick_a_plan_is_read_off_for_less(seed: int) -> None:
    """Of a program whose arrays are too small for axes in another order. The target lies between what is open before
    and what the bound leaves."""
    text = large_program(seed, eight=1015, four=1020, sixteen=512)

    def plan_to(target_gap: float, **more: int) -> Plan:
        limits = SearchLimits(simplicity_tolerance=0.0, target_gap=target_gap, **more)
        return plan(text, EIGHT, PlanOptions(), limits=limits)

    before = plan_to(1.0).cost.gap
    left = plan_to(0.999 * before, max_cheap_entries=-1).cost.gap  # all edges of so small a program are folded away
    fine_target_gap = SearchLimits().fine_target_gap
    assert fine_target_gap < left < before
    target_gap = (left + before) / 2
    bounded, better = plan_to(target_gap, max_cheap_entries=-1), plan_to(target_gap)
    assert bounded.cost.gap == left
    assert better.cost.step_s < bounded.cost.step_s
    assert better.cost.gap <= fine_target_gap


@pytest.mark.parametrize("seed", range(12))
def test_with_a_price_of_memory_it_is_under_what_the_best_plan_pays(seed: int) -> None:
    search, fine, fastest = best_on_fine(seed)
    bounding, memory = search.build_bounding_chain(FINE), search.memory_model(fine.graph.variables.shared_layouts)
    candidate = search.evaluate(fine, fastest, ())
    price = Multipliers(
        constraints=(
            (memory.constraint_at_peak(candidate.decisions), candidate.cost.step_s / candidate.memory.peak_bytes),
        )
    )
    best = fine.with_multipliers(price).solve(20.0)
    bound_s = lower_bound(bounding.with_multipliers(price), 20.0)
    assert lower_bound(bounding, 20.0) < bound_s <= best.value


@pytest.mark.parametrize("seed", [0, pytest.param(11, marks=pytest.mark.dear)])
def test_within_the_memory_it_is_under_the_best_plan_that_fits(seed: int) -> None:
    """That is found by one integer program over all strategies on three axes, bytes at the peak being a row of it."""
    search, fine, fastest = best_on_fine(seed)
    bounding, memory = search.build_bounding_chain(FINE), search.memory_model(fine.graph.variables.shared_layouts)
    candidate = search.evaluate(fine, fastest, ())
    peak = memory.constraint_at_peak(candidate.decisions)
    limit = int(0.9 * memory.bytes_at(peak, candidate.decisions))
    best = solve_with_memory_rows(fine, limit, [peak], lambda states: (0, peak), 20.0)
    assert best is not None
    price = Multipliers(constraints=((peak, (best.value - candidate.cost.step_s) / limit),))
    bound = bound_feasible_plans(bounding, price, limit, 20.0)
    assert lower_bound(bounding, 20.0) * 1.01 < bound.seconds <= best.value
    assert bound.chain.multipliers is not None
    assert bound.chain.multipliers.total > price.total  # the first one promises less


@pytest.mark.dear
def test_a_gap_is_closed_where_memory_binds() -> None:
    step, arguments, _ = mlp(batch=4096, width=1024, hidden=4096)
    options = PlanOptions(remat="none", micro_batches=1)
    fastest = plan(lower((step, arguments, ())), EIGHT, options)
    step_plan = plan(lower((step, arguments, ())), EIGHT, replace(options, memory_budget=fastest.memory.peak_bytes))
    assert step_plan.memory.peak_bytes < fastest.memory.peak_bytes  # a device must have more than the peak
    assert len(step_plan.mesh.axes) == 3
    assert step_plan.cost.gap <= 0.01


@pytest.mark.parametrize("seed", [97, 98])
def test_the_plan_says_what_its_bound_covers(seed: int) -> None:
    step_plan = plan(large_program(seed), EIGHT, PlanOptions())
    tried = {len(each.mesh.axes) for each in step_plan.candidates if each.name == "search"}
    assert 3 in tried
    assert step_plan.cost.step_s == min(
        each.step_s for each in step_plan.candidates if each.name == "search" and each.step_s
    )
    assert len(step_plan.mesh.axes) == 3
    assert str(step_plan.mesh) in step_plan.cost.bound_scope
    assert step_plan.cost.is_bounded
    assert 0 < step_plan.cost.lower_bound_s <= step_plan.cost.step_s


class _LateToBound(Search):
    """The deadline has passed once plans on three axes are bounded."""

    def build_bounding_chain(self, mesh: Mesh, *, even_rank: int = EXACT_RANK, uneven_rank: int = 0) -> Chain:
        chain = super().build_bounding_chain(mesh, even_rank=even_rank, uneven_rank=uneven_rank)
        return replace(chain, graph=replace(chain.graph, clock=just_late()))


def test_a_plan_that_a_deadline_leaves_unbounded_says_so() -> None:
    result = _LateToBound(large_program(97), EIGHT, PlanOptions()).run()
    assert "came before a bound on" in result.cost.bound_scope
    assert not result.cost.is_bounded
    assert result.cost.lower_bound_s > result.cost.step_s  # of two axes: this one is faster


def test_what_does_not_fit_near_a_plan_is_descended_to_under_a_price() -> None:
    """No plan fits that does as the fastest one along two of the axes; some do that take as long."""
    step, arguments, _ = mlp(batch=4096, width=1024, hidden=4096)
    options = PlanOptions(remat="none", micro_batches=1)
    search = Search(lower((step, arguments, ())), EIGHT, options, limits=SearchLimits(max_exact_states=0))
    outcome = search.search_meshes()
    fastest = outcome.evaluate(next(each for each in outcome.solutions if each.mesh == FINE))
    assert fastest.coarse_solution is not None
    search.limit_bytes = search.bytes_needed(fastest) * 7 // 10
    with pytest.raises(MemoryBudgetError):
        fit_plan(search, replace(fastest, coarse_solution=None))
    candidate = fit_plan(search, fastest)
    assert search.bytes_needed(candidate) <= search.limit_bytes
    assert candidate.mesh == FINE
    assert candidate.cost.step_s <= 1.001 * fastest.cost.step_s


def test_a_mixture_of_plans_on_three_axes_is_bounded_by_all_strategies_there() -> None:
    """Two plans that were descended to apart, mixed, are near neither: what is near them bounds no other plan."""
    search = Search(large_program(20), EIGHT, PlanOptions(remat="none", micro_batches=1))
    coarse, fine = (
        search.build_chain(COARSE, ForcedStrategy(), frozenset()),
        search.build_chain(FINE, ForcedStrategy(), frozenset()),
    )
    start = search.to_mesh_solution(coarse, coarse.solve(20.0), ())
    at, graph, axes = lift_from(coarse, start.solution, fine)
    near, solved = descend(coarse, at, graph, axes, time_limit_s=20.0)
    peak = search.memory_model(graph.variables.shared_layouts).constraint_at_peak(
        search.evaluate(near, solved, ()).decisions
    )
    others = descend(coarse, at, graph, axes, time_limit_s=20.0, price=Multipliers(constraints=((peak, 1e-9),)))
    both, (_, second) = to_one_chain([(near, solved.states), (others[0], others[1].states)])
    result = search.evaluate(both, ChainSolution(states=second, value=math.inf, tied_bound=0.0), ())
    result = replace(
        result, coarse_solution=start, dual_bound_s=result.cost.step_s
    )  # as nothing near the fastest one fits
    bound_s = lower_bound(search.build_bounding_chain(FINE), 20.0)
    assert bound_s < 0.96 * result.cost.step_s
    assert bound_plan(search, result, BackgroundBound()).cost.lower_bound_s == pytest.approx(bound_s, rel=0.01)


@pytest.mark.dear
def test_descents_under_prices_end_near_the_best_plan_that_fits() -> None:
    """That is found by integer programs over all strategies on three axes; nothing near the fastest plan fits."""
    options = PlanOptions(remat="none", micro_batches=1)
    search = Search(large_program(20), EIGHT, options, limits=SearchLimits(max_exact_states=0))
    coarse, fine = (
        search.build_chain(COARSE, ForcedStrategy(), frozenset()),
        search.build_chain(FINE, ForcedStrategy(), frozenset()),
    )
    start = search.to_mesh_solution(coarse, coarse.solve(20.0), ())
    near, solved = descend(coarse, *lift_from(coarse, start.solution, fine), time_limit_s=20.0)
    fastest = replace(search.evaluate(near, solved, ()), coarse_solution=start)
    model = search.memory_model(fine.graph.variables.shared_layouts)

    def judge(states: Mapping[Variable, int]) -> tuple[int, MemoryConstraint]:
        candidate = search.evaluate(fine, ChainSolution(states=dict(states), value=0.0, tied_bound=0.0), ())
        return search.bytes_needed(candidate), model.constraint_at_peak(candidate.decisions)

    search.limit_bytes = search.bytes_needed(fastest) * 3 // 4
    best = solve_with_memory_rows(fine, search.limit_bytes, [model.constraint_at_peak(fastest.decisions)], judge, 20.0)
    assert best is not None
    best_s = search.evaluate(fine, best, ()).cost.step_s
    made = fit_plan(search, fastest)
    assert search.bytes_needed(made) <= search.limit_bytes
    assert made.cost.step_s <= 1.02 * best_s


@pytest.fixture(scope="module")
def layers() -> Search:
    return Search(lower(gpt2(layers=2, batch=32, length=32)), EIGHT, PlanOptions(), clock=LookCountingClock())


def test_what_is_found_is_no_worse_than_the_plan_that_is_known(layers: Search) -> None:
    """However roughly it is looked for."""
    chain = layers.build_chain(COARSE, ForcedStrategy(), frozenset())
    best, rough = chain.solve(20.0), chain.solve(20.0, close=10.0)
    assert rough.value > 1.1 * best.value, "this step no longer shows what is tested"
    solution = chain.solve(20.0, close=10.0, plan=chain.strategies(best.states))
    assert solution.value == pytest.approx(best.value)


def test_message_passing_begins_where_it_ended_in_the_last_neighbourhood(layers: Search) -> None:
    """So it takes fewer rounds, with a look at the clock each."""
    assert isinstance(layers.clock, LookCountingClock)
    chain = layers.build_chain(COARSE, ForcedStrategy(), frozenset())
    at, axes = lift_plan(chain, chain.solve(20.0).states, FINE)
    fine, looks, values = layers.refine_graph(chain, FINE), [next(layers.clock.looks)], list[float]()
    for _ in range(2):
        values.append(descend(chain, at, fine, axes, time_limit_s=20.0)[1].value)
        looks.append(next(layers.clock.looks))
    assert values[1] == pytest.approx(values[0], rel=1e-3)
    assert 2 * (looks[2] - looks[1]) < looks[1] - looks[0]
