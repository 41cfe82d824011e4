"""Making a plan fit the memory: the price of a byte is raised until a plan does, then lowered again.

`budget` has the idea and its bound. Where the program is small, `exact_fit` takes over.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from shardwright.cost.memory import shard_bytes
from shardwright.errors import MemoryBudgetError
from shardwright.planner.budget import Memory, Peak, Price, breakdown, dominating
from shardwright.planner.chain import SolvedChain
from shardwright.planner.exact_fit import fit_exactly
from shardwright.planner.graph import Variable
from shardwright.report.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from shardwright.cluster import Cluster
    from shardwright.planner.found import Found
    from shardwright.planner.search import Search

#: The first price of a byte that is tried, and the highest, as parts of what the plan's own bytes would cost at its own
#: time; then how many prices are tried, and the ratio of two at which they are close enough.
LEAST_PRICE = 1e-3
HIGHEST_PRICE = 1e2
MOST_PRICES = 14
CLOSE_PRICES = 1.3

#: Relative gap to which the program is solved at each price; the last one that fits is solved to the end.
CLOSE = 1e-3

#: What a remedy adds to bytes, so that the three digits that it names are enough.
_ROUNDED_UP = 1.01


def fitted(search: Search, found: Found, below_s: float = math.inf) -> Found:
    """`found`, or the fastest plan that fits.

    below_s: a plan that takes as long is no use. Raises MemoryBudgetError where none fits, or none below that.
    """
    if search.needed_bytes(found) <= search.limit_bytes:
        return found
    model = search.program.memory(search.profile, found.chain.graph.layout.hubs)
    peaks = [model.peak(found.decisions)]
    low, high, best, least = 0.0, 0.0, None, found
    bound_s, bounding, free_s = 0.0, None, found.chain.graph.least_of_free_s()
    unit = found.cost.step_s / found.memory.peak_bytes

    def at(price: float, close: float = 0.0) -> Found:
        nonlocal bound_s, bounding
        terms = Price(peaks=tuple((peak, price / len(peaks)) for peak in peaks))
        solved = found.chain.with_price(terms).solve(search.time_limit_s(), close)
        least_s = solved.rolled_bound - price * search.limit_bytes
        if least_s > bound_s:
            bound_s, bounding = least_s, terms
        return search.found(found.chain, solved, found.notes, bound_s)

    price = LEAST_PRICE * unit
    for _ in range(MOST_PRICES):
        if best is not None and search.is_late():
            return replace(best, price_bound_s=bound_s, price=bounding)
        tried = at(price, CLOSE)
        if bound_s + free_s >= below_s:
            raise _too_slow(found, bound_s + free_s)
        least = min(least, tried, key=search.needed_bytes)
        if search.needed_bytes(tried) <= search.limit_bytes:
            best = _faster(best, tried)
            high = price
        else:
            low = price
            peak = model.peak(tried.decisions)
            peaks = [*peaks[-2:], peak] if peak not in peaks else peaks
        if (high and high < low * CLOSE_PRICES) or low > HIGHEST_PRICE * unit:
            break
        price = (low * high) ** 0.5 if low and high else (high / 8 if high else low * 8)
    exact = _exactly(search, found, model, peaks)
    if exact is not None:
        return replace(exact, price=bounding)
    if best is None:
        raise too_large(search, least)
    tried = at(high)
    if search.needed_bytes(tried) <= search.limit_bytes:
        best = _faster(best, tried)
    return replace(best, price_bound_s=bound_s, price=bounding)


def _faster(best: Found | None, tried: Found) -> Found:
    return tried if best is None or tried.cost.step_s < best.cost.step_s else best


def _too_slow(found: Found, bound_s: float) -> MemoryBudgetError:
    return MemoryBudgetError(
        f"what fits over {found.mesh} takes {bound_s * 1e3:.3g} ms a step or more", where="memory_budget"
    )


def _exactly(search: Search, found: Found, model: Memory, peaks: Sequence[Peak]) -> Found | None:
    """The fastest plan that fits, where the program is small enough to solve whole. Else, or if none fits, None."""

    def judge(states: Mapping[Variable, int]) -> tuple[bool, Peak]:
        solved = SolvedChain(states=dict(states), value=0.0, rolled_bound=0.0)
        tried = search.found(found.chain, solved, found.notes)
        return search.needed_bytes(tried) <= search.limit_bytes, model.peak(tried.decisions)

    margin = search.profile.compiler.temporaries_margin
    best = fit_exactly(found.chain, search.limit_bytes, peaks, judge, search.time_limit_s(), margin)
    return None if best is None else search.found(found.chain, best, found.notes, best.rolled_bound)


def too_large(search: Search, least: Found) -> MemoryBudgetError:
    """What is needed, what dominates, and what would help."""
    needed, limit = search.needed_bytes(least), search.limit_bytes
    state = sum(
        shard_bytes(v.element_type, v.stored_shape, v.stored_sharding, least.mesh)
        for v in least.parameters
        if v.alias is not None
    )
    parts = breakdown(
        {
            "state": state,
            "other arguments and results": least.memory.arguments_bytes - state + least.memory.outputs_bytes,
            "kept free for what predictions miss": needed - least.memory.peak_bytes,
        },
        least.memory.temporaries_bytes,
    )
    model = search.program.memory(search.profile, least.chain.graph.layout.hubs)
    lines = dominating(model.peak(least.decisions), least.decisions)
    most = f"; of what the program computes, {lines} take most" if lines else ""
    again, parts_of_batch = search.recomputation, search.program.micro_batches
    although = [f"{len(again.instructions)} values are computed again"] if again else []
    although += [f"the batch is taken in {parts_of_batch} micro-batches"] if parts_of_batch > 1 else []
    would_do = f"allow {format_bytes(_ROUNDED_UP * needed)}, use {_enough(search.cluster, needed / limit)}"
    return MemoryBudgetError(
        f"no plan over {least.mesh} fits {format_bytes(limit)} a device: the least that was found needs "
        f"{format_bytes(needed)} ({parts}{most}), at {format_seconds(least.cost.step_s)} a step"
        + (f", though {' and '.join(although)}" if although else ""),
        where="memory_budget",
        remedy=f"{would_do}, or make the batch smaller",
    )


def _enough(cluster: Cluster, times: float) -> str:
    """`about 16 devices (2 nodes)`: whole nodes where there are several, if all that is needed divides evenly."""
    devices, nodes = math.ceil(cluster.device_count * times), len(cluster.workers)
    if nodes == 1:
        return f"about {devices} devices"
    nodes = math.ceil(nodes * times)
    return f"about {nodes * cluster.device_count // len(cluster.workers)} devices ({nodes} nodes)"
