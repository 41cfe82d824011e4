"""Plans that experts write by hand, as forced strategies: cost baselines, and a first plan of the search."""

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
from shardwright.planner.search.tuning import LIKELY_FIT_SHARE, MAX_EXPERT_AXES
from shardwright.plans.plan import Candidate
from shardwright.plans.shardings import Mesh

if TYPE_CHECKING:
    from shardwright.planner.search.search import Search
    from shardwright.planner.search.solutions import CandidatePlan, MeshSolution

#: Common name → forced strategy.
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

#: Reasons to return an expert's plan: at a deadline, and after the search.
BEST_AT_DEADLINE = "the search, as far as it came, found none faster"
FASTER_THAN_SEARCH = "it is faster than what the search found"
SIMPLER = "what the search found is faster by less than 1 %, and less simple"

_DATA_PARALLEL, _FULLY_SHARDED, REPLICATED = "data parallel", "fully sharded (ZeRO-3)", "replicated"

#: Experts compared with large programs: one axis, hence fast to plan. None from `limits.huge_program_nodes` on.
EXPERTS_IF_LARGE = (_DATA_PARALLEL, "optimizer sharded (ZeRO-1)")


Refusal = PlanError | AnnotationError


def find_first_plan(search: Search) -> CandidatePlan | None:
    """Data parallelism, or the fully sharded plan when data parallelism does not fit or barely does.

    In a large program each plan takes most of a second. The fully sharded one is returned even when it does not fit;
    None when neither exists.
    """
    if is_likely_to_fit(search, search.cluster.device_count):
        plan = build_expert_plan(search, _DATA_PARALLEL)
        if plan is not None and search.fits(plan):
            return plan
    return build_fully_sharded_plan(search)


def build_fully_sharded_plan(search: Search) -> CandidatePlan | None:
    """The fully sharded plan, fitting or not; None without one."""
    return build_expert_plan(search, _FULLY_SHARDED)


def build_expert_plan(search: Search, name: str, why: str = BEST_AT_DEADLINE) -> CandidatePlan | None:
    """The named plan on its first feasible mesh, fitting the memory or not.

    why: the reason of its selection, part of the bound scope.
    """
    for mesh, make in _meshes_for_force(search, EXPERTS[name]):
        solution = _record_cost(search, name, mesh, make)
        if not isinstance(solution, Refusal):
            plan = search.evaluate(solution.chain, solution.solution, solution.notes)
            return replace(plan, cost=replace(plan.cost, bound_scope=_bound_scope(name, why)))
    return None


def is_likely_to_fit(search: Search, devices: int) -> bool:
    """Whether a step split over this many devices, with replicated state, most likely fits."""
    return _estimate_bytes(search, devices) <= LIKELY_FIT_SHARE * search.limit_bytes


def _estimate_bytes(search: Search, devices: int) -> float:
    """Rough bytes per device before any planning: the state, plus the peak of live values divided by the devices.
    Ignores fusion and memory inside running loops."""
    flow, change = search.flow, np.zeros(len(search.flow.nodes) + 1)
    last = {use.source: node.index for node in flow.nodes for use in node.uses}
    arguments = frozenset(flow.parameters)
    for (index, leaf), end in last.items():
        if index not in arguments and end > index:  # loop-carried values count at their producer
            size_bytes = flow.nodes[index].shapes[leaf].size_bytes
            change[index] += size_bytes
            change[end] -= size_bytes
    return float(search.program.state_bytes + np.cumsum(change).max() / devices)


def experts_for(search: Search) -> tuple[str, ...]:
    """Experts compared with a program's search result regardless of its outcome; none on one device, where all plans
    compute the same."""
    if search.is_fast or search.cluster.device_count == 1:
        return ()
    if not search.is_large or search.options.effort == "best":
        return tuple(EXPERTS)
    return EXPERTS_IF_LARGE if len(search.flow.nodes) < search.limits.huge_program_nodes else ()


def price_experts(search: Search, names: Sequence[str]) -> dict[tuple[str, Mesh], Candidate]:
    """Costs of the named experts' plans, memory aside, without those already priced."""
    return {
        (name, mesh): _to_candidate(search, name, mesh, make())
        for name in names
        for mesh, make in _meshes_for_force(search, EXPERTS[name])
        if (name, mesh) not in search.expert_costs
    }


