"""The plans that experts write by hand, as forced strategies: priced beside the search, and a first plan for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from shardwright.errors import AnnotationError, OptionError, PlanError
from shardwright.planner.clock import OutOfTimeError
from shardwright.planner.constraints.forced import ForcedStrategy
from shardwright.planner.search.meshes import meshes_to_search
from shardwright.plans import Candidate
from shardwright.shardings import Mesh

if TYPE_CHECKING:
    from shardwright.planner.search.found import Found, Tried
    from shardwright.planner.search.search import Search

#: Forced strategies by the names under which they are known.
EXPERTS = {
    "data parallel": "data",
    "optimizer sharded (ZeRO-1)": "zero1",
    "fully sharded (ZeRO-3)": "fsdp",
    "tensor parallel": "tensor",
    "data × tensor": "mixed",
    "data × tensor, no sequence sharding": "megatron",
    "expert parallel": "expert",
    "replicated": "replicated",
}

#: How the plan is called that one of them is: before the search is at its end, and then.
SO_FAR = "the search, as far as it came, found none faster"
AT_THE_END = "it is faster than what the search found"
SIMPLER = "what the search found is faster by less than 1 %, and less simple"

_DATA_PARALLEL, _FULLY_SHARDED, REPLICATED = "data parallel", "fully sharded (ZeRO-3)", "replicated"

#: Those that large programs are held against, too: with one axis they take least time to plan. Programs of `VAST_NODES`
#: and more are held against none.
OF_LARGE = (_DATA_PARALLEL, "optimizer sharded (ZeRO-1)")
VAST_NODES = 20_000

#: Part of the memory that data parallelism may seem to take for it to be tried as first plan. Of six models that train
#: on 8 devices `_roughly_bytes` says 0.91 to 1.06 times what their plans need.
_SEEMS_TO_FIT = 0.9

#: Most axes of the meshes on which they are priced.
_AXES = 2

Refusal = PlanError | AnnotationError


def first_plan(search: Search) -> Found | None:
    """Data parallelism, or the fully sharded plan where the other does not fit the memory, or hardly.

    Of a large program it takes most of a second to plan one. The fully sharded one is returned whether it fits or not;
    None where neither can be had.
    """
    if seems_to_fit(search, search.cluster.device_count):
        found = expert_plan(search, _DATA_PARALLEL)
        if found is not None and search.fits(found):
            return found
    return fully_sharded(search)


def fully_sharded(search: Search) -> Found | None:
    """The fully sharded one, whether it fits or not; None where it cannot be had."""
    return expert_plan(search, _FULLY_SHARDED)


def expert_plan(search: Search, name: str, why: str = SO_FAR) -> Found | None:
    """The plan of this name on the first mesh that it can be had on, whether it fits or not. why: it is handed out."""
    for mesh, make in _meshes(search, EXPERTS[name]):
        made = _remembered(search, name, mesh, make)
        if not isinstance(made, Refusal):
            found = search.found(made.chain, made.solved, made.notes)
            return replace(found, cost=replace(found.cost, bound_scope=_scope(name, why)))
    return None


def seems_to_fit(search: Search, devices: int) -> bool:
    """Whether a step of which each of so many devices computes a part, and has all the state, most likely fits."""
    return _roughly_bytes(search, devices) <= _SEEMS_TO_FIT * search.limit_bytes


def _roughly_bytes(search: Search, devices: int) -> float:
    """Roughly what that takes on one device, known before anything is planned: the state, and this device's part of
    what is live where most is. No value is fused, and a loop's body holds nothing while it runs."""
    flow, change = search.flow, np.zeros(len(search.flow.nodes) + 1)
    last = {use.source: node.index for node in flow.nodes for use in node.uses}
    arguments = frozenset(flow.parameters)
    for (index, leaf), end in last.items():
        if index not in arguments and end > index:  # what flows back in a loop is counted where it is made
            size_bytes = flow.nodes[index].shapes[leaf].size_bytes
            change[index] += size_bytes
            change[end] -= size_bytes
    return float(search.program.state_bytes + np.cumsum(change).max() / devices)


def names_for(search: Search) -> tuple[str, ...]:
    """Which of them a program is held against, whatever its search found."""
    if search.is_fast:
        return ()
    if not search.is_large or search.options.effort == "best":
        return tuple(EXPERTS)
    return OF_LARGE if len(search.flow.nodes) < VAST_NODES else ()


