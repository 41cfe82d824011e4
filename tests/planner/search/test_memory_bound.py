"""What every plan that fits the memory takes at least, from whatever price it is looked for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.planner.memory.budget import MemoryPrice
from shardwright.planner.plans.assemble import decide
from shardwright.planner.search.found import Found
from shardwright.planner.search.memory_bound import bounded_by_price
from shardwright.planner.search.search import Search
from tests.planner.memory.test_fitting import searched
from tests.planner.memory.test_mixing import seconds
from tests.planner.programs import gpt2, lower

STEP = lower(gpt2(layers=2, batch=32, length=32))


@pytest.fixture(scope="module")
def limited() -> tuple[Search, Found]:
    """A search, and a plan that takes less memory than the fastest one at its peak: there is hardly more of that."""
    search = searched(STEP)
    outcome = search.outcome()
    fastest = outcome.plan(outcome.fastest)
    model = search.memory_model(fastest.chain.graph.layout.hubs)
    peak = model.peak(fastest.decisions)
    price = MemoryPrice(peaks=((peak, 4 * fastest.cost.step_s / fastest.memory.peak_bytes),))
    thrifty = search.found(fastest.chain, fastest.chain.with_price(price).solve(search.time_limit_s()), ())
    search.limit_bytes = int(1.003 * model.taken_at(peak, thrifty.decisions))
    solved = fastest.solved
    return search, replace(thrifty, price=price, fastest=solved, price_bound_s=solved.rolled_bound)


@pytest.mark.parametrize("times", [1e-3, 30.0])
def test_the_price_that_promises_most_is_found(limited: tuple[Search, Found], times: float) -> None:
    search, thrifty = limited
    assert thrifty.price is not None
    made = bounded_by_price(search, replace(thrifty, price=thrifty.price.times(times)))
    promised = [
        thrifty.chain.with_price(price).solve(search.time_limit_s()).rolled_bound - price.total * search.limit_bytes
        for price in (thrifty.price.times(2.0**power) for power in range(-8, 3))
    ]
    # each price is solved within 0.1 % of what seconds and bytes cost together: about five times the seconds
    assert made.price_bound_s >= 0.995 * max(promised)
    assert made.price_bound_s > 1.01 * thrifty.price_bound_s  # what no price promises
    assert made.price_bound_s <= seconds(thrifty.chain, thrifty.solved.states)


@pytest.mark.parametrize("times", [0.5, 1.0, 4.0])
def test_what_bounds_charges_no_plan_more_than_it_takes(times: float) -> None:
    """Gradients are sums that are scattered as they are reduced: none takes what it did where it was made."""
    search = searched(lower(gpt2(layers=2, batch=4, length=32)))
    outcome = search.outcome()
    fastest = outcome.plan(outcome.fastest)
    chain, model = fastest.chain, search.memory_model(fastest.chain.graph.layout.hubs)
    peak = model.peak(fastest.decisions)
    price = MemoryPrice(peaks=((peak, times * fastest.cost.step_s / fastest.memory.peak_bytes),))
    states = chain.with_price(price).solve(search.time_limit_s()).states
    charged_s = seconds(chain.with_price(price), states) - seconds(chain, states)
    taken_s = price.total * model.taken_at(peak, decide(chain.graph, states))
    assert 0.99 * taken_s <= charged_s <= taken_s * (1 + 1e-9)
