"""The last of a search that memory binds, where more is open than a plan may leave: a price of memory for each peak.

All that came before prices the peaks of plans alike. What `cutting_planes` finds at prices of their own is a faster
plan under the bound that is known. It is looked for where plans were looked for before: among all strategies of a mesh
where message passing over them takes a fraction of a second, by descents on other meshes of three axes, and else in the
chain that the plan is of.
"""

from __future__ import annotations

from dataclasses import replace

from shardwright.planner.memory.cutting_planes import raised
from shardwright.planner.memory.cutting_planes import refined as refined_by_prices
from shardwright.planner.memory.fitting import Fitting
from shardwright.planner.search.found import Found
from shardwright.planner.search.memory_bound import Bound
from shardwright.planner.search.mesh_search import MeshSearch
from shardwright.planner.search.read_off import if_faster, known_to, placed_near
from shardwright.planner.segments.bound import best_alike
from shardwright.planner.segments.chain import Chain
from shardwright.planner.segments.choices import Graph
from shardwright.planner.strategies.tie_break import MAX_SHARE

#: The gap that a plan may have.
MOST_OPEN = 0.01


def refined(search: MeshSearch, found: Found) -> Found:
    """A plan that fits, or a faster one near those that were looked at, with a better bound. A deadline leaves what is
    known by then."""
    clock = search.clock
    if found.cost.gap <= MOST_OPEN or found.price is None or clock.is_late:
        return found
    interrupts, clock.interrupts = clock.interrupts, True
    try:
        search.report("search", str(found.mesh))
        if found.is_descended or found.fastest is None:
            return _planned_anew(search, found, Fitting(search, found, found.cost.step_s))
        start = search.found(found.chain.with_price(None), found.fastest, found.notes)
        fitting = Fitting(search, start, found.cost.step_s)
        if found.price_bound_s:
            found = _bounded_anew(search, found, fitting, found, beside_s(found.chain.graph))
        return _planned_anew(search, found, fitting)
    finally:
        clock.interrupts = interrupts


def refined_among_all(search: MeshSearch, found: Found, chain: Chain) -> Found:
    """The same, of all strategies of the plan's mesh.

    chain: to bound, without runs, whose moves are all followed.
    """
    if found.cost.gap <= MOST_OPEN or search.is_late():
        return found
    chain = chain.with_price(None)
    known, start = known_to(search, chain, found), search.found(chain, best_alike(chain), found.notes)
    if known is None or search.fits(start):
        return found
    fitting = Fitting(search, start, found.cost.step_s, (), known)
    found = _bounded_anew(search, found, fitting, known)
    if found.cost.gap <= MOST_OPEN:
        return found
    made = refined_by_prices(fitting, known, _enough_s(found))
    return placed_near(search, found, made) if made is not known else found


def beside_s(graph: Graph) -> float:
    """What plans take at least that no choice of a chain's variables says, for those whose repeats decide alike."""
    return graph.least_of_free_s() - MAX_SHARE * graph.least_s()


def _bounded_anew(search: MeshSearch, found: Found, fitting: Fitting, known: Found, besides_s: float = 0.0) -> Found:
    """A plan with the bound that prices for each peak give, if that is a better one. known: the same in the chain that
    is fitted. besides_s: what all take besides what that says."""
    bound_s, price = raised(fitting, known, found.cost.step_s * (1 - MOST_OPEN) - besides_s)
    if bound_s + besides_s <= found.cost.lower_bound_s:
        return found
    bound = Bound(bound_s + besides_s, fitting.start.chain.with_price(price))
    made = replace(found, cost=bound.of(found.cost), price=price)
    search.tell_of(made)
    return made


def _planned_anew(search: MeshSearch, found: Found, fitting: Fitting) -> Found:
    """A plan, or a faster one that prices for each peak give, if more is open than it may leave."""
    if found.cost.gap <= MOST_OPEN:
        return found
    return if_faster(search, found, refined_by_prices(fitting, found, _enough_s(found)))


def _enough_s(found: Found) -> float:
    """What a plan may take under the bound that is known."""
    return found.cost.lower_bound_s / (1 - MOST_OPEN)
