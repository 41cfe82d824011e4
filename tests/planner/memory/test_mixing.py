"""Parts of a fast plan and of one that takes little: what they take, and which are taken."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

import numpy as np
import pytest

from shardwright.cluster import Cluster
from shardwright.config import PlanOptions
from shardwright.planner.constraints.forced import ForcedStrategy
from shardwright.planner.memory.budget import Memory, MemoryPrice, Peak
from shardwright.planner.memory.mixing import States, _Merged, mixed, of_one_chain
from shardwright.planner.memory.rows import terms
from shardwright.planner.plans.assemble import decide
from shardwright.planner.search.found import Found
from shardwright.planner.search.search import Search
from shardwright.planner.segments.chain import Chain
from shardwright.planner.segments.descent import descend, lifted
from shardwright.planner.segments.layout import Variable
from shardwright.planner.solver import ilp
from shardwright.shardings import Mesh
from tests.planner.programs import PLAIN_A100, gpt2, lower

STEP = lower(gpt2(layers=5, batch=32, length=32))
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


def test_terms_add_up_to_what_plans_differ_by_at_a_peak(
    fast: Found, thrifty: Found, model: Memory, peaks: list[Peak]
) -> None:
    first, second = fast.solved.states, thrifty.solved.states
    different = {variable for variable in first if first[variable] != second[variable]}
    for peak in peaks:
        differs = model.taken_at(peak, thrifty.decisions) - model.taken_at(peak, fast.decisions)
        assert difference(fast.chain, peak, different, first, second) == pytest.approx(differs, rel=1e-2)


def difference(chain: Chain, peak: Peak, decided: Container[Variable], first: States, second: States) -> float:
    """Bytes at a peak that the second plan takes more of what some variables decide."""
    before, after = (
        sum(float(a[tuple(states[v] for v in variables)]) for variables, a in terms(chain.graph, peak, decided))
        for states in (first, second)
    )
    return after - before


def test_copies_that_readers_make_are_terms_of_both_who_decide_them(fast: Found, thrifty: Found, model: Memory) -> None:
    first, second = fast.solved.states, thrifty.solved.states
    graph = fast.chain.graph
    uses = [(node, use) for node in graph.flow.nodes if not graph.is_free[node.index] for use in node.uses]
    leaves = {use.source: 1.0 for _, use in uses}
    operands = frozenset(
        (node.index, use.position) for node, use in uses if not node.is_value and not graph.is_free[use.source[0]]
    )
    peak = Peak(values={}, copies=frozenset(), always=frozenset(), margin=0.0, read=leaves, brought=operands)
    different = [variable for variable in first if first[variable] != second[variable]]
    for taken in (different, different[:1], different[::2]):
        states = {**first, **{variable: second[variable] for variable in taken}}
        differs = model.taken_at(peak, decide(graph, states)) - model.taken_at(peak, fast.decisions)
        assert difference(fast.chain, peak, set(taken), first, states) == pytest.approx(differs, rel=1e-6, abs=1e-6)
    assert model.taken_at(peak, thrifty.decisions) != model.taken_at(peak, fast.decisions)


@pytest.mark.parametrize("part", [0.0, 0.3, 0.7, 1.0])
def test_a_mixture_is_the_fastest_that_there_is_room_for(
    fast: Found, thrifty: Found, model: Memory, peaks: list[Peak], part: float
) -> None:
    """As the integer program over all that the two do, unreduced, has it."""
    plans = [fast.solved.states, thrifty.solved.states]
    saved = [model.taken_at(p, fast.decisions) - model.taken_at(p, thrifty.decisions) for p in peaks]
    room = [(peak, -part * max(each, 0.0)) for peak, each in zip(peaks, saved, strict=True)]
    found = mixed(fast.chain, plans, room, 20.0)
    assert found is not None
    assert all(state in {each[variable] for each in plans} for variable, state in found.items())
    for peak, beside in room:
        taken = model.taken_at(peak, decide(fast.chain.graph, found)) - model.taken_at(peak, fast.decisions)
        assert taken <= beside + 0.01 * max(saved)
    merged = _Merged.of(fast.chain, plans, is_alike=False)
    rows = [replace(row, limit=max(row.limit, 1.0)) for row in (merged.row(*each) for each in room)]
    whole = ilp.solve(merged.problem, time_limit_s=20.0, rows=rows, gap=1e-6)
    assert seconds(fast.chain, merged.states(whole.states)) == pytest.approx(seconds(fast.chain, found), rel=2e-3)
    assert seconds(fast.chain, plans[0]) <= seconds(fast.chain, found) <= seconds(fast.chain, plans[1]) * (1 + 1e-9)


def test_where_there_is_no_room_there_is_no_mixture(fast: Found, thrifty: Found, peaks: list[Peak]) -> None:
    assert mixed(fast.chain, [fast.solved.states, thrifty.solved.states], [(peaks[0], -1e12)], 20.0) is None


def test_repeats_that_do_the_same_in_all_plans_decide_alike_where_the_program_is_large(
    fast: Found, thrifty: Found, model: Memory, peaks: list[Peak]
) -> None:
    chain, plans = fast.chain, [fast.solved.states, thrifty.solved.states]
    assert chain.runs, "this step no longer shows what is tested"
    apart, alike = (_Merged.of(chain, plans, is_alike=is_alike) for is_alike in (False, True))
    assert apart.choices.keys() == alike.choices.keys()
    assert len(alike.left) < len(apart.left) == len(apart.choices)
    for states in ([0] * len(alike.left), [-1] * len(alike.left)):
        chosen = np.array([left[i] for left, i in zip(alike.left, states, strict=True)])
        places = np.array([np.searchsorted(left, each) for left, each in zip(alike.left, chosen, strict=True)])
        plan = alike.states(places)
        assert alike.problem.value(places) - alike.problem.value(np.zeros(len(places), np.int64)) == pytest.approx(
            seconds(chain, plan) - seconds(chain, alike.states(np.zeros(len(places), np.int64))), abs=1e-12
        )
        for peak in peaks:
            row = alike.row(peak, 0.0)
            taken = model.taken_at(peak, decide(chain.graph, plan)) - model.taken_at(peak, fast.decisions)
            assert row.evaluate(places) - row.limit == pytest.approx(taken, rel=1e-2, abs=1e3)
    room = [(peak, 0.0) for peak in peaks]
    large = sum(matrix.size for matrix in apart.problem.edges.values())
    assert mixed(chain, plans, room, 20.0, most_entries=large) == mixed(chain, plans, room, 20.0)
    assert mixed(chain, plans, room, 20.0, most_entries=-1) is None


def test_plans_that_were_descended_to_apart_are_plans_of_one_chain() -> None:
    """With what both decide and nothing else, at the seconds that they take in their own neighbourhoods."""
    step = lower(gpt2(layers=3, width=256, batch=64, length=64))
    searched = Search(step, replace(Cluster.local(8), hardware=PLAIN_A100), PlanOptions())
    coarse = searched.chain(Mesh.of({"data": 4, "model": 2}), ForcedStrategy(), frozenset())
    fine = Mesh.of({"data": 2, "model": 2, "sequence": 2})
    at, axes = lifted(coarse, coarse.solve(20.0).states, fine)
    near, solved = descend(coarse, at, searched.finer(coarse, fine), axes, time_limit_s=20.0)
    found = searched.found(near, solved, ())
    peak = searched.memory_model(near.graph.layout.hubs).peak(found.decisions)
    price = MemoryPrice(peaks=((peak, 32 * found.cost.step_s / found.memory.peak_bytes),))
    others, saving = descend(coarse, at, near.graph, axes, time_limit_s=20.0, price=price)
    both, (first, second, third) = of_one_chain(
        [(near, solved.states), (others, saving.states), (near, dict(solved.states))]
    )
    assert third == first
    assert first != second
    assert both.strategies(first) == near.strategies(solved.states)
    assert both.strategies(second) == others.strategies(saving.states)
    assert seconds(both, first) == pytest.approx(seconds(near, solved.states))
    assert seconds(both, second) == pytest.approx(seconds(others, saving.states))
    decided = {v: {each[v] for each in (both.strategies(first), both.strategies(second))} for v in first}
    assert all(set(both.graph.set_of(variable).strategies) == chosen for variable, chosen in decided.items())


def test_plans_of_one_chain_stay_there(fast: Found, thrifty: Found) -> None:
    first, second = fast.solved.states, thrifty.solved.states
    assert of_one_chain([(fast.chain, first), (thrifty.chain, second)]) == (fast.chain, [first, second])
