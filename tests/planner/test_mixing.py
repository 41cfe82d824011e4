"""Parts of a fast plan and of one that takes little: what they add up to, and which are taken."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from shardwright.cluster import Cluster
from shardwright.config import PlanOptions
from shardwright.planner.assemble import decide
from shardwright.planner.budget import Memory, MemoryPrice, Peak
from shardwright.planner.chain import Chain
from shardwright.planner.descent import descend, lifted
from shardwright.planner.force import Forced
from shardwright.planner.found import Found
from shardwright.planner.mixing import Group, States, groups_between, mixed, of_one_chain
from shardwright.planner.search import Search
from shardwright.plans import Mesh
from tests.planner.programs import gpt2, lower

STEP = lower(gpt2(layers=3, batch=32, length=32))
ONE_WAY = PlanOptions(mesh={"data": 4}, remat="none", micro_batches=1)


@pytest.fixture(scope="module")
def search() -> Search:
    return Search(STEP, Cluster.local(4), ONE_WAY)


@pytest.fixture(scope="module")
def fast(search: Search) -> Found:
    outcome = search.outcome()
    return outcome.plan(outcome.fastest)


@pytest.fixture(scope="module")
def model(search: Search, fast: Found) -> Memory:
    return search.memory_model(fast.chain.graph.layout.hubs)


@pytest.fixture(scope="module")
def thrifty(search: Search, fast: Found, model: Memory) -> Found:
    peak = model.peak_of_buffers(fast.held, fast.decisions)
    price = fast.cost.step_s / fast.memory.peak_bytes
    priced = fast.chain.with_price(MemoryPrice(peaks=((peak, price),)))
    return search.found(fast.chain, priced.solve(search.time_limit_s()), ())


@pytest.fixture(scope="module")
def peaks(fast: Found, thrifty: Found, model: Memory) -> list[Peak]:
    return [model.peak_of_buffers(each.held, each.decisions) for each in (fast, thrifty)]


def seconds(chain: Chain, states: States) -> float:
    total = 0.0
    for segment, instance in enumerate(chain.instances):
        chosen = [states[variable] for variable in instance.variables]
        problem = chain.problem(segment)
        total += sum(float(cost[i]) for cost, i in zip(problem.costs, chosen, strict=True))
        total += sum(float(matrix[chosen[v], chosen[w]]) for (v, w), matrix in problem.edges.items())
    return total


def taking(first: States, second: States, groups: list[Group]) -> dict[tuple[int, int], int]:
    return {**first, **{variable: second[variable] for group in groups for variable in group.variables}}


def test_groups_hold_all_that_differs_once(fast: Found, thrifty: Found, peaks: list[Peak]) -> None:
    first, second = fast.solved.states, thrifty.solved.states
    groups = groups_between(fast.chain, first, second, peaks)
    assert len(groups) > 1
    held = [variable for group in groups for variable in group.variables]
    assert len(held) == len(set(held))
    assert set(held) == {variable for variable in first if first[variable] != second[variable]}


def test_whatever_groups_are_taken_their_seconds_add_up(fast: Found, thrifty: Found, peaks: list[Peak]) -> None:
    first, second = fast.solved.states, thrifty.solved.states
    groups = groups_between(fast.chain, first, second, peaks)
    for taken in (groups, groups[:1], groups[::2]):
        added = seconds(fast.chain, taking(first, second, taken)) - seconds(fast.chain, first)
        assert added == pytest.approx(sum(group.seconds for group in taken), rel=1e-6, abs=1e-12)


def test_the_bytes_of_all_groups_are_what_the_plans_differ_by(
    fast: Found, thrifty: Found, model: Memory, peaks: list[Peak]
) -> None:
    groups = groups_between(fast.chain, fast.solved.states, thrifty.solved.states, peaks)
    for number, peak in enumerate(peaks):
        differs = model.taken_at(peak, thrifty.decisions) - model.taken_at(peak, fast.decisions)
        assert sum(group.bytes_at[number] for group in groups) == pytest.approx(differs, rel=1e-2)


def test_copies_that_readers_make_are_bytes_of_the_group_that_decides_them(
    fast: Found, thrifty: Found, model: Memory
) -> None:
    first, second = fast.solved.states, thrifty.solved.states
    graph = fast.chain.graph
    uses = [(node, use) for node in graph.flow.nodes if not graph.is_free[node.index] for use in node.uses]
    leaves = {use.source: 1.0 for _, use in uses}
    operands = frozenset(
        (node.index, use.position) for node, use in uses if not node.is_value and not graph.is_free[use.source[0]]
    )
    peak = Peak(values={}, copies=frozenset(), always=frozenset(), margin=0.0, read=leaves, brought=operands)
    groups = groups_between(fast.chain, first, second, [peak])
    for taken in (groups, groups[:1], groups[::2]):
        states = taking(first, second, taken)
        differs = model.taken_at(peak, decide(fast.chain.graph, states)) - model.taken_at(peak, fast.decisions)
        assert sum(group.bytes_at[0] for group in taken) == pytest.approx(differs, rel=1e-6)


GROUPS = [
    Group(variables=((0, -1),), seconds=1.0, bytes_at=(-10.0, 0.0)),
    Group(variables=((1, -1), (2, -1)), seconds=3.0, bytes_at=(-20.0, -5.0)),
    Group(variables=((3, -1),), seconds=2.0, bytes_at=(-12.0, 4.0)),
    Group(variables=((4, -1),), seconds=-0.5, bytes_at=(3.0, 1.0)),
]


@pytest.mark.parametrize("room", [(-10.0, 9.0), (-20.0, 9.0), (-20.0, 0.0), (-33.0, 0.0), (5.0, 5.0), (-43.0, 9.0)])
def test_a_mixture_is_the_fastest_that_there_is_room_for(room: tuple[float, float]) -> None:
    first = {(i, -1): 0 for i in range(5)}
    second = dict.fromkeys(first, 1)
    fits = {
        taken: sum(group.seconds for group, is_taken in zip(GROUPS, taken, strict=True) if is_taken)
        for taken in product((False, True), repeat=len(GROUPS))
        if all(sum(group.bytes_at[k] for group, is_taken in zip(GROUPS, taken, strict=True) if is_taken) <= room[k]
               for k in range(2))
    }  # fmt: skip
    found = mixed(first, second, GROUPS, room)
    if not fits:
        assert found is None
        return
    assert found is not None
    taken = tuple(all(found[variable] for variable in group.variables) for group in GROUPS)
    assert found == taking(first, second, [group for group, is_taken in zip(GROUPS, taken, strict=True) if is_taken])
    assert fits[taken] == min(fits.values())


def test_plans_that_were_descended_to_apart_are_plans_of_one_chain() -> None:
    """With what both decide and nothing else, at the seconds that they take in their own neighbourhoods."""
    step = lower(gpt2(layers=3, width=256, batch=64, length=64))
    searched = Search(step, replace(Cluster.local(8), hardware="a100"), PlanOptions())
    coarse = searched.chain(Mesh.of({"data": 4, "model": 2}), Forced(), frozenset())
    fine = Mesh.of({"data": 2, "model": 2, "sequence": 2})
    at, axes = lifted(coarse, coarse.solve(20.0).states, fine)
    near, solved = descend(coarse, at, searched.finer(coarse, fine), axes, time_limit_s=20.0)
    found = searched.found(near, solved, ())
    peak = searched.memory_model(near.graph.layout.hubs).peak(found.decisions)
    price = MemoryPrice(peaks=((peak, 32 * found.cost.step_s / found.memory.peak_bytes),))
    others, saving = descend(coarse, at, near.graph, axes, time_limit_s=20.0, price=price)
    both, first, second = of_one_chain((near, solved.states), (others, saving.states))
    assert first != second
    assert both.strategies(first) == near.strategies(solved.states)
    assert both.strategies(second) == others.strategies(saving.states)
    assert seconds(both, first) == pytest.approx(seconds(near, solved.states))
    assert seconds(both, second) == pytest.approx(seconds(others, saving.states))
    decided = {v: {each[v] for each in (both.strategies(first), both.strategies(second))} for v in first}
    assert all(set(both.graph.set_of(variable).strategies) == chosen for variable, chosen in decided.items())


def test_plans_of_one_chain_stay_there(fast: Found, thrifty: Found) -> None:
    first, second = fast.solved.states, thrifty.solved.states
    assert of_one_chain((fast.chain, first), (thrifty.chain, second)) == (fast.chain, first, second)
