"""Where the bound of a plan on three axes leaves too much open: both are looked for again, with dearer prices.

The first bound counts uneven moves, and those of many dimensions, by what a device must receive (`least_moves`), which
may be far less than XLA makes of them. With these followed through its partitioner the relaxation is so close to the
truth that what message passing reads off it, being a plan itself, is a better start than any plan on two axes: it is
descended from. That takes seconds, and with even moves of every rank many more (a mixture of experts): so each is
done where the plan that is known may be over the optimum by more than `MOST_OPEN`.
"""

from __future__ import annotations

from dataclasses import replace

from shardwright.planner.bound import best_alike, lower_bound
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
    most = max(shape.rank for node in search.flow.nodes for shape in node.shapes)
    interrupts, clock.interrupts = clock.interrupts, True
    try:
        for even_rank in sorted({EXACT_RANK, max(EXACT_RANK, most)}):  # uneven moves only up to the first
            if found.cost.gap <= MOST_OPEN or clock.is_late:
                break
            search.report("search", str(found.mesh))
            found = _closed(search, found, even_rank)
    except OutOfTimeError:
        pass
    finally:
        clock.interrupts = interrupts
    return found


def _closed(search: MeshSearch, found: Found, even_rank: int) -> Found:
    chain = search.chain_to_bound(found.mesh, even_rank=even_rank, uneven_rank=EXACT_RANK)
    bound_s = max(found.cost.lower_bound_s, lower_bound(chain, search.time_limit_s()))
    at = {variable: chain.graph.set_of(variable).strategies[state] for variable, state in best_alike(chain).items()}
    axes = [axis.name for axis in found.mesh.axes]
    near, solved = descend(chain, at, search.finer(chain, found.mesh), axes, time_limit_s=search.time_limit_s())
    other = search.found(near, solved, found.notes)
    if other.cost.step_s < found.cost.step_s * (1 - LEAST_GAIN) and search.needed_bytes(other) <= search.limit_bytes:
        found = replace(other, start=found.start, cost=replace(other.cost, bound_scope=found.cost.bound_scope))
    return replace(found, cost=replace(found.cost, lower_bound_s=min(bound_s, found.cost.step_s)))
