"""Arguments that a loop carries in another layout than they lie in: stored besides, in what bounds as well."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from shardwright.options.plan_options import PlanOptions
from shardwright.planner.memory.constraint import MemoryConstraint, Multipliers
from shardwright.planner.memory.ilp_with_memory_rows import solve_with_memory_rows
from shardwright.planner.memory.loop_gathers import argument_of_use, find_loop_uses
from shardwright.planner.plans.assemble import decide
from shardwright.planner.search.program import Program
from shardwright.planner.search.search import Search
from shardwright.planner.search.solutions import CandidatePlan
from tests.planner.memory.test_lagrangian import CLUSTER, NOTHING, ONE_WAY
from tests.planner.memory.test_restricted_master import difference, seconds
from tests.planner.programs import gpt2, lower, mlp

#: Taken in parts, a loop carries the weights for all of them.
STEP = lower(gpt2(layers=2, batch=32, length=32))


def make_plan(text: str = STEP, hardware: str = "cpu", **options: object) -> tuple[Search, CandidatePlan]:
    chosen = PlanOptions(**{**ONE_WAY, "micro_batches": 2, **options})  # type: ignore[arg-type]
    search = Search(text, replace(CLUSTER, hardware=hardware), chosen)
    outcome = search.search_meshes()
    return search, outcome.evaluate(outcome.fastest)


def carry_at(search: Search, candidate: CandidatePlan) -> MemoryConstraint:
    """Where a plan bounds, and nothing of it but what loops carry."""
    peak = search.memory_model(candidate.chain.graph.variables.shared_layouts).constraint_at_peak(candidate.decisions)
    return replace(NOTHING, loop_gathers=peak.loop_gathers)


@pytest.mark.parametrize("hardware", ["cpu", "a100"])
def test_weights_gathered_for_a_loop_are_charged_no_more_than_they_take(hardware: str) -> None:
    """Most of what the memory model has of copies of arguments while the loop runs, and none where no weight is
    gathered. XLA:CPU makes ahead of loops what is the same in each pass."""
    search, result = make_plan(hardware=hardware, force="fsdp")
    model, peak = search.memory_model(result.chain.graph.variables.shared_layouts), carry_at(search, result)
    arguments = {search.flow.nodes[node].instruction.name for node in search.flow.parameters}
    taken = sum(held.size_bytes for held in result.live_buffers if held.is_added and held.name in arguments)
    assert 0.9 * taken <= model.bytes_at(peak, result.decisions) <= taken
    _, as_they_lie = make_plan(hardware=hardware, force="data")
    assert model.bytes_at(peak, as_they_lie.decisions) == 0


def test_what_a_loop_makes_anew_in_each_pass_decides_for_each_argument_once() -> None:
    search, result = make_plan(force="fsdp")
    flow, carried = search.flow, carry_at(search, result).loop_gathers
    arguments = [argument_of_use(flow, reading) for reading in carried]
    assert len(set(arguments)) == len(arguments) >= 10
    assert set(arguments) <= set(flow.parameters)
    changing = {leaf for leaves in flow.entering.values() for leaf in leaves if len(flow.nodes[leaf[0]].uses) > 1}
    for node, _ in carried:  # which is not made ahead of the loop
        made_of, outcome = [node], set[int]()
        while made_of:
            made_of = [
                use.source[0] for each in made_of for use in flow.nodes[each].uses if use.source[0] not in outcome
            ]
            outcome.update(made_of)
        assert outcome & {leaf[0] for leaf in changing}
    at_once = Search(STEP, CLUSTER, PlanOptions(**ONE_WAY, force="fsdp")).search_meshes()  # type: ignore[arg-type]
    assert not carry_at(at_once.search, at_once.evaluate(at_once.fastest)).loop_gathers


def test_of_weights_that_are_rounded_ahead_of_loops_nothing_is_said() -> None:
    search, _ = make_plan()
    assert not find_loop_uses(search.flow, "roundings")


def both_ways(text: str, price: float = 1.0) -> tuple[Search, CandidatePlan, CandidatePlan]:
    """Two plans that store little: one where what loops carry otherwise is free, and one where that is dear, too."""
    search, result = make_plan(text)
    peak = search.memory_model(result.chain.graph.variables.shared_layouts).constraint_at_peak(result.decisions)

    def priced(*peaks: MemoryConstraint) -> CandidatePlan:
        chain = result.chain.with_multipliers(Multipliers.split_equally(peaks, price))
        return search.evaluate(result.chain, chain.solve(search.time_limit_s()), ())

    return search, priced(replace(peak, loop_gathers=frozenset())), priced(peak, carry_at(search, result))


def test_what_a_loop_carries_otherwise_has_a_price() -> None:
    search, gathering, thrifty = both_ways(STEP)
    peak, chain = carry_at(search, gathering), gathering.chain
    model = search.memory_model(chain.graph.variables.shared_layouts)
    taken = [model.bytes_at(peak, each.decisions) for each in (gathering, thrifty)]
    assert taken[0] > taken[1]
    priced = chain.with_multipliers(Multipliers(constraints=((peak, 1.0),)))
    for each, bytes_of in zip((gathering, thrifty), taken, strict=True):
        charged = seconds(priced, each.solution.states) - seconds(chain, each.solution.states)
        assert charged == pytest.approx(bytes_of, rel=1e-6, abs=1e-6)


def test_what_loops_carry_otherwise_are_terms_of_both_who_decide_it() -> None:
    search, gathering, thrifty = both_ways(STEP)
    peak, graph = carry_at(search, gathering), gathering.chain.graph
    model = search.memory_model(graph.variables.shared_layouts)
    first, second = gathering.solution.states, thrifty.solution.states
    different = [variable for variable in first if first[variable] != second[variable]]
    for taken in (different, different[:1], different[::2]):
        states = {**first, **{variable: second[variable] for variable in taken}}
        differs = model.bytes_at(peak, decide(graph, states)) - model.bytes_at(peak, gathering.decisions)
        of_terms = difference(gathering.chain, peak, set(taken), first, states)
        assert of_terms == pytest.approx(differs, rel=1e-6, abs=1e-6)


def test_what_loops_carry_otherwise_is_in_rows_of_the_exact_program() -> None:
    search, gathering, _ = both_ways(lower(mlp(batch=1024, width=64, hidden=256)), 1e-9)
    graph = gathering.chain.graph
    model = search.memory_model(graph.variables.shared_layouts)
    peak = model.constraint_at_peak(gathering.decisions)
    limit = math.ceil(model.bytes_at(replace(peak, loop_gathers=frozenset()), gathering.decisions))
    best = solve_with_memory_rows(gathering.chain, limit, [peak], lambda states: (0, peak), 20.0)
    assert best is not None
    assert model.bytes_at(peak, decide(graph, best.states)) <= limit < model.bytes_at(peak, gathering.decisions)


def readings_of(step: Callable[[jax.Array, jax.Array], jax.Array], hoists: str) -> list[str]:
    """Opcodes of what decides of the weights of a step, an argument of it that all its loops carry."""
    arrays = [jax.ShapeDtypeStruct((8, 8), "float32")] * 2  # type: ignore[no-untyped-call]
    flow = Program(jax.jit(step, keep_unused=True).lower(*arrays).as_text("hlo"), PlanOptions()).flow
    weights = flow.parameters[0]
    results = [each for by_argument in find_loop_uses(flow, hoists).values() for each in by_argument.get(weights, ())]
    assert all(argument_of_use(flow, each) == weights for each in results)
    return [flow.nodes[node].instruction.opcode for node, _ in results]


def test_uses_in_loops_of_loops_are_gathered_ahead_of_all_of_them() -> None:
    def step(weights: jax.Array, x: jax.Array) -> jax.Array:
        def inner(h: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jnp.tanh(h @ weights), None

        def outer(h: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jax.lax.scan(inner, h, None, length=3)[0], None

        return jax.lax.scan(outer, x, None, length=4)[0]

    assert readings_of(step, "all") == ["dot"]
    assert readings_of(step, "none") == ["parameter"]


def test_nothing_is_gathered_ahead_of_a_loop_for_what_a_conditional_in_it_runs() -> None:
    def step(weights: jax.Array, x: jax.Array) -> jax.Array:
        def body(h: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jax.lax.cond(h.sum() > 0, lambda h: h @ weights, lambda h: h + 1.0, h), None

        return jax.lax.scan(body, x, None, length=4)[0]

    assert readings_of(step, "all") == []
    assert readings_of(step, "none") == ["parameter"]


def test_what_is_made_ahead_of_a_loop_itself_decides_nothing() -> None:
    def step(weights: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda h, _: (jnp.tanh(h @ (weights * 2.0)), None), x, None, length=4)[0]

    assert readings_of(step, "all") == []
    assert readings_of(step, "none") == ["parameter"]
