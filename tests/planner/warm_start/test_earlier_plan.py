"""Plans on three axes that are kept, and searches of nearly the same program that begin there."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from shardwright.clusters.cluster import Cluster
from shardwright.options.plan_options import PlanOptions
from shardwright.planner import plan
from shardwright.planner.cache.store import MemoryStore
from shardwright.planner.constraints.forced import ForcedStrategy
from shardwright.planner.costs.relaxed_prices import RelaxedPrices
from shardwright.planner.limits import SearchLimits
from shardwright.planner.search.search import Search
from shardwright.planner.search.solutions import CandidatePlan, MeshSolution
from shardwright.planner.segments.cost_graph import CostGraph
from shardwright.planner.segments.descent import descend, lift_plan
from shardwright.planner.segments.segment_chain import Chain, ChainSolution
from shardwright.planner.segments.variables import Variable
from shardwright.planner.strategies.expansion import AxisChoice, Strategy
from shardwright.planner.tuning import COST_TOLERANCE, EXACT_RANK
from shardwright.planner.warm_start.earlier_plan import EarlierPlan
from shardwright.planner.warm_start.replanning import most_similar_mesh
from shardwright.planner.warm_start.search_records import SearchHistory, SearchQuery, SearchRecord
from shardwright.plans.plan import Plan
from shardwright.plans.shardings import Mesh, has_rotated_axes
from tests.planner.programs import PLAIN_A100, gpt2, lower
from tests.planner.strategies.test_axis_order import language_model, turned_state, two_nodes

pytestmark = pytest.mark.dear

EIGHT = replace(Cluster.local(8), hardware=PLAIN_A100)
COARSE = Mesh.of({"data": 2, "model": 4})
FINE = Mesh.of({"data": 2, "model": 2, "sequence": 2})
SIXTEEN = replace(Cluster.local(16), hardware=PLAIN_A100)


@cache
def step_of(batch: int = 16) -> str:
    """A step whose fastest plan has three axes."""
    return lower(gpt2(layers=2, width=768, heads=12, vocabulary=1024, length=128, batch=batch))


def descend_to_plan(search: Search, coarse_mesh: Mesh = COARSE, fine: Mesh = FINE) -> Any:
    """The chain of a plan on three axes, and its states."""
    coarse = search.build_chain(coarse_mesh, ForcedStrategy(), frozenset())
    at, axes = lift_plan(coarse, coarse.solve(20.0).states, fine)
    return descend(coarse, at, search.refine_graph(coarse, fine), axes, time_limit_s=20.0)


def names_of(choice: AxisChoice) -> tuple[str | None, frozenset[int] | None]:
    """What an axis does, in any size."""
    return (choice.factor.name if choice.factor else None), choice.linear


def fine_graph(search: Search, mesh: Mesh = FINE) -> tuple[CostGraph, Sequence[Variable]]:
    chain = search.build_chain(COARSE, ForcedStrategy(), frozenset())
    return search.refine_graph(chain, mesh), [v for each in chain.instances for v in each.variables[: each.own_count]]


@pytest.fixture(scope="module")
def kept() -> tuple[EarlierPlan, Chain, dict[Variable, int]]:
    chain, solved = descend_to_plan(Search(step_of(), EIGHT, PlanOptions()))
    return EarlierPlan.of(chain.graph, solved.states), chain, solved.states


@pytest.mark.parametrize("batch", [16, 32])
def test_a_plan_is_the_same_once_it_was_kept(kept: tuple[EarlierPlan, Chain, dict[Variable, int]], batch: int) -> None:
    earlier, chain, states = kept
    read = EarlierPlan.decode(earlier.encode())
    strategies = read.translate_to(*fine_graph(Search(step_of(batch), EIGHT, PlanOptions())))
    assert strategies is not None
    assert strategies.keys() == states.keys()
    for variable, state in states.items():
        strategy = chain.graph.set_of(variable).strategies[state]
        assert (strategies[variable].operands, strategies[variable].results) == (strategy.operands, strategy.results)
        assert [names_of(each) for each in strategies[variable].choices] == [
            names_of(each) for each in strategy.choices
        ]


def test_the_order_of_axes_is_kept() -> None:
    search = Search(lower(language_model()), two_nodes(), turned_state())
    mesh = Mesh.of({"data": 2, "model": 4})
    tried = search.solve_mesh(mesh)
    states = tried.solution.states
    read = EarlierPlan.decode(EarlierPlan.of(tried.chain.graph, states).encode())
    strategies = read.translate_to(tried.chain.graph, list(states))
    assert strategies is not None
    chosen = tried.chain.strategies(states)
    is_out_of_order = [any(has_rotated_axes(lies, mesh) for lies in strategy.results) for strategy in chosen.values()]
    assert any(is_out_of_order)
    for variable, strategy in chosen.items():
        assert (strategies[variable].operands, strategies[variable].results) == (strategy.operands, strategy.results)


def test_what_other_sizes_do_not_allow_is_no_start(kept: tuple[EarlierPlan, Chain, dict[Variable, int]]) -> None:
    """One sequence is not split over the axis that the batch was."""
    assert kept[0].translate_to(*fine_graph(Search(step_of(1), EIGHT, PlanOptions()))) is None


def test_axes_of_another_size_do_nothing_for_what_they_cannot_split(
    kept: tuple[EarlierPlan, Chain, dict[Variable, int]],
) -> None:
    """Five devices divide no batch of 16, but some vocabulary of 1024 they split with padding."""
    earlier, chain, states = kept
    mesh = Mesh.of({**FINE.sizes, "sequence": 5})
    assert earlier.axes_of_other_size(mesh) == {"sequence"}
    strategies = earlier.translate_to(
        *fine_graph(Search(step_of(), replace(Cluster.local(20), hardware=PLAIN_A100), PlanOptions()), mesh)
    )
    assert strategies is not None
    does_as_before = {True: 0, False: 0}
    for variable, state in states.items():
        before, now = chain.graph.set_of(variable).strategies[state].choices, strategies[variable].choices
        assert [names_of(each) for each in now[:2]] == [names_of(each) for each in before[:2]]
        if before and before[2] != AxisChoice():
            does_as_before[names_of(now[2]) == names_of(before[2])] += 1
            assert names_of(now[2]) in (names_of(before[2]), names_of(AxisChoice()))
    assert all(does_as_before.values())


def test_decisions_of_which_nothing_is_known_are_no_start(
    kept: tuple[EarlierPlan, Chain, dict[Variable, int]],
) -> None:
    graph, variables = fine_graph(Search(step_of(), EIGHT, PlanOptions()))
    assert replace(kept[0], decisions=kept[0].decisions[1:]).translate_to(graph, variables) is None


def test_what_is_no_plan_is_not_read(kept: tuple[EarlierPlan, Chain, dict[Variable, int]]) -> None:
    earlier = kept[0]
    beyond = replace(earlier, decisions=np.array([[0, -1, len(earlier.roles)]]))
    with pytest.raises(ValueError, match="no plan"):
        EarlierPlan.decode(beyond.encode())


@pytest.fixture(scope="module")
def searched() -> tuple[Plan, MemoryStore]:
    """The plan of a step, and what the search for it left behind."""
    store = MemoryStore()
    step_plan = plan(step_of(), EIGHT, history=SearchHistory(store))
    assert len(step_plan.mesh.axes) == 3
    return step_plan, store


@pytest.fixture
def left(searched: tuple[Plan, MemoryStore]) -> MemoryStore:
    return copy.deepcopy(searched[1])


class _SearchesNoMesh(Search):
    """No mesh is searched outright.

    evaluated: the strategies of the plans that it evaluates.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.evaluated: list[dict[Variable, Strategy]] = []

    def solve_mesh(self, mesh: Mesh, close: float = 0.0) -> MeshSolution:
        raise AssertionError(f"{mesh} was searched")

    def evaluate(self, chain: Chain, solved: ChainSolution, notes: Sequence[str]) -> CandidatePlan:
        self.evaluated.append(chain.strategies(solved.states))
        return super().evaluate(chain, solved, notes)


