"""Gaps that are closed where memory binds: prices of it, repeats apart, and plans that are read off there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.config import PlanOptions
from shardwright.planner.bound import best_alike
from shardwright.planner.closing import closed
from shardwright.planner.descent import descend, lifted
from shardwright.planner.exact_fit import fit_exactly
from shardwright.planner.force import Forced
from shardwright.planner.found import Found
from shardwright.planner.memory_bound import Dual, Tangent
from shardwright.planner.search import Search
from tests.planner.programs import gpt2, lower
from tests.planner.test_descent import COARSE, EIGHT, FINE, large_program


def dual_and_optimum(seed: int) -> tuple[Dual, Tangent, float]:
    """The bound that prices give of a random program, its tangent at none, and the fastest plan that fits: one integer
    program over all strategies on three axes, bytes at the peak being a row of it."""
    search = Search(large_program(seed), EIGHT, PlanOptions())
    fine, bounding = search.chain(FINE, Forced(), frozenset()), search.chain_to_bound(FINE)
    found = search.found(fine, fine.solve(20.0), ())
    memory = search.memory_model(fine.graph.layout.hubs)
    peak = memory.peak(found.decisions)
    search.limit_bytes = int(0.9 * memory.taken_at(peak, found.decisions))
    best = fit_exactly(fine, search.limit_bytes, [peak], lambda states: (0, peak), 20.0)
    assert best is not None
    dual = Dual(search=search, chain=bounding.apart(), peaks=[peak], solve=best_alike)
    return dual, dual.tangent(0.0, dual.chain, best_alike(dual.chain)), best.value


@pytest.mark.parametrize("seed", [0, 11])
@pytest.mark.parametrize("times", [0.03, 30.0])
def test_tangents_lead_to_the_price_that_bounds_most(seed: int, times: float) -> None:
    """From a price that is too low, and from one that is too high; under the fastest plan that fits."""
    dual, low, best_s = dual_and_optimum(seed)
    first = times * low.reaches(best_s)
    climbed_s = max(made.bound_s for made in dual.climb(low, dual.at(first)))
    others_s = max(dual.at(first / times * 2.0**power).bound_s for power in range(-6, 3))
    assert climbed_s >= 0.998 * others_s
    assert 1.01 * low.bound_s < climbed_s <= best_s


def test_what_is_no_cut_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A solution read off messages that costs more than both tangents promise says nothing new."""
    dual, low, best_s = dual_and_optimum(0)
    high = dual.at(2 * low.reaches(best_s))
    asked = list[float]()

    def poor(self: Dual, price: float) -> Tangent:
        asked.append(price)
        return low._replace(price=price, bound_s=0.0, seconds=2 * best_s)

    monkeypatch.setattr(Dual, "at", poor)
    assert len(list(dual.climb(low, high))) == 2
    assert len(asked) == 1


@pytest.fixture(scope="module")
def thrifty() -> tuple[Search, Found, Found]:
    """A plan on three axes that fits with room, found at no price; and the fastest one, which does not."""
    step = gpt2(layers=2, width=768, heads=12, vocabulary=1024, length=128, batch=16)
    search = Search(lower(step), EIGHT, PlanOptions(remat="none", micro_batches=1))
    chain = search.chain(COARSE, Forced(), frozenset())
    start = search.tried(chain, chain.solve(20.0), ())
    at, axes = lifted(chain, start.solved.states, FINE)
    near, solved = descend(chain, at, search.finer(chain, FINE), axes, time_limit_s=20.0)
    fastest = replace(search.found(near, solved, ()), start=start)
    return search, fastest, fastest


def test_a_plan_that_fits_at_no_price_is_bounded_by_one(thrifty: tuple[Search, Found, Found]) -> None:
    search, found, _ = thrifty
    print(found.cost.step_s, search.needed_bytes(found))
    made = closed(search, found)
    print(made.cost.step_s, made.cost.lower_bound_s, search.needed_bytes(made))
