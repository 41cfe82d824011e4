"""Where the bound of a plan on three axes leaves too much open: both are looked for again, with dearer prices.

The first bound counts uneven moves, and those of many dimensions, by what a device must receive (`least_moves`), which
may be far less than XLA makes of them. So, where the plan that is known may be over the optimum by more than
`MOST_OPEN`, even moves of every rank are followed through its partitioner, and uneven ones of up to three dimensions.

The bound comes before any plan, for a plan is dearer. If it leaves too much open still, message passing goes on until
it is near the relaxation's optimum: an assignment read off there, being a plan itself, is a better start than any on
two axes, and is descended from. That is tried with fewer moves followed first: message passing gets nearer then, and
what the true prices make of the moves that were too cheap is the descent's to mend.
"""

from __future__ import annotations

from dataclasses import replace

from shardwright.planner.bound import best_alike, lower_bound
from shardwright.planner.chain import Chain
from shardwright.planner.clock import OutOfTimeError
from shardwright.planner.descent import descend
from shardwright.planner.found import LEAST_GAIN, Found
from shardwright.planner.least_moves import EXACT_RANK
from shardwright.planner.mesh_search import MeshSearch

#: The gap that a plan may have.
MOST_OPEN = 0.01


def closed(search: MeshSearch, found: Found) -> Found:
    """A plan on three axes that fits at no price, or a faster one that does, with a better bound. A deadline leaves it
    as it is."""
    clock = search.clock
    if found.cost.gap <= MOST_OPEN or clock.is_late:
        return found
    most = max(EXACT_RANK, *(shape.rank for node in search.flow.nodes for shape in node.shapes))
    interrupts, clock.interrupts = clock.interrupts, True
    try:
        search.report("search", str(found.mesh))
        chain = search.chain_to_bound(found.mesh, even_rank=most, uneven_rank=EXACT_RANK)
        bound_s = max(found.cost.lower_bound_s, lower_bound(chain, search.time_limit_s()))
        found = replace(found, cost=replace(found.cost, lower_bound_s=min(bound_s, found.cost.step_s)))
        for even_rank in sorted({EXACT_RANK, most}):
            if found.cost.gap <= MOST_OPEN or clock.is_late:
                break
            search.report("search", str(found.mesh))
            found = _read_off(search, found, search.following(chain, even_rank))
    except OutOfTimeError:
        pass
    finally:
        clock.interrupts = interrupts
    return found


def _read_off(search: MeshSearch, found: Found, chain: Chain) -> Found:
    """The plan that is descended to from what message passing reads off a chain, if it is faster than one that is known
    and fits."""
    at = {variable: chain.graph.set_of(variable).strategies[state] for variable, state in best_alike(chain).items()}
    axes = [axis.name for axis in found.mesh.axes]
    near, solved = descend(chain, at, search.finer(chain, found.mesh), axes, time_limit_s=search.time_limit_s())
    other = search.found(near, solved, found.notes)
    if other.cost.step_s >= found.cost.step_s * (1 - LEAST_GAIN) or search.needed_bytes(other) > search.limit_bytes:
        return found
    bound_s = min(found.cost.lower_bound_s, other.cost.step_s)
    return replace(
        other,
        start=found.start,
        cost=replace(other.cost, bound_scope=found.cost.bound_scope, lower_bound_s=bound_s),
    )