def test_twice_the_batch_begins_at_the_plan(left: MemoryStore) -> None:
    nothing = plan(step_of(32), EIGHT)
    again = _SearchesNoMesh(step_of(32), EIGHT, PlanOptions(), history=SearchHistory(left)).run()
    assert "what that decides was the start" in " ".join(again.notes)
    assert again.mesh == nothing.mesh
    assert again.cost.step_s <= nothing.cost.step_s * (1 + SearchLimits().simplicity_tolerance)
    assert again.cost.is_bounded
    assert again.cost.lower_bound_s == pytest.approx(nothing.cost.lower_bound_s, rel=0.01)


class _ChangedHistory(SearchHistory):
    """A history whose records, and the plan of each, are changed before they are followed."""

    def __init__(
        self, store: MemoryStore, change: Callable[[SearchRecord], SearchRecord], plan: EarlierPlan | None = None
    ) -> None:
        super().__init__(store)
        self._change, self._plan = change, plan

    def find_best(self, question: SearchQuery) -> SearchRecord | None:
        record = super().find_best(question)
        return None if record is None else self._change(record)

    def load_plan(self, record: SearchRecord, outline: bytes) -> EarlierPlan | None:
        return self._plan or super().load_plan(record, outline)


class _RecordsBounds(Search):
    """ranks: up to which moves are followed exactly in bounds that are begun ahead, even ones and uneven ones."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.ranks: list[tuple[int, int]] = []

    def start_bounding(self, mesh: Mesh, rank: int = EXACT_RANK) -> None:
        super().start_bounding(mesh, rank)
        chain = self.background_bound.chain_on(mesh, self.flow)
        assert chain is not None
        prices = chain.graph.prices
        assert isinstance(prices, RelaxedPrices)
        self.ranks.append((prices.even_rank, prices.uneven_rank))


@pytest.mark.parametrize("was_open", [False, True])
def test_a_bound_that_was_too_low_is_not_worked_out_again(left: MemoryStore, was_open: bool) -> None:
    """Where the earlier plan's first bound left too much open, all moves are followed at once."""
    history = _ChangedHistory(left, lambda record: replace(record, missed_target_gap=was_open))
    search = _RecordsBounds(step_of(32), EIGHT, PlanOptions(), history=history)
    result, most = search.run(), search.max_rank
    assert most > EXACT_RANK
    assert search.ranks == [(most, most) if was_open else (EXACT_RANK, 0)]
    assert ("counted by what a device must receive" in result.cost.bound_scope) != was_open


