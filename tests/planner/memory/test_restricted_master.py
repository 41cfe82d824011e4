"""Parts of a fast plan and of one that takes little: what they take, and which are taken."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

import numpy as np
import pytest

from shardwright.clusters.cluster import Cluster
from shardwright.options.plan_options import PlanOptions
from shardwright.planner.constraints.forced import ForcedStrategy
from shardwright.planner.memory.constraint import MemoryConstraint, MemoryModel, Multipliers
from shardwright.planner.memory.constraint_rows import constraint_terms
from shardwright.planner.memory.restricted_master import States, _RestrictedMaster, merge_solutions, to_one_chain
from shardwright.planner.plans.assemble import decide
from shardwright.planner.search.search import Search
from shardwright.planner.search.solutions import CandidatePlan
from shardwright.planner.segments.descent import descend, lift_plan
from shardwright.planner.segments.segment_chain import Chain
from shardwright.planner.segments.variables import Variable
from shardwright.planner.solver import ilp
from shardwright.plans.shardings import Mesh
from tests.planner.programs import PLAIN_A100, gpt2, lower

STEP = lower(gpt2(layers=5, batch=32, length=32))
ONE_WAY = PlanOptions(mesh={"data": 4}, remat="none", micro_batches=1)


@pytest.fixture(scope="module")
def search() -> Search:
    return Search(STEP, Cluster.local(4), ONE_WAY)


@pytest.fixture(scope="module")
def fast(search: Search) -> CandidatePlan:
    outcome = search.search_meshes()
    return outcome.evaluate(outcome.fastest)


@pytest.fixture(scope="module")
def model(search: Search, fast: CandidatePlan) -> MemoryModel:
    return search.memory_model(fast.chain.graph.variables.shared_layouts)


@pytest.fixture(scope="module")
def thrifty(search: Search, fast: CandidatePlan, model: MemoryModel) -> CandidatePlan:
    peak = model.constraint_of_buffers(fast.live_buffers, fast.decisions)
    price = fast.cost.step_s / fast.memory.peak_bytes
    priced = fast.chain.with_multipliers(Multipliers(constraints=((peak, price),)))
    return search.evaluate(fast.chain, priced.solve(search.time_limit_s()), ())


@pytest.fixture(scope="module")
def peaks(fast: CandidatePlan, thrifty: CandidatePlan, model: MemoryModel) -> list[MemoryConstraint]:
    return [model.constraint_of_buffers(each.live_buffers, each.decisions) for each in (fast, thrifty)]


def seconds(chain: Chain, states: States) -> float:
    total = 0.0
    for segment, instance in enumerate(chain.instances):
        chosen = [states[variable] for variable in instance.variables]
        problem = chain.problem(segment)
        total += sum(float(cost[i]) for cost, i in zip(problem.costs, chosen, strict=True))
        total += sum(float(matrix[chosen[v], chosen[w]]) for (v, w), matrix in problem.edges.items())
    return total


def test_terms_add_up_to_what_plans_differ_by_at_a_peak(
    fast: CandidatePlan, thrifty: CandidatePlan, model: MemoryModel, peaks: list[MemoryConstraint]
) -> None:
    first, second = fast.solution.states, thrifty.solution.states
    different = {variable for variable in first if first[variable] != second[variable]}
    for peak in peaks:
        differs = model.bytes_at(peak, thrifty.decisions) - model.bytes_at(peak, fast.decisions)
        assert difference(fast.chain, peak, different, first, second) == pytest.approx(differs, rel=1e-2)


def difference(
    chain: Chain, peak: MemoryConstraint, decided: Container[Variable], first: States, second: States
) -> float:
    """Bytes at a peak that the second plan takes more of what some variables decide."""
    before, after = (
        sum(
            float(a[tuple(states[v] for v in variables)])
            for variables, a in constraint_terms(chain.graph, peak, decided)
        )
        for states in (first, second)
    )
    return after - before


def test_copies_that_readers_make_are_terms_of_both_who_decide_them(
    fast: CandidatePlan, thrifty: CandidatePlan, model: MemoryModel
) -> None:
    first, second = fast.solution.states, thrifty.solution.states
    graph = fast.chain.graph
    uses = [
        (node, use) for node in graph.flow.nodes if not graph.is_cheap_to_recompute[node.index] for use in node.uses
    ]
    leaves = {use.source: 1.0 for _, use in uses}
    operands = frozenset(
        (node.index, use.position)
        for node, use in uses
        if not node.is_value and not graph.is_cheap_to_recompute[use.source[0]]
    )
    peak = MemoryConstraint(
        values={},
        layout_copies=frozenset(),
        always_live=frozenset(),
        margin=0.0,
        reader_copies=leaves,
        resharded_operands=operands,
    )
    different = [variable for variable in first if first[variable] != second[variable]]
    for taken in (different, different[:1], different[::2]):
        states = {**first, **{variable: second[variable] for variable in taken}}
        differs = model.bytes_at(peak, decide(graph, states)) - model.bytes_at(peak, fast.decisions)
        assert difference(fast.chain, peak, set(taken), first, states) == pytest.approx(differs, rel=1e-6, abs=1e-6)
    assert model.bytes_at(peak, thrifty.decisions) != model.bytes_at(peak, fast.decisions)


@pytest.mark.parametrize("part", [0.0, 0.3, 0.7, 1.0])
def test_a_mixture_is_the_fastest_that_there_is_room_for(
    fast: CandidatePlan, thrifty: CandidatePlan, model: MemoryModel, peaks: list[MemoryConstraint], part: float
) -> None:
    """As the integer program over all that the two do, unreduced, has it."""
    plans = [fast.solution.states, thrifty.solution.states]
    saved = [model.bytes_at(p, fast.decisions) - model.bytes_at(p, thrifty.decisions) for p in peaks]
    room = [(peak, -part * max(each, 0.0)) for peak, each in zip(peaks, saved, strict=True)]
    result = merge_solutions(fast.chain, plans, room, 20.0)
    assert result is not None
    assert all(state in {each[variable] for each in plans} for variable, state in result.items())
    for peak, beside in room:
        taken = model.bytes_at(peak, decide(fast.chain.graph, result)) - model.bytes_at(peak, fast.decisions)
        assert taken <= beside + 0.01 * max(saved)
    merged = _RestrictedMaster.of(fast.chain, plans, is_alike=False)
    rows = [replace(row, limit=max(row.limit, 1.0)) for row in (merged.build_row(*each) for each in room)]
    whole = ilp.solve(merged.problem, time_limit_s=20.0, rows=rows, gap=1e-6)
    assert seconds(fast.chain, merged.to_states(whole.states)) == pytest.approx(seconds(fast.chain, result), rel=2e-3)
    assert seconds(fast.chain, plans[0]) <= seconds(fast.chain, result) <= seconds(fast.chain, plans[1]) * (1 + 1e-9)


def test_where_there_is_no_room_there_is_no_mixture(
    fast: CandidatePlan, thrifty: CandidatePlan, peaks: list[MemoryConstraint]
) -> None:
    assert (
        merge_solutions(fast.chain, [fast.solution.states, thrifty.solution.states], [(peaks[0], -1e12)], 20.0) is None
    )


def test_repeats_that_do_the_same_in_all_plans_decide_alike_where_the_program_is_large(
    fast: CandidatePlan, thrifty: CandidatePlan, model: MemoryModel, peaks: list[MemoryConstraint]
) -> None:
    chain, plans = fast.chain, [fast.solution.states, thrifty.solution.states]
    assert chain.runs, "this step no longer shows what is tested"
    apart, alike = (_RestrictedMaster.of(chain, plans, is_alike=is_alike) for is_alike in (False, True))
    assert apart.choices.keys() == alike.choices.keys()
    assert len(alike.state_options) < len(apart.state_options) == len(apart.choices)
    for states in ([0] * len(alike.state_options), [-1] * len(alike.state_options)):
        chosen = np.array([left[i] for left, i in zip(alike.state_options, states, strict=True)])
        places = np.array([np.searchsorted(left, each) for left, each in zip(alike.state_options, chosen, strict=True)])
        plan = alike.to_states(places)
        assert alike.problem.value(places) - alike.problem.value(np.zeros(len(places), np.int64)) == pytest.approx(
            seconds(chain, plan) - seconds(chain, alike.to_states(np.zeros(len(places), np.int64))), abs=1e-12
        )
        for peak in peaks:
            row = alike.build_row(peak, 0.0)
            taken = model.bytes_at(peak, decide(chain.graph, plan)) - model.bytes_at(peak, fast.decisions)
            assert row.evaluate(places) - row.limit == pytest.approx(taken, rel=1e-2, abs=1e3)
    room = [(peak, 0.0) for peak in peaks]
    large = sum(matrix.size for matrix in apart.problem.edges.values())
    assert merge_solutions(chain, plans, room, 20.0, most_entries=large) == merge_solutions(chain, plans, room, 20.0)
    assert merge_solutions(chain, plans, room, 20.0, most_entries=-1) is None


@pytest.mark.dear
def test_plans_that_were_descended_to_apart_are_plans_of_one_chain() -> None:
    """With what both decide and nothing else, at the seconds that they take in their own neighbourhoods."""
    step = lower(gpt2(layers=3, width=256, batch=64, length=64))
    searched = Search(step, replace(Cluster.local(8), hardware=PLAIN_A100), PlanOptions())
    coarse = searched.build_chain(Mesh.of({"data": 4, "model": 2}), ForcedStrategy(), frozenset())
    fine = Mesh.of({"data": 2, "model": 2, "sequence": 2})
    at, axes = lift_plan(coarse, coarse.solve(20.0).states, fine)
    near, solved = descend(coarse, at, searched.refine_graph(coarse, fine), axes, time_limit_s=20.0)
    candidate = searched.evaluate(near, solved, ())
    peak = searched.memory_model(near.graph.variables.shared_layouts).constraint_at_peak(candidate.decisions)
    price = Multipliers(constraints=((peak, 32 * candidate.cost.step_s / candidate.memory.peak_bytes),))
    others, saving = descend(coarse, at, near.graph, axes, time_limit_s=20.0, price=price)
    both, (first, second, third) = to_one_chain(
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


def test_plans_of_one_chain_stay_there(fast: CandidatePlan, thrifty: CandidatePlan) -> None:
    first, second = fast.solution.states, thrifty.solution.states
    assert to_one_chain([(fast.chain, first), (thrifty.chain, second)]) == (fast.chain, [first, second])
