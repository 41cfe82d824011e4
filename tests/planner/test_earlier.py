"""Plans on three axes that are kept, and searches of nearly the same program that begin there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shardwright.cluster import Cluster
from shardwright.config import PlanOptions
from shardwright.planner import plan
from shardwright.planner.chain import Chain
from shardwright.planner.descent import descend, lifted
from shardwright.planner.earlier import EarlierPlan
from shardwright.planner.force import Forced
from shardwright.planner.found import LEAST_GAIN
from shardwright.planner.graph import Graph
from shardwright.planner.layout import Variable
from shardwright.planner.least_moves import EXACT_RANK, LeastPrices
from shardwright.planner.search import Search
from shardwright.planner.store import MemoryStore
from shardwright.planner.strategies import Choice
from shardwright.planner.trails import Trail, Trails
from shardwright.plans import Mesh
from tests.planner.programs import gpt2, lower

EIGHT = replace(Cluster.local(8), hardware="a100")
COARSE = Mesh.of({"data": 2, "model": 4})
FINE = Mesh.of({"data": 2, "model": 2, "sequence": 2})


def step_of(batch: int = 16) -> str:
    """A step whose fastest plan has three axes."""
    return lower(gpt2(layers=2, width=768, heads=12, vocabulary=1024, length=128, batch=batch))


def descended(search: Search) -> Any:
    """The chain of a plan on three axes, and its states."""
    coarse = search.chain(COARSE, Forced(), frozenset())
    at, axes = lifted(coarse, coarse.solve(20.0).states, FINE)
    return descend(coarse, at, search.finer(coarse, FINE), axes, time_limit_s=20.0)


def named(choice: Choice) -> tuple[str | None, frozenset[int] | None]:
    """What an axis does, in any size."""
    return (choice.factor.name if choice.factor else None), choice.linear


def fine_graph(search: Search) -> tuple[Graph, Sequence[Variable]]:
    chain = search.chain(COARSE, Forced(), frozenset())
    return search.finer(chain, FINE), [v for each in chain.instances for v in each.variables[: each.own]]


@pytest.fixture(scope="module")
def kept() -> tuple[EarlierPlan, Chain, dict[Variable, int]]:
    chain, solved = descended(Search(step_of(), EIGHT, PlanOptions()))
    return EarlierPlan.of(chain.graph, solved.states), chain, solved.states


@pytest.mark.parametrize("batch", [16, 32])
def test_a_plan_is_the_same_once_it_was_kept(kept: tuple[EarlierPlan, Chain, dict[Variable, int]], batch: int) -> None:
    earlier, chain, states = kept
    read = EarlierPlan.decode(earlier.encode())
    found = read.on(*fine_graph(Search(step_of(batch), EIGHT, PlanOptions())))
    assert found is not None
    assert found.keys() == states.keys()
    for variable, state in states.items():
        strategy = chain.graph.set_of(variable).strategies[state]
        assert (found[variable].operands, found[variable].results) == (strategy.operands, strategy.results)
        assert [named(each) for each in found[variable].choices] == [named(each) for each in strategy.choices]


def test_what_other_sizes_do_not_allow_is_no_start(kept: tuple[EarlierPlan, Chain, dict[Variable, int]]) -> None:
    """One sequence is not split over the axis that the batch was."""
    assert kept[0].on(*fine_graph(Search(step_of(1), EIGHT, PlanOptions()))) is None


def test_decisions_of_which_nothing_is_known_are_no_start(
    kept: tuple[EarlierPlan, Chain, dict[Variable, int]],
) -> None:
    graph, variables = fine_graph(Search(step_of(), EIGHT, PlanOptions()))
    assert replace(kept[0], decisions=kept[0].decisions[1:]).on(graph, variables) is None


def test_what_is_no_plan_is_not_read(kept: tuple[EarlierPlan, Chain, dict[Variable, int]]) -> None:
    earlier = kept[0]
    beyond = replace(earlier, decisions=np.array([[0, -1, len(earlier.ways)]]))
    with pytest.raises(ValueError, match="no plan"):
        EarlierPlan.decode(beyond.encode())


@pytest.fixture(scope="module")
def left() -> MemoryStore:
    """What the search for a step left behind."""
    store = MemoryStore()
    made = plan(step_of(), EIGHT, trails=Trails(store))
    assert len(made.mesh.axes) == 3
    return store


def test_twice_the_batch_begins_at_the_plan(left: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = plan(step_of(32), EIGHT)
    monkeypatch.setattr(Search, "on_mesh", None)  # no mesh is searched outright
    again = plan(step_of(32), EIGHT, trails=Trails(left))
    assert "what that decides was the start" in " ".join(again.notes)
    assert again.mesh == nothing.mesh
    assert again.cost.step_s <= nothing.cost.step_s * (1 + LEAST_GAIN)
    assert again.cost.is_bounded
    assert again.cost.lower_bound_s == pytest.approx(nothing.cost.lower_bound_s, rel=0.01)


@pytest.mark.parametrize("was_open", [False, True])
def test_a_bound_that_was_too_low_is_not_worked_out_again(
    left: MemoryStore, monkeypatch: pytest.MonkeyPatch, was_open: bool
) -> None:
    """Where the earlier plan's first bound left too much open, all moves are followed at once."""
    best_for, begin, ranks = Trails.best_for, Search.bound_ahead, []

    def found(trails: Trails, question: Any) -> Trail | None:
        trail = best_for(trails, question)
        return None if trail is None else replace(trail, was_open=was_open)

    def counted(search: Search, mesh: Mesh, rank: int = EXACT_RANK) -> None:
        begin(search, mesh, rank)
        chain = search.bounding.begun_on(mesh, search.flow)
        assert chain is not None
        prices = chain.graph.prices
        assert isinstance(prices, LeastPrices)
        ranks.append((prices.even_rank, prices.uneven_rank))

    monkeypatch.setattr(Trails, "best_for", found)
    monkeypatch.setattr(Search, "bound_ahead", counted)
    made = plan(step_of(32), EIGHT, trails=Trails(left))
    most = Search(step_of(32), EIGHT, PlanOptions()).most_rank
    assert most > EXACT_RANK
    assert ranks == [(most, most) if was_open else (EXACT_RANK, 0)]
    assert ("counted by what a device must receive" in made.cost.bound_scope) != was_open


def test_what_left_too_much_open_is_remembered(left: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwright.planner.finishing.MOST_OPEN", -1.0)
    store = MemoryStore()
    plan(step_of(), EIGHT, trails=Trails(store))
    question = Search(step_of(32), EIGHT, PlanOptions(), None, Trails(store)).question
    assert question is not None
    trails = [Trails(each).best_for(question) for each in (left, store)]
    assert [trail is not None and trail.was_open for trail in trails] == [False, True]
