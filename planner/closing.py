"""Where the bound of a plan on three axes leaves too much open: both are looked for again, with dearer prices.

The first bound counts uneven moves, and those of many dimensions, by what a device must receive (`least_moves`), which
may be far less than XLA makes of them. So, where the plan that is known may be over the optimum by more than
`MOST_OPEN`, moves of every rank are followed through its partitioner (heads that the axes do not divide are a fourth
dimension). What is still open then may be what the bound of one repeat loses where a run has few: they are put apart.

The bound comes before any plan, for a plan is dearer. If it leaves too much open still, message passing goes on until
it is near the relaxation's optimum: an assignment read off there, being a plan itself, is a better start than any on
two axes, and is descended from. That is tried with fewer moves followed first: message passing gets nearer then, and
what the true prices make of the moves that were too cheap is the descent's to mend.

Where memory binds, what is read off is at the price of memory that bounds most, and descended from at that price. What
the descent ends at is made to fit as any plan is (`fitting`), as long as it can be faster than what is known.
"""

from __future__ import annotations

from dataclasses import replace

from shardwright.errors import MemoryBudgetError
from shardwright.planner.bound import best_alike
from shardwright.planner.chain import Chain
from shardwright.planner.clock import OutOfTimeError
from shardwright.planner.descent import descend
from shardwright.planner.fitting import fitted
from shardwright.planner.found import LEAST_GAIN, Found
from shardwright.planner.least_moves import EXACT_RANK
from shardwright.planner.memory_bound import bound_at_price, least_that_fits, without_budget
from shardwright.planner.mesh_search import MeshSearch

#: The gap that a plan may have; and the one down to which a plan is looked for all the same, once a gap had to be
#: closed, where the edges between decisions have so few entries that message passing takes seconds (17 million: 9 s).
MOST_OPEN, BETTER = 0.01, 0.005
FEW_ENTRIES = 25_000_000


def closed(search: MeshSearch, found: Found) -> Found:
    """A plan on three axes that fits, or a faster one that does, with a better bound. A deadline leaves it as it
    is."""
    clock = search.clock
    if found.cost.gap <= MOST_OPEN or clock.is_late:
        return found
    most = max(EXACT_RANK, *(shape.rank for node in search.flow.nodes for shape in node.shapes))
    interrupts, clock.interrupts = clock.interrupts, True
    try:
        search.report("search", str(found.mesh))
        chain = search.chain_to_bound(found.mesh, even_rank=most, uneven_rank=most)
        bound = least_that_fits(chain, found.price, search.limit_bytes, search.time_limit_s())
        found = replace(found, cost=bound.of(found.cost), price=bound.chain.price)
        if found.cost.gap > MOST_OPEN and chain.runs:
            found = _bounded_apart(search, found, bound.chain.apart())
        first_open = BETTER if _entries(bound.chain) <= FEW_ENTRIES else MOST_OPEN
        for rank, most_open in ((EXACT_RANK, first_open), (most, MOST_OPEN)):
            if found.cost.gap <= most_open or clock.is_late:
                break
            search.report("search", str(found.mesh))
            found = _read_off(search, found, search.following(chain, rank).with_price(found.price))
    except OutOfTimeError:
        pass
    finally:
        clock.interrupts = interrupts
    return found


def _bounded_apart(search: MeshSearch, found: Found, chain: Chain) -> Found:
    """A plan with what a chain without runs says at its own price, unless it has too many edges for that."""
    if _entries(chain) > FEW_ENTRIES:
        return found
    return replace(found, cost=bound_at_price(chain, search.limit_bytes, search.time_limit_s()).of(found.cost))


def _entries(chain: Chain) -> int:
    """Of all edges between decisions, those of a run's repeats once."""
    return sum(matrix.size for kind, _ in dict.fromkeys(chain.cores()) for matrix in kind.reduction.core.edges.values())


def _read_off(search: MeshSearch, found: Found, chain: Chain) -> Found:
    """The plan that is descended to from what message passing reads off a chain, or one near it that fits, if that is
    faster than one that is known; with the bound that it ends at, if that is a better one."""
    read = best_alike(chain)
    if not chain.runs:
        found = replace(found, cost=without_budget(read.rolled_bound, chain, search.limit_bytes).of(found.cost))
    axes, fine = [axis.name for axis in found.mesh.axes], search.finer(chain, found.mesh)
    near, solved = descend(
        chain, chain.strategies(read.states), fine, axes, time_limit_s=search.time_limit_s(), price=chain.price
    )
    other, below_s = search.found(near, solved, found.notes), found.cost.step_s * (1 - LEAST_GAIN)
    if other.cost.step_s >= below_s:
        return found
    try:
        other = fitted(search, replace(other, start=found.start), below_s)
    except MemoryBudgetError:
        return found
    if other.cost.step_s >= below_s:
        return found
    bound_s = min(found.cost.lower_bound_s, other.cost.step_s)
    cost = replace(other.cost, lower_bound_s=bound_s, bound_scope=found.cost.bound_scope)
    return replace(other, start=found.start, cost=cost)
