"""What every plan that fits the memory takes at least, from whatever price it is looked for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.planner.memory.constraint import Multipliers
from shardwright.planner.plans.assemble import decide
from shardwright.planner.search.dual_bound import tighten_dual_bound
from shardwright.planner.search.search import Search
from shardwright.planner.search.solutions import CandidatePlan
from tests.planner.memory.test_lagrangian import make_search
from tests.planner.memory.test_restricted_master import seconds
from tests.planner.programs import gpt2, lower

STEP = lower(gpt2(layers=2, batch=32, length=32))


@pytest.fixture(scope="module")
def limited() -> tuple[Search, CandidatePlan]:
    """A search, and a plan that takes less memory than the fastest one at its peak: there is hardly more of that."""
    search = make_search(STEP)
    outcome = search.search_meshes()
    fastest = outcome.evaluate(outcome.fastest)
    model = search.memory_model(fastest.chain.graph.variables.shared_layouts)
    peak = model.constraint_at_peak(fastest.decisions)
    price = Multipliers(constraints=((peak, 4 * fastest.cost.step_s / fastest.memory.peak_bytes),))
    thrifty = search.evaluate(fastest.chain, fastest.chain.with_multipliers(price).solve(search.time_limit_s()), ())
    search.limit_bytes = int(1.003 * model.bytes_at(peak, thrifty.decisions))
    solved = fastest.solution
    return search, replace(thrifty, multipliers=price, unconstrained_solution=solved, dual_bound_s=solved.tied_bound)


@pytest.mark.dear
@pytest.mark.parametrize("times", [1e-3, 30.0])
def test_the_price_that_promises_most_is_found(limited: tuple[Search, CandidatePlan], times: float) -> None:
    search, thrifty = limited
    assert thrifty.multipliers is not None
    result = tighten_dual_bound(search, replace(thrifty, multipliers=thrifty.multipliers.scale(times)))
    promised = [
        thrifty.chain.with_multipliers(price).solve(search.time_limit_s()).tied_bound - price.total * search.limit_bytes
        for price in (thrifty.multipliers.scale(2.0**power) for power in range(-8, 3))
    ]
    # each price is solved within 0.1 % of what seconds and bytes cost together: about five times the seconds
    assert result.dual_bound_s >= 0.995 * max(promised)
    assert result.dual_bound_s > 1.01 * thrifty.dual_bound_s  # what no price promises
    assert result.dual_bound_s <= seconds(thrifty.chain, thrifty.solution.states)


@pytest.mark.dear
@pytest.mark.parametrize("times", [0.5, 1.0, 4.0])
def test_what_bounds_charges_no_plan_more_than_it_takes(times: float) -> None:
    """Gradients are sums that are scattered as they are reduced: none takes what it did where it was made."""
    search = make_search(lower(gpt2(layers=2, batch=4, length=32)))
    outcome = search.search_meshes()
    fastest = outcome.evaluate(outcome.fastest)
    chain, model = fastest.chain, search.memory_model(fastest.chain.graph.variables.shared_layouts)
    peak = model.constraint_at_peak(fastest.decisions)
    price = Multipliers(constraints=((peak, times * fastest.cost.step_s / fastest.memory.peak_bytes),))
    states = chain.with_multipliers(price).solve(search.time_limit_s()).states
    charged_s = seconds(chain.with_multipliers(price), states) - seconds(chain, states)
    taken_s = price.total * model.bytes_at(peak, decide(chain.graph, states))
    assert 0.99 * taken_s <= charged_s <= taken_s * (1 + 1e-9)
