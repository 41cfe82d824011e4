"""Arguments that a loop carries in another layout than they lie in: stored besides, in what bounds as well."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.planner.assemble import decide
from shardwright.planner.budget import MemoryPrice, Peak
from shardwright.planner.exact_fit import fit_exactly
from shardwright.planner.found import Found
from shardwright.planner.mixing import groups_between
from shardwright.planner.search import Search
from tests.planner.programs import gpt2, lower, mlp
from tests.planner.test_fitting import NOTHING, searched
from tests.planner.test_mixing import seconds, taking

#: Taken in parts, a loop carries the weights for all of them.
STEP = lower(gpt2(layers=2, batch=32, length=32))


def planned(text: str = STEP, **options: object) -> tuple[Search, Found]:
    search = searched(text, micro_batches=2, **options)
    outcome = search.outcome()
    return search, outcome.plan(outcome.fastest)


def carried_at(search: Search, found: Found) -> Peak:
    """Where a plan bounds, and nothing of it but what loops carry."""
    peak = search.memory_model(found.chain.graph.layout.hubs).peak(found.decisions)
    return replace(NOTHING, carried=peak.carried)


def test_weights_gathered_for_a_loop_are_live_while_it_runs() -> None:
    """As many bytes as the memory model has of copies that are made for the loop, and none where it carries the weights
    as they lie."""
    search, found = planned(force="fsdp")
    model, peak = search.memory_model(found.chain.graph.layout.hubs), carried_at(search, found)
    taken = next(loop.operands[0].name for loop in search.flow.entering if loop.opcode == "while")
    gathered = [held for held in found.held if held.is_added and held.reader is not None and held.reader.name == taken]
    assert len(peak.carried) >= len(gathered) > 10
    assert model.taken_at(peak, found.decisions) == pytest.approx(sum(held.size_bytes for held in gathered), rel=0.02)
    whole, as_they_lie = planned(force="data")
    assert carried_at(whole, as_they_lie).carried == peak.carried
    assert whole.memory_model(as_they_lie.chain.graph.layout.hubs).taken_at(peak, as_they_lie.decisions) == 0


def test_what_a_loop_changes_or_does_not_run_is_no_copy() -> None:
    search, found = planned(force="fsdp")
    flow = search.flow
    parameters = frozenset(flow.parameters)
    for node in carried_at(search, found).carried:
        (use,) = flow.nodes[node].uses  # what a loop changes, its body feeds as well
        assert use.source[0] in parameters
        assert any(each.source == (node, 0) for reader in flow.nodes for each in reader.uses)
    at_once = searched(STEP, force="fsdp").outcome()
    assert not carried_at(at_once.search, at_once.plan(at_once.fastest)).carried


def both_ways(text: str) -> tuple[Search, Found, Found]:
    """Two plans that store little: one where what loops carry otherwise is free, and one where that is dear, too."""
    search, found = planned(text)
    peak = search.memory_model(found.chain.graph.layout.hubs).peak(found.decisions)

    def priced(*peaks: Peak) -> Found:
        chain = found.chain.with_price(MemoryPrice.shared(peaks, 1.0))
        return search.found(found.chain, chain.solve(search.time_limit_s()), ())

    return search, priced(replace(peak, carried=frozenset())), priced(peak, carried_at(search, found))


def test_what_a_loop_carries_otherwise_has_a_price() -> None:
    search, gathering, thrifty = both_ways(STEP)
    peak, chain = carried_at(search, gathering), gathering.chain
    model = search.memory_model(chain.graph.layout.hubs)
    taken = [model.taken_at(peak, each.decisions) for each in (gathering, thrifty)]
    assert taken[0] > taken[1]
    priced = chain.with_price(MemoryPrice(peaks=((peak, 1.0),)))
    for each, bytes_of in zip((gathering, thrifty), taken, strict=True):
        charged = seconds(priced, each.solved.states) - seconds(chain, each.solved.states)
        assert charged == pytest.approx(bytes_of, rel=1e-6, abs=1e-6)


def test_what_loops_carry_otherwise_are_bytes_of_the_group_that_decides_them() -> None:
    search, gathering, thrifty = both_ways(STEP)
    peak, graph = carried_at(search, gathering), gathering.chain.graph
    model = search.memory_model(graph.layout.hubs)
    first, second = gathering.solved.states, thrifty.solved.states
    groups = groups_between(gathering.chain, first, second, [peak])
    for taken in (groups, groups[:1], groups[::2]):
        mixture = decide(graph, taking(first, second, taken))
        differs = model.taken_at(peak, mixture) - model.taken_at(peak, gathering.decisions)
        assert sum(group.bytes_at[0] for group in taken) == pytest.approx(differs, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("part", [0.9, 0.1])
def test_what_loops_carry_otherwise_is_in_rows_of_the_exact_program(part: float) -> None:
    search, found = planned(lower(mlp(batch=256)), force="fsdp")
    peak, chain = carried_at(search, found), found.chain
    model = search.memory_model(chain.graph.layout.hubs)
    limit = int(part * model.taken_at(peak, found.decisions))
    best = fit_exactly(chain, limit, [peak], lambda states: (0, peak), 20.0)
    assert best is not None
    assert model.taken_at(peak, decide(chain.graph, best.states)) <= limit
