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
    from shardwright.planner.search.search import Search
    from shardwright.planner.search.solutions import CandidatePlan, MeshSolution

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
BEST_AT_DEADLINE = "the search, as far as it came, found none faster"
FASTER_THAN_SEARCH = "it is faster than what the search found"
SIMPLER = "what the search found is faster by less than 1 %, and less simple"

_DATA_PARALLEL, _FULLY_SHARDED, REPLICATED = "data parallel", "fully sharded (ZeRO-3)", "replicated"

#: Those that large programs are held against, too: with one axis they take least time to plan. Programs of
#: `HUGE_PROGRAM_NODES` and more are held against none.
EXPERTS_IF_LARGE = (_DATA_PARALLEL, "optimizer sharded (ZeRO-1)")
HUGE_PROGRAM_NODES = 20_000

#: Part of the memory that data parallelism may seem to take for it to be tried as first plan. Of six models that train
#: on 8 devices `_estimate_bytes` says 0.91 to 1.06 times what their plans need.
_LIKELY_FIT_SHARE = 0.9

#: Most axes of the meshes on which they are priced.
_MAX_AXES = 2

Refusal = PlanError | AnnotationError


def find_first_plan(search: Search) -> CandidatePlan | None:
    """Data parallelism, or the fully sharded plan where the other does not fit the memory, or hardly.

    Of a large program it takes most of a second to plan one. The fully sharded one is returned whether it fits or not;
    None where neither can be had.
    """
    if is_likely_to_fit(search, search.cluster.device_count):
        found = build_expert_plan(search, _DATA_PARALLEL)
        if found is not None and search.fits(found):
            return found
    return build_fully_sharded_plan(search)


def build_fully_sharded_plan(search: Search) -> CandidatePlan | None:
    """The fully sharded one, whether it fits or not; None where it cannot be had."""
    return build_expert_plan(search, _FULLY_SHARDED)


def build_expert_plan(search: Search, name: str, why: str = BEST_AT_DEADLINE) -> CandidatePlan | None:
    """The plan of this name on the first mesh that it can be had on, whether it fits or not. why: it is handed out."""
    for mesh, make in _meshes_for_force(search, EXPERTS[name]):
        made = _record_cost(search, name, mesh, make)
        if not isinstance(made, Refusal):
            found = search.evaluate(made.chain, made.solution, made.notes)
            return replace(found, cost=replace(found.cost, bound_scope=_bound_scope(name, why)))
    return None


def is_likely_to_fit(search: Search, devices: int) -> bool:
    """Whether a step of which each of so many devices computes a part, and has all the state, most likely fits."""
    return _estimate_bytes(search, devices) <= _LIKELY_FIT_SHARE * search.limit_bytes


def _estimate_bytes(search: Search, devices: int) -> float:
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


def experts_for(search: Search) -> tuple[str, ...]:
    """Which of them a program is held against, whatever its search found."""
    if search.is_fast:
        return ()
    if not search.is_large or search.options.effort == "best":
        return tuple(EXPERTS)
    return EXPERTS_IF_LARGE if len(search.flow.nodes) < HUGE_PROGRAM_NODES else ()


def price_experts(search: Search, names: Sequence[str]) -> dict[tuple[str, Mesh], Candidate]:
    """What some of them take, memory aside, besides those that are known already."""
    return {
        (name, mesh): _to_candidate(search, name, mesh, make())
        for name in names
        for mesh, make in _meshes_for_force(search, EXPERTS[name])
        if (name, mesh) not in search.expert_costs
    }


