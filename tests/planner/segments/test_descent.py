"""Plans on three axes, descended from plans on two."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace

import pytest

from shardwright.cluster import Cluster
from shardwright.config import PlanOptions
from shardwright.errors import MemoryBudgetError
from shardwright.planner import plan
from shardwright.planner.clock import OutOfTimeError
from shardwright.planner.constraints.forced import ForcedStrategy
from shardwright.planner.costs.relaxed_prices import EXACT_RANK
from shardwright.planner.memory import exact_fit
from shardwright.planner.memory.budget import MemoryPrice, Peak
from shardwright.planner.memory.exact_fit import fit_exactly
from shardwright.planner.memory.fitting import fitted
from shardwright.planner.memory.mixing import of_one_chain
from shardwright.planner.search import closing, finishing, simplest
from shardwright.planner.search.finishing import Bounding, bounded
from shardwright.planner.search.memory_bound import least_that_fits
from shardwright.planner.search.search import Search
from shardwright.planner.segments.bound import lower_bound
from shardwright.planner.segments.chain import Chain, SolvedChain
from shardwright.planner.segments.choices import Graph
from shardwright.planner.segments.descent import axis_parts, descend, lifted
from shardwright.planner.segments.layout import Variable
from shardwright.planner.solver.message_passing import MessagePassing
from shardwright.planner.strategies import axis_order
from shardwright.planner.strategies.expansion import Strategy
from shardwright.planner.strategies.strategy_set import StrategyBuilder
from shardwright.shardings import Mesh
from tests.planner.programs import PLAIN_A100, gpt2, lower, mlp
from tests.planner.test_exact import random_program

EIGHT = replace(Cluster.local(8), hardware=PLAIN_A100)
COARSE = Mesh.of({"data": 4, "model": 2})
FINE = Mesh.of({"data": 2, "model": 2, "sequence": 2})

#: Relative tie-breaks of the search (`strategies.preference.MAX_SHARE`), and the gap at which a round counts as solved.
SLACK = 2e-3


def large_program(seed: int, eight: int = 2048) -> str:
    """A random program with dimensions of 1024 to 4096, worth splitting over 8 devices. eight: what the ones of eight
    elements become."""
    size = {"4": "4096", "8": str(eight), "16": "1024"}
    return re.sub(r"\[(\d+),(\d+)\]", lambda shape: f"[{size[shape[1]]},{size[shape[2]]}]", random_program(seed))


def chains(seed: int) -> tuple[Chain, Chain]:
    """The same program on both meshes."""
    search = Search(large_program(seed), EIGHT, PlanOptions())
    coarse, fine = (search.chain(mesh, ForcedStrategy(), frozenset()) for mesh in (COARSE, FINE))
    return coarse, fine


def lifted_from(coarse: Chain, start: SolvedChain, fine: Chain) -> tuple[dict[Variable, Strategy], Graph, list[str]]:
    at, axes = lifted(coarse, start.states, fine.graph.prices.mesh)
    return at, fine.graph, axes


def test_axes_are_split_into_neighbours() -> None:
    assert axis_parts(COARSE, FINE) == {"data": ("data", "model"), "model": ("sequence",)}
    assert axis_parts(Mesh.of({"x": 8}), FINE) == {"x": ("data", "model", "sequence")}


@pytest.mark.parametrize("seed", range(12))
def test_between_the_plan_that_it_starts_from_and_the_best_one(seed: int) -> None:
    """The same plan costs as much on the finer mesh; the best one there is found by searching it outright."""
    coarse, fine = chains(seed)
    start, best = coarse.solve(20.0), fine.solve(20.0)
    near, found = descend(coarse, *lifted_from(coarse, start, fine), time_limit_s=20.0)
    assert best.value <= found.value * (1 + SLACK)
    assert found.value <= start.value * (1 + SLACK)
    chosen = {v: near.graph.set_of(v).strategies[state] for v, state in found.states.items()}
    states = {v: fine.graph.set_of(v).strategies.index(strategy) for v, strategy in chosen.items()}
    nodes = [node.index for node in fine.graph.flow.nodes if not fine.graph.is_free[node.index]]
    problem = fine.graph.problem(nodes, list(states))
    assert problem.value(list(states.values())) == pytest.approx(found.value, rel=1e-5)  # preferences differ


@pytest.mark.parametrize("seed", [14, 39, 72, 73, 97, 98, 100, 103, 115])
def test_it_finds_what_two_axes_cannot(seed: int) -> None:
    """Programs whose best plan on three axes beats every one on two: the descent ends there."""
    coarse, fine = chains(seed)
    start, best = coarse.solve(20.0), fine.solve(20.0)
    _, found = descend(coarse, *lifted_from(coarse, start, fine), time_limit_s=20.0)
    assert best.value < start.value * (1 - SLACK)
    assert found.value <= best.value * (1 + SLACK)


def test_what_is_left_again_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Descents from one plan, on the graphs of one another, at prices of memory or none, have the same strategies."""
    search = Search(large_program(14), EIGHT, PlanOptions())
    coarse = search.chain(COARSE, ForcedStrategy(), frozenset())
    start = coarse.solve(20.0)
    at, axes = lifted(coarse, start.states, FINE)
    made: list[object] = []
    build = StrategyBuilder._build
    monkeypatch.setattr(StrategyBuilder, "_build", lambda self, *args: made.append(args) or build(self, *args))
    near, solved = descend(coarse, at, search.finer(coarse, FINE), axes, time_limit_s=20.0)
    before = len(made)
    again, same = descend(coarse, at, near.graph, axes, time_limit_s=20.0, price=MemoryPrice(peaks=()))
    assert again.strategies(same.states) == near.strategies(solved.states)
    assert len(made) == before > 0
    coarse_only = search.finer(near, COARSE)
    assert coarse_only.neighbourhoods is not near.graph.neighbourhoods, "strategies of another mesh"