def priced(search: Search, names: Sequence[str]) -> dict[tuple[str, Mesh], Candidate]:
    """What some of them take, memory aside, besides those that are known already."""
    return {
        (name, mesh): _candidate(search, name, mesh, make())
        for name in names
        for mesh, make in _meshes(search, EXPERTS[name])
        if (name, mesh) not in search.expert_prices
    }


def faster_than(search: Search, step_s: float, names: Sequence[str] = tuple(EXPERTS)) -> Found | None:
    """The fastest of them that fits the memory and takes less than `step_s`.

    None of them is faster than the best plan on its mesh. But that may not be found, where the memory binds or where
    the program is large and not every mesh is searched to the end.
    """
    best: Found | None = None
    for name in names:
        for mesh, make in _meshes(search, EXPERTS[name]):
            if search.is_late():
                return best
            known = search.expert_prices.get((name, mesh))
            if known is not None and (known.step_s is None or known.step_s >= step_s):
                continue
            made = _remembered(search, name, mesh, make)
            if isinstance(made, Refusal) or made.step_s >= step_s:
                continue
            found = _that_fits(search, made)
            if found is not None and found.cost.step_s < step_s:
                scope = _scope(name, AT_THE_END)
                best, step_s = replace(found, cost=replace(found.cost, bound_scope=scope)), found.cost.step_s
    return best


def nearly_as_fast(search: Search, limit_s: float) -> Iterator[Found]:
    """Those that are known to take no longer than `limit_s`, and that fit the memory."""
    for (name, mesh), candidate in list(search.expert_prices.items()):
        if candidate.step_s is None or candidate.step_s > limit_s:
            continue
        for other, make in _meshes(search, EXPERTS[name]):
            found = _that_fits(search, make()) if other == mesh else None
            if found is not None and found.cost.step_s <= limit_s:
                yield replace(found, cost=replace(found.cost, bound_scope=_scope(name, SIMPLER)))


def _scope(name: str, why: str) -> str:
    return f"this is the plan that is known as {name!r}: {why}"


def expert_candidates(search: Search) -> list[Candidate]:
    """What each was found to take on the meshes that it can be had on; or why it cannot be had."""
    prices = search.expert_prices
    return [prices[key] for key in sorted(prices, key=lambda key: list(EXPERTS).index(key[0]))]


def _candidate(search: Search, name: str, mesh: Mesh, made: Tried | Refusal) -> Candidate:
    if isinstance(made, Refusal):
        return Candidate(mesh=mesh, step_s=None, note=made.message, name=name)
    return Candidate(mesh=mesh, step_s=search.kept_s(made), name=name)


def _remembered(search: Search, name: str, mesh: Mesh, make: Callable[[], Tried | Refusal]) -> Tried | Refusal:
    """What is made, its price kept for the list of candidates."""
    made = make()
    search.expert_prices[name, mesh] = _candidate(search, name, mesh, made)
    return made


def _that_fits(search: Search, made: Tried | Refusal) -> Found | None:
    """The plan, if there is one and it fits the memory."""
    if isinstance(made, Refusal):
        return None
    found = search.found(made.chain, made.solved, made.notes)
    return found if search.fits(found) else None


def _meshes(search: Search, force: str) -> Iterator[tuple[Mesh, Callable[[], Tried | Refusal]]]:
    """The meshes that a forced strategy takes, and what makes the best plan that it leaves there."""
    options = replace(search.options, force=force, mode="search")
    try:
        meshes = meshes_to_search(search.cluster, options, search.program.pins)
    except OptionError:
        return
    for mesh in meshes:
        if len(mesh.axes) <= _AXES:
            try:
                wanted = search.program.forced(options, mesh)
            except (OptionError, PlanError):  # a strategy that needs more axes than there are, or another batch
                continue
            yield mesh, partial(_made, search, mesh, wanted)


def _made(search: Search, mesh: Mesh, force: ForcedStrategy) -> Tried | Refusal:
    """With state used as it lies; where that cannot be, with state gathered where it is used; or why not even that."""
    refusal: Refusal | None = None
    for in_place in dict.fromkeys((force.in_place, frozenset())):
        try:
            chain = search.chain(mesh, force, in_place)
            return search.tried(chain, chain.solve(search.time_limit_s()), search.flow.notes)
        except OutOfTimeError:
            raise
        except (PlanError, AnnotationError) as error:
            refusal = error
    assert refusal is not None
    return refusal
