"""Gaps that are closed where memory binds: prices of it, repeats apart, and plans that are read off there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwright.config import PlanOptions
from shardwright.errors import MemoryBudgetError
from shardwright.planner.clock import Clock, OutOfTimeError
from shardwright.planner.constraints.forced import ForcedStrategy
from shardwright.planner.memory.budget import MemoryPrice, SizeRange
from shardwright.planner.memory.exact_fit import fit_exactly
from shardwright.planner.plans.assemble import decide
from shardwright.planner.search import closing, read_off
from shardwright.planner.search.closing import closed
from shardwright.planner.search.found import LEAST_GAIN, Found
from shardwright.planner.search.memory_bound import OF_WHAT_FITS, Dual, Tangent
from shardwright.planner.search.mesh_search import MeshSearch
from shardwright.planner.search.search import Search
from shardwright.planner.segments import bound
from shardwright.planner.segments.bound import best_alike
from shardwright.planner.segments.descent import descend, lifted
from shardwright.planner.solver.dual import DualBound
from shardwright.planner.solver.pbqp import Problem
from shardwright.planner.solver.warm_start import WarmStart
from tests.planner.programs import gpt2, lower
from tests.planner.segments.test_descent import COARSE, EIGHT, FINE, large_program


def dual_and_optimum(seed: int) -> tuple[Dual, Tangent, float]:
    """The bound that prices give of a random program, its tangent at none, and the fastest plan that fits: one integer
    program over all strategies on three axes, bytes at the peak being a row of it."""
    search = Search(large_program(seed), EIGHT, PlanOptions())
    fine, bounding = search.chain(FINE, ForcedStrategy(), frozenset()), search.chain_to_bound(FINE)
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

    def poor(self: Dual, price: float, *, close: float) -> Tangent:
        asked.append(price)
        return low._replace(price=price, bound_s=0.0, seconds=2 * best_s)

    monkeypatch.setattr(Dual, "at", poor)
    assert len(list(dual.climb(low, high))) == 2
    assert len(asked) == 1


def thrifty(seed: int, part: float) -> tuple[Search, Found]:
    """A plan of a random program that takes less memory than the fastest one on three axes, and no word of a price:
    there is enough for it, and for so much of what the fastest one takes more."""
    search = Search(large_program(seed), EIGHT, PlanOptions(remat="none", micro_batches=1))
    chain = search.chain(COARSE, ForcedStrategy(), frozenset())
    start = search.tried(chain, chain.solve(20.0), ())
    at, axes = lifted(chain, start.solved.states, FINE)
    fine = search.finer(chain, FINE)
    near, solved = descend(chain, at, fine, axes, time_limit_s=20.0)
    fastest = search.found(near, solved, ())
    peak = search.memory_model(near.graph.layout.hubs).peak(fastest.decisions)
    price = MemoryPrice(peaks=((peak, fastest.cost.step_s / fastest.memory.peak_bytes),))
    made = descend(chain, near.strategies(solved.states), fine, axes, time_limit_s=20.0, price=price)
    found = replace(search.found(*made, ()), start=start)
    most, least = search.needed_bytes(fastest), search.needed_bytes(found)
    assert least < 0.9 * most
    search.limit_bytes = int(least + part * (most - least))
    return search, found


def test_a_plan_found_at_no_price_is_bounded_by_one() -> None:
    search, found = thrifty(0, part=0.0)
    unpriced_s = best_alike(search.chain_to_bound(FINE, even_rank=9, uneven_rank=9).apart()).rolled_bound
    made = closed(search, found)
    assert 1.01 * unpriced_s < made.cost.lower_bound_s <= made.cost.step_s
    assert made.cost.bound_scope.endswith(OF_WHAT_FITS)


def test_what_does_not_fit_is_read_off_again_for_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the unsplit program peaks there is room for the fastest plan, which peaks elsewhere."""

    def as_it_is(search: Search, found: Found, below_s: float, within: tuple[SizeRange, ...], known: Found) -> Found:
        if search.needed_bytes(found) > search.limit_bytes:
            raise MemoryBudgetError("does not fit", where="memory_budget")
        return found

    monkeypatch.setattr(read_off, "fitted", as_it_is)
    search, found = thrifty(53, part=0.5)
    made = closed(search, found)
    assert made.cost.step_s < found.cost.step_s * (1 - LEAST_GAIN)
    assert search.needed_bytes(made) <= search.limit_bytes


@pytest.mark.parametrize(("gains", "count"), [(0, 1), (1, 2), (3, 3)])
def test_a_climb_reads_plans_off_until_one_was_in_vain(gains: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Found] = []

    def fitted(search: MeshSearch, found: Found, *args: object) -> Found:
        read.append(found)
        return replace(found) if len(read) <= gains else found

    def climb(dual: Dual, low: Tangent, high: Tangent) -> list[Tangent]:
        return [high._replace(slope=-1.0, bound_s=0.0)] * 3

    monkeypatch.setattr(closing, "fitted_among_all", fitted)
    monkeypatch.setattr(closing, "branched", lambda search, found, root, most_open: found)
    monkeypatch.setattr(closing, "_read_off", lambda search, found, chain: found)
    monkeypatch.setattr(closing, "refined_among_all", lambda search, found, chain: found)
    monkeypatch.setattr(Dual, "climb", climb)
    search, found = thrifty(0, part=0.0)
    assert closed(search, found).cost.gap > closing.MOST_OPEN
    assert len(read) == count


def test_a_deadline_in_the_middle_of_a_pass_leaves_the_plan_that_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    search, found = thrifty(53, part=1.0)

    def then_late(*args: Any) -> Found:
        read_off.fitted_from(*args)
        raise OutOfTimeError("in the middle")

    monkeypatch.setattr(closing, "fitted_from", then_late)
    made = closed(search, found)
    assert made.cost.step_s < found.cost.step_s * (1 - LEAST_GAIN)
    assert 0 < made.cost.lower_bound_s <= made.cost.step_s


def test_what_is_solved_at_another_price_begins_where_the_last_one_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """And tangents keep nothing of how they were solved but that."""
    begun: list[WarmStart[int]] = []
    tighten = bound.tighten

    def noting(core: Problem, close: float, clock: Clock, start: WarmStart[int]) -> DualBound:
        begun.append(start)
        return tighten(core, close, clock, start)

    monkeypatch.setattr(bound, "tighten", noting)
    search = Search(lower(gpt2(layers=1, batch=32, length=32)), EIGHT, PlanOptions())
    chain = search.chain_to_bound(FINE)
    read = best_alike(chain)
    peak = search.memory_model(chain.graph.layout.hubs).peak(decide(chain.graph, read.states))
    dual = Dual(search=search, chain=chain, peaks=[peak], solve=best_alike)
    low = dual.tangent(0.0, chain, read)
    first = dual.at(read.value / (low.slope + search.limit_bytes))
    anew, again = dual.at(1.05 * first.price), dual.at(1.05 * first.price, first)
    assert [bool(start.moved) for start in begun[-3:]] == [False, False, True]
    assert again.bound_s == pytest.approx(anew.bound_s, rel=2e-3)
    assert first.chain._kinds == again.chain._kinds == {}