class _ClosesNoGap(Search):
    def close_gap(self, incumbent: CandidatePlan, bounding: Chain) -> CandidatePlan:
        return incumbent


def test_what_left_too_much_open_is_remembered(left: MemoryStore) -> None:
    store = MemoryStore()
    _ClosesNoGap(
        step_of(), EIGHT, PlanOptions(), None, SearchHistory(store), limits=SearchLimits(target_gap=-1.0)
    ).run()
    question = Search(step_of(32), EIGHT, PlanOptions(), None, SearchHistory(store)).query
    assert question is not None
    history = [SearchHistory(each).find_best(question) for each in (left, store)]
    assert [record is not None and record.missed_target_gap for record in history] == [False, True]


@pytest.fixture(scope="module")
def of_sixteen() -> EarlierPlan:
    """A plan on twice the devices."""
    fine = Mesh.of({"data": 4, "model": 2, "sequence": 2})
    chain, solved = descend_to_plan(Search(step_of(), SIXTEEN, PlanOptions()), Mesh.of({"data": 4, "model": 4}), fine)
    return EarlierPlan.of(chain.graph, solved.states)


@pytest.mark.parametrize("is_large", [False, True])
def test_after_a_lost_node_the_search_begins_at_the_plan(
    of_sixteen: EarlierPlan, searched: tuple[Plan, MemoryStore], is_large: bool
) -> None:
    """Of a large program only the axes that are as long as before are set free, once each."""

    def of_another_cluster(record: SearchRecord) -> SearchRecord:
        query, cost = replace(record.query, cluster="another"), replace(record.cost, work_s=record.cost.work_s / 2)
        return replace(record, query=query, cost=cost, missed_target_gap=True)

    nothing, left = searched[0], copy.deepcopy(searched[1])
    limits = SearchLimits(large_program_nodes=0) if is_large else SearchLimits()
    history = _ChangedHistory(left, of_another_cluster, of_sixteen)
    search = _SearchesNoMesh(step_of(), EIGHT, PlanOptions(), history=history, limits=limits)
    again = search.run()
    assert "what that decides was the start" in " ".join(again.notes)
    searched_mesh = Mesh.of(dict.fromkeys(("data", "model", "sequence"), 2))  # a finished plan names its axes anew
    assert search.evaluated[0] == descend_from(of_sixteen, searched_mesh, most_rounds=2 if is_large else None)
    assert again.mesh == nothing.mesh
    assert again.cost.step_s <= nothing.cost.step_s * (1 + COST_TOLERANCE)
    assert "counted by what a device must receive" in again.cost.bound_scope  # that was open on another mesh


def descend_from(earlier: EarlierPlan, mesh: Mesh, most_rounds: int | None) -> dict[Variable, Strategy]:
    """The strategies of the step's plan that is descended to from an earlier one, its longer axis last."""
    search = Search(step_of(), EIGHT, PlanOptions())
    chain = search.build_bounding_chain(mesh)
    fine = search.refine_graph(chain, mesh)
    at = earlier.translate_to(fine, [v for each in chain.instances for v in each.variables[: each.own_count]])
    assert at is not None
    axes = ("model", "sequence", "data")
    near, solved = descend(chain, at, fine, axes, time_limit_s=math.inf, most_rounds=most_rounds)
    return near.strategies(solved.states)


def test_the_mesh_most_like_the_earlier_one_is_taken() -> None:
    axes = ("data", "model", "sequence")
    earlier = Mesh.of({"data": 3, "model": 4, "sequence": 2})
    meshes = [Mesh.of(dict(zip(axes, sizes, strict=True))) for sizes in ((4, 2, 2), (2, 4, 2), (2, 2, 4))]
    assert most_similar_mesh(earlier, meshes) == meshes[1]
    assert most_similar_mesh(Mesh.of({"data": 7, "model": 5, "sequence": 3}), meshes) is None
    assert most_similar_mesh(COARSE, meshes) is None