def find_faster_expert(search: Search, step_s: float, names: Sequence[str] = tuple(EXPERTS)) -> CandidatePlan | None:
    """The fastest of them that fits the memory and takes less than `step_s`.

    None of them is faster than the best plan on its mesh. But that may not be found, where the memory binds or where
    the program is large and not every mesh is searched to the end.
    """
    best: CandidatePlan | None = None
    for name in names:
        for mesh, make in _meshes_for_force(search, EXPERTS[name]):
            if search.must_stop():
                return best
            known = search.expert_costs.get((name, mesh))
            if known is not None and (known.step_s is None or known.step_s >= step_s):
                continue
            made = _record_cost(search, name, mesh, make)
            if isinstance(made, Refusal) or made.step_s >= step_s:
                continue
            found = _evaluate_if_fits(search, made)
            if found is not None and found.cost.step_s < step_s:
                scope = _bound_scope(name, FASTER_THAN_SEARCH)
                best, step_s = replace(found, cost=replace(found.cost, bound_scope=scope)), found.cost.step_s
    return best


def similarly_fast_experts(search: Search, limit_s: float) -> Iterator[CandidatePlan]:
    """Those that are known to take no longer than `limit_s`, and that fit the memory."""
    for (name, mesh), candidate in list(search.expert_costs.items()):
        if candidate.step_s is None or candidate.step_s > limit_s:
            continue
        for other, make in _meshes_for_force(search, EXPERTS[name]):
            found = _evaluate_if_fits(search, make()) if other == mesh else None
            if found is not None and found.cost.step_s <= limit_s:
                yield replace(found, cost=replace(found.cost, bound_scope=_bound_scope(name, SIMPLER)))


def _bound_scope(name: str, why: str) -> str:
    return f"this is the plan that is known as {name!r}: {why}"


def expert_candidates(search: Search) -> list[Candidate]:
    """What each was found to take on the meshes that it can be had on; or why it cannot be had."""
    prices = search.expert_costs
    return [prices[key] for key in sorted(prices, key=lambda key: list(EXPERTS).index(key[0]))]


def _to_candidate(search: Search, name: str, mesh: Mesh, made: MeshSolution | Refusal) -> Candidate:
    if isinstance(made, Refusal):
        return Candidate(mesh=mesh, step_s=None, note=made.message, name=name)
    return Candidate(mesh=mesh, step_s=search.step_with_overlap_s(made), name=name)


def _record_cost(
    search: Search, name: str, mesh: Mesh, make: Callable[[], MeshSolution | Refusal]
) -> MeshSolution | Refusal:
    """What is made, its price kept for the list of candidates."""
    made = make()
    search.expert_costs[name, mesh] = _to_candidate(search, name, mesh, made)
    return made


def _evaluate_if_fits(search: Search, made: MeshSolution | Refusal) -> CandidatePlan | None:
    """The plan, if there is one and it fits the memory."""
    if isinstance(made, Refusal):
        return None
    found = search.evaluate(made.chain, made.solution, made.notes)
    return found if search.fits(found) else None


def _meshes_for_force(search: Search, force: str) -> Iterator[tuple[Mesh, Callable[[], MeshSolution | Refusal]]]:
    """The meshes that a forced strategy takes, and what makes the best plan that it leaves there."""
    options = replace(search.options, force=force, mode="search")
    try:
        meshes = meshes_to_search(search.cluster, options, search.program.pins)
    except OptionError:
        return
    for mesh in meshes:
        if len(mesh.axes) <= _MAX_AXES:
            try:
                wanted = search.program.resolve_force(options, mesh)
            except (OptionError, PlanError):  # a strategy that needs more axes than there are, or another batch
                continue
            yield mesh, partial(_solve_forced, search, mesh, wanted)


def _solve_forced(search: Search, mesh: Mesh, force: ForcedStrategy) -> MeshSolution | Refusal:
    """With state used as it lies; where that cannot be, with state gathered where it is used; or why not even that."""
    refusal: Refusal | None = None
    for in_place in dict.fromkeys((force.in_place, frozenset())):
        try:
            chain = search.build_chain(mesh, force, in_place)
            return search.to_mesh_solution(chain, chain.solve(search.time_limit_s()), search.flow.notes)
        except OutOfTimeError:
            raise
        except (PlanError, AnnotationError) as error:
            refusal = error
    assert refusal is not None
    return refusal