@pytest.mark.parametrize("seed", range(24))
def test_the_bound_on_three_axes_is_under_the_best_plan_there(seed: int) -> None:
    """The best one is found by searching three axes outright; the bound is not far from it."""
    search = Search(large_program(seed), EIGHT, PlanOptions())
    best = search.chain(FINE, ForcedStrategy(), frozenset()).solve(20.0)
    bound_s = lower_bound(search.chain_to_bound(FINE), 20.0)
    assert best.value * 0.9 <= bound_s <= best.value


@pytest.mark.parametrize("seed", range(24))
def test_with_uneven_moves_followed_it_is_closer_and_still_under(seed: int) -> None:
    search = Search(large_program(seed, eight=2047), EIGHT, PlanOptions())
    best = search.chain(FINE, ForcedStrategy(), frozenset()).solve(20.0)
    rough_s = lower_bound(search.chain_to_bound(FINE), 20.0)
    fine_s = lower_bound(search.chain_to_bound(FINE, even_rank=9, uneven_rank=EXACT_RANK), 20.0)
    assert rough_s * (1 - SLACK) <= fine_s <= best.value


@pytest.mark.parametrize(("seed", "eight"), [(97, 2048), (98, 2048), (14, 2047), (39, 2047), (97, 2047), (100, 2047)])
def test_closing_a_gap_makes_no_plan_worse(seed: int, eight: int, monkeypatch: pytest.MonkeyPatch) -> None:
    text = large_program(seed, eight)
    before = plan(text, EIGHT, PlanOptions())
    monkeypatch.setattr(closing, "MOST_OPEN", -1.0)
    after = plan(text, EIGHT, PlanOptions())
    assert after.mesh == before.mesh
    assert after.cost.step_s <= before.cost.step_s
    assert before.cost.lower_bound_s * (1 - SLACK) <= after.cost.lower_bound_s <= after.cost.step_s
    assert len(before.mesh.axes) < 3 or after.cost.gap <= 0.01