def find_faster_expert(search: Search, step_s: float, names: Sequence[str] = tuple(EXPERTS)) -> CandidatePlan | None:
    """The fastest expert's plan that fits the memory and beats `step_s`.

    None of them beats the optimum on its mesh. But the search may miss that optimum under a binding memory budget, or
    in a large program with meshes not searched to the end.
    """
    best: CandidatePlan | None = None
    for name in names:
        for mesh, make in _meshes_for_force(search, EXPERTS[name]):
            if search.must_stop():
                return best
            candidate = search.expert_costs.get((name, mesh))
            if candidate is not None and (candidate.step_s is None or candidate.step_s >= step_s):
                continue
            solution = _record_cost(search, name, mesh, make)
            if isinstance(solution, Refusal) or (search.expert_costs[name, mesh].step_s or 0.0) >= step_s:
                continue
            plan = _evaluate_if_fits(search, name, solution)
            if plan is not None and plan.cost.step_s < step_s:
                scope = _bound_scope(name, FASTER_THAN_SEARCH)
                best, step_s = replace(plan, cost=replace(plan.cost, bound_scope=scope)), plan.cost.step_s
    return best


def similarly_fast_experts(search: Search, limit_s: float) -> Iterator[CandidatePlan]:
    """Experts' plans within `limit_s` and the memory budget."""
    for (name, mesh), candidate in list(search.expert_costs.items()):
        if candidate.step_s is None or candidate.step_s > limit_s:
            continue
        for other, make in _meshes_for_force(search, EXPERTS[name]):
            if other != mesh:
                continue
            known = search.expert_solutions.get((search.program, search.hidden_share, name, mesh))
            plan = _evaluate_if_fits(search, name, make() if known is None else known)
            if plan is not None and plan.cost.step_s <= limit_s:
                yield replace(plan, cost=replace(plan.cost, bound_scope=_bound_scope(name, SIMPLER)))


def _bound_scope(name: str, why: str) -> str:
    return f"this is the plan that is known as {name!r}: {why}"


def expert_candidates(search: Search) -> list[Candidate]:
    """Costs of all experts per feasible mesh, or the reason of infeasibility."""
    prices = search.expert_costs
    return [prices[key] for key in sorted(prices, key=lambda key: list(EXPERTS).index(key[0]))]


def _to_candidate(search: Search, name: str, mesh: Mesh, outcome: MeshSolution | Refusal) -> Candidate:
    if isinstance(outcome, Refusal):
        return Candidate(mesh=mesh, step_s=None, note=outcome.message, name=name)
    return Candidate(mesh=mesh, step_s=search.predict_step_s(outcome), name=name)


def _record_cost(
    search: Search, name: str, mesh: Mesh, make: Callable[[], MeshSolution | Refusal]
) -> MeshSolution | Refusal:
    """The solution; its cost is recorded among the candidates. Of a program that is not large the solution is kept."""
    solution = make()
    if not isinstance(solution, Refusal) and not search.is_large:
        search.expert_solutions[search.program, search.hidden_share, name, mesh] = solution
    search.expert_costs[name, mesh] = _to_candidate(search, name, mesh, solution)
    return solution


def _evaluate_if_fits(search: Search, name: str, outcome: MeshSolution | Refusal) -> CandidatePlan | None:
    """The plan, when it exists and fits the memory; recorded when it does not fit."""
    if isinstance(outcome, Refusal):
        return None
    plan = search.evaluate(outcome.chain, outcome.solution, outcome.notes)
    if search.fits(plan):
        return plan
    search.expert_misfits.add((name, plan.mesh))
    return None


def _meshes_for_force(search: Search, force: str) -> Iterator[tuple[Mesh, Callable[[], MeshSolution | Refusal]]]:
    """Meshes of a forced strategy, each with a function solving it there."""
    options = replace(search.options, force=force, mode="search")
    try:
        program = search.program
        meshes = meshes_to_search(search.cluster, options, program.pins, program.rules.inside)
    except OptionError:
        return
    for mesh in meshes:
        if len(mesh.axes) <= MAX_EXPERT_AXES:
            try:
                wanted = search.program.resolve_force(options, mesh)
            except (OptionError, PlanError):  # needs more axes, or another batch
                continue
            yield mesh, partial(_solve_forced, search, mesh, wanted)


def _solve_forced(search: Search, mesh: Mesh, force: ForcedStrategy) -> MeshSolution | Refusal:
    """Solution with state used in place; otherwise with state gathered at its uses; otherwise the error."""
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