@pytest.mark.parametrize(("seed", "eight"), [(97, 2048), (14, 2047), (100, 2047)])
def test_the_best_effort_finds_no_worse_plan(seed: int, eight: int) -> None:
    text = large_program(seed, eight)
    usual, best = (plan(text, EIGHT, PlanOptions(effort=effort)) for effort in ("default", "best"))
    assert best.cost.step_s <= usual.cost.step_s * (1 + SLACK)


@pytest.mark.parametrize("seed", [39, 100])
def test_no_plan_is_read_off_where_the_bound_closes_the_gap(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(chain: object) -> dict[object, int]:
        raise AssertionError("a plan is dearer than a bound")

    text = large_program(seed, 2047)
    monkeypatch.setattr(simplest, "NEARLY", 0.0)  # plans on two axes are nearly as fast
    monkeypatch.setattr(closing, "MOST_OPEN", 1.0)
    rough = plan(text, EIGHT, PlanOptions())
    monkeypatch.setattr(closing, "MOST_OPEN", rough.cost.gap / 2)
    monkeypatch.setattr(closing, "best_alike", never)
    made = plan(text, EIGHT, PlanOptions())
    assert len(made.mesh.axes) == 3
    assert made.cost.step_s == rough.cost.step_s
    assert made.cost.gap <= rough.cost.gap / 2


def test_where_it_is_quick_a_plan_is_read_off_for_less(monkeypatch: pytest.MonkeyPatch) -> None:
    text = large_program(97, 2047)
    monkeypatch.setattr(simplest, "NEARLY", 0.0)
    monkeypatch.setattr(axis_order, "MIN_ELEMENTS", 1 << 40)  # with axes in either order nothing is open
    monkeypatch.setattr(closing, "FEW_ENTRIES", -1)  # all edges of so small a program are folded away
    monkeypatch.setattr(closing, "MOST_OPEN", 0.02513)  # what is open before is more, what the bound leaves is less
    bounded = plan(text, EIGHT, PlanOptions())
    monkeypatch.undo()
    monkeypatch.setattr(simplest, "NEARLY", 0.0)
    monkeypatch.setattr(axis_order, "MIN_ELEMENTS", 1 << 40)
    monkeypatch.setattr(closing, "MOST_OPEN", 0.02513)
    better = plan(text, EIGHT, PlanOptions())
    assert closing.BETTER < bounded.cost.gap < closing.MOST_OPEN
    assert better.cost.step_s < bounded.cost.step_s
    assert better.cost.gap <= closing.BETTER


@pytest.mark.parametrize("seed", range(12))
def test_with_a_price_of_memory_it_is_under_what_the_best_plan_pays(seed: int) -> None:
    search = Search(large_program(seed), EIGHT, PlanOptions())
    fine, bounding = search.chain(FINE, ForcedStrategy(), frozenset()), search.chain_to_bound(FINE)
    memory = search.memory_model(fine.graph.layout.hubs)
    found = search.found(fine, fine.solve(20.0), ())
    price = MemoryPrice(peaks=((memory.peak(found.decisions), found.cost.step_s / found.memory.peak_bytes),))
    best = fine.with_price(price).solve(20.0)
    bound_s = lower_bound(bounding.with_price(price), 20.0)
    assert lower_bound(bounding, 20.0) < bound_s <= best.value


@pytest.mark.parametrize("seed", [0, 11])
def test_within_the_memory_it_is_under_the_best_plan_that_fits(seed: int) -> None:
    """That is found by one integer program over all strategies on three axes, bytes at the peak being a row of it."""
    search = Search(large_program(seed), EIGHT, PlanOptions())
    fine, bounding = search.chain(FINE, ForcedStrategy(), frozenset()), search.chain_to_bound(FINE)
    memory = search.memory_model(fine.graph.layout.hubs)
    found = search.found(fine, fine.solve(20.0), ())
    peak = memory.peak(found.decisions)
    limit = int(0.9 * memory.taken_at(peak, found.decisions))
    best = fit_exactly(fine, limit, [peak], lambda states: (0, peak), 20.0)
    assert best is not None
    price = MemoryPrice(peaks=((peak, (best.value - found.cost.step_s) / limit),))
    bound = least_that_fits(bounding, price, limit, 20.0)
    assert lower_bound(bounding, 20.0) * 1.01 < bound.seconds <= best.value
    assert bound.chain.price is not None
    assert bound.chain.price.total > price.total  # the first one promises less


def test_a_gap_is_closed_where_memory_binds() -> None:
    step, arguments, _ = mlp(batch=4096, width=1024, hidden=4096)
    options = PlanOptions(remat="none", micro_batches=1)
    fastest = plan(lower((step, arguments, ())), EIGHT, options)
    made = plan(lower((step, arguments, ())), EIGHT, replace(options, memory_budget=fastest.memory.peak_bytes))
    assert made.memory.peak_bytes < fastest.memory.peak_bytes  # a device must have more than the peak
    assert len(made.mesh.axes) == 3
    assert made.cost.gap <= 0.01


@pytest.mark.parametrize("seed", [97, 98])
def test_the_plan_says_what_its_bound_covers(seed: int) -> None:
    made = plan(large_program(seed), EIGHT, PlanOptions())
    tried = {len(each.mesh.axes) for each in made.candidates if each.name == "search"}
    assert 3 in tried
    assert made.cost.step_s == min(each.step_s for each in made.candidates if each.name == "search" and each.step_s)
    assert len(made.mesh.axes) == 3
    assert str(made.mesh) in made.cost.bound_scope
    assert made.cost.is_bounded
    assert 0 < made.cost.lower_bound_s <= made.cost.step_s


def test_a_plan_that_a_deadline_leaves_unbounded_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(chain: Chain, time_limit_s: float) -> float:
        raise OutOfTimeError("late")

    monkeypatch.setattr(finishing, "lower_bound", late)
    made = plan(large_program(97), EIGHT, PlanOptions())
    assert "the deadline came before a bound on" in made.cost.bound_scope
    assert not made.cost.is_bounded
    assert made.cost.lower_bound_s > made.cost.step_s  # of two axes: this one is faster


def test_what_does_not_fit_near_a_plan_is_descended_to_under_a_price(monkeypatch: pytest.MonkeyPatch) -> None:
    """No plan fits that does as the fastest one along two of the axes; some do that take as long."""
    monkeypatch.setattr(exact_fit, "MOST_STATES", 0)
    step, arguments, _ = mlp(batch=4096, width=1024, hidden=4096)
    search = Search(lower((step, arguments, ())), EIGHT, PlanOptions(remat="none", micro_batches=1))
    outcome = search.outcome()
    fastest = outcome.plan(next(each for each in outcome.tried if each.mesh == FINE))
    assert fastest.start is not None
    search.limit_bytes = search.needed_bytes(fastest) * 7 // 10
    with pytest.raises(MemoryBudgetError):
        fitted(search, replace(fastest, start=None))
    made = fitted(search, fastest)
    assert search.needed_bytes(made) <= search.limit_bytes
    assert made.mesh == FINE
    assert made.cost.step_s <= 1.001 * fastest.cost.step_s


def test_a_mixture_of_plans_on_three_axes_is_bounded_by_all_strategies_there() -> None:
    """Two plans that were descended to apart, mixed, are near neither: what is near them bounds no other plan."""
    search = Search(large_program(20), EIGHT, PlanOptions(remat="none", micro_batches=1))
    coarse, fine = (
        search.chain(COARSE, ForcedStrategy(), frozenset()),
        search.chain(FINE, ForcedStrategy(), frozenset()),
    )
    start = search.tried(coarse, coarse.solve(20.0), ())
    at, graph, axes = lifted_from(coarse, start.solved, fine)
    near, solved = descend(coarse, at, graph, axes, time_limit_s=20.0)
    peak = search.memory_model(graph.layout.hubs).peak(search.found(near, solved, ()).decisions)
    others = descend(coarse, at, graph, axes, time_limit_s=20.0, price=MemoryPrice(peaks=((peak, 1e-9),)))
    both, (_, second) = of_one_chain([(near, solved.states), (others[0], others[1].states)])
    made = search.found(both, SolvedChain(states=second, value=math.inf, rolled_bound=0.0), ())
    made = replace(made, start=start, price_bound_s=made.cost.step_s)  # as nothing near the fastest one fits
    bound_s = lower_bound(search.chain_to_bound(FINE), 20.0)
    assert bound_s < 0.96 * made.cost.step_s
    assert bounded(search, made, Bounding()).cost.lower_bound_s == pytest.approx(bound_s, rel=0.01)


def test_descents_under_prices_end_near_the_best_plan_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is found by integer programs over all strategies on three axes; nothing near the fastest plan fits."""
    search = Search(large_program(20), EIGHT, PlanOptions(remat="none", micro_batches=1))
    coarse, fine = (
        search.chain(COARSE, ForcedStrategy(), frozenset()),
        search.chain(FINE, ForcedStrategy(), frozenset()),
    )
    start = search.tried(coarse, coarse.solve(20.0), ())
    near, solved = descend(coarse, *lifted_from(coarse, start.solved, fine), time_limit_s=20.0)
    fastest = replace(search.found(near, solved, ()), start=start)
    model = search.memory_model(fine.graph.layout.hubs)

    def judge(states: Mapping[Variable, int]) -> tuple[int, Peak]:
        made = search.found(fine, SolvedChain(states=dict(states), value=0.0, rolled_bound=0.0), ())
        return search.needed_bytes(made), model.peak(made.decisions)

    search.limit_bytes = search.needed_bytes(fastest) * 3 // 4
    best = fit_exactly(fine, search.limit_bytes, [model.peak(fastest.decisions)], judge, 20.0)
    assert best is not None
    best_s = search.found(fine, best, ()).cost.step_s
    monkeypatch.setattr(exact_fit, "MOST_STATES", 0)
    made = fitted(search, fastest)
    assert search.needed_bytes(made) <= search.limit_bytes
    assert made.cost.step_s <= 1.02 * best_s


@pytest.fixture(scope="module")
def layers() -> Search:
    return Search(lower(gpt2(layers=2, batch=32, length=32)), EIGHT, PlanOptions())


def test_what_is_found_is_no_worse_than_the_plan_that_is_known(layers: Search) -> None:
    """However roughly it is looked for."""
    chain = layers.chain(COARSE, ForcedStrategy(), frozenset())
    best, rough = chain.solve(20.0), chain.solve(20.0, close=10.0)
    assert rough.value > 1.1 * best.value, "this step no longer shows what is tested"
    known = chain.solve(20.0, close=10.0, known=chain.strategies(best.states))
    assert known.value == pytest.approx(best.value)


def test_message_passing_begins_where_it_ended_in_the_last_neighbourhood(
    layers: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[MessagePassing] = []
    one_round = MessagePassing.round
    monkeypatch.setattr(MessagePassing, "round", lambda self: rounds.append(self) or one_round(self))
    chain = layers.chain(COARSE, ForcedStrategy(), frozenset())
    at, axes = lifted(chain, chain.solve(20.0).states, FINE)
    fine, counts, values = layers.finer(chain, FINE), list[int](), list[float]()
    for _ in range(2):
        rounds.clear()
        values.append(descend(chain, at, fine, axes, time_limit_s=20.0)[1].value)
        counts.append(len(rounds))
    assert values[1] == pytest.approx(values[0], rel=1e-3)
    assert 2 * counts[1] < counts[0]
