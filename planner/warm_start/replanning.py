"""Warm start: replan a nearly equal program along the record of an earlier search.

One more annotation, another batch or other nodes mostly leave the plan's kind unchanged: same mesh, same
rematerialization, same micro-batches. Most search time goes into excluding alternatives. Each whole search therefore
leaves a record (`search_records`): its meshes with their step times, the winning mesh, and the winning remat choice
(rematerialization, micro-batches). A later search of the same outline (`keys.build_outline`) follows the record first,
with its own rules, costs and bounds. The earlier plan is a starting point at most: a record can cost time, never
correctness.

Same program and cluster, more pins: no plan becomes faster. Meshes are searched in the order of their earlier times;
those above the incumbent are skipped. The plan is accepted when it is the fastest memory aside, or close to the
earlier, less constrained one. Certainty depends on the optimality of the earlier plans: their times stand in place of
bounds, and bounds are not saved.

Other sizes or devices: the search starts from the earlier plan itself when that has three axes (`earlier_plan`), on the
plan's mesh or the most similar one only. Failing that, earlier times prove nothing: the plan's mesh and the
near-fastest ones are searched, or all meshes when memory was binding. The plan is accepted when it fits without a
multiplier and costs no more than the earlier one scaled by the growth of work per device: compute by that ratio,
communication by max(1, ratio) (weight traffic does not grow, activation traffic at most by the ratio). This is a
judgment; the plan's notes say so.

Memory was binding: the earlier remat choice may now be excessive or insufficient. With no less work per device, any
choice keeping more did not fit then and does not now. The choice's plan is accepted when it fits, with or without a
multiplier; with twice the work, twice the micro-batches are tried too. Otherwise everything is searched, except entries
bounded no faster (`restricted_results`).

In all other cases everything is searched, without repeating work done along the record.

On the same meshes of the same cluster, message passing starts from the earlier search's messages (`saved_messages`).
With only more pins on a large program, a plan meeting the earlier lower bound is accepted at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardwright.errors import AnnotationError, PlanError
from shardwright.planner.clock import OutOfTimeError
from shardwright.planner.costs.kernels import one_device_s
from shardwright.planner.memory.tuning import MIN_SAVING
from shardwright.planner.search.memory_tradeoffs import NO_REMAT, fit_with_remat
from shardwright.planner.search.meshes import meshes_to_search, refines
from shardwright.planner.search.overlap_cap import enforce_overlap_cap
from shardwright.planner.search.solutions import CandidatePlan, MeshSolution, SearchResult
from shardwright.planner.search.tuning import MAX_MICRO_BATCHES, MIN_GAIN
from shardwright.planner.segments.descent import descend
from shardwright.planner.solver.solve import contradiction_error
from shardwright.planner.solver.warm_start import WarmStart
from shardwright.planner.tuning import COST_TOLERANCE, EXACT_RANK, MIN_WORK_SHARE, NEAR_FASTEST_RATIO
from shardwright.planner.warm_start.earlier_plan import EarlierPlan
from shardwright.planner.warm_start.saved_messages import SavedMessages, opcode_digest
from shardwright.planner.warm_start.search_records import (
    MeshRecord,
    RecordedCost,
    RematChoice,
    SearchHistory,
    SearchQuery,
    SearchRecord,
)
from shardwright.plans.shardings import Mesh

if TYPE_CHECKING:
    from shardwright.planner.search.search import Search
    from shardwright.planner.segments.segment_chain import Chain


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRestriction:
    """The part of a search to repeat.

    meshes: searched outright, in this order.
    min_step_s: mesh → step time of the earlier, less constrained plan; a mesh is skipped when this reaches the
        incumbent.
    remat_choices: variants, planned until a plan fits.
    without_multipliers: whether the plan must fit without a memory multiplier.
    """

    meshes: tuple[Mesh, ...]
    min_step_s: Mapping[Mesh, float]
    remat_choices: tuple[RematChoice, ...]
    without_multipliers: bool

    def may_be_faster(self, mesh: Mesh, solutions: Sequence[MeshSolution]) -> bool:
        """Whether a plan on the mesh may beat the solutions so far."""
        return all(self.min_step_s.get(mesh, 0.0) < solution.step_s for solution in solutions)


def replan(search: Search, record: SearchRecord) -> SearchResult | None:
    """Result of the restricted search along a record. None when it yields no plan, or one costlier than the record
    explains; the search then knows that plan. Raises OutOfTimeError."""
    for follow in (_descend_from_earlier_plan, _search_restricted):
        try:
            outcome = follow(search, record)
        except OutOfTimeError:
            raise
        except (PlanError, AnnotationError):
            continue
        if outcome is not None and outcome.best_plan is not None and _is_good_enough(record, search, outcome):
            outcome.notes.append(_describe_reuse(record, search, outcome.best_plan))
            return outcome
    return None


def _search_restricted(search: Search, record: SearchRecord) -> SearchResult | None:
    """Result of the meshes and remat choices near the earlier plan's."""
    route = _build_restriction(record, search)
    if route is None:
        return None
    restricted_search = copy(search)
    restricted_search.restriction = route
    return enforce_overlap_cap(fit_with_remat(restricted_search.search_meshes()))


def _descend_from_earlier_plan(search: Search, record: SearchRecord) -> SearchResult | None:
    """Result of a descent from the earlier three-axis plan. None when the plan cannot be translated, or its successor
    does not fit without a multiplier. Its bound is started meanwhile.

    On another mesh the axes of unchanged size are freed first; the resized ones keep a part of their roles, or extend
    them. A large program frees only those.
    """
    earlier_plan = _load_earlier_plan(search, record)
    mesh = most_similar_mesh(earlier_plan.mesh, search.three_axis_meshes()) if earlier_plan is not None else None
    if earlier_plan is None or mesh is None:
        return None
    search.start_bounding(
        mesh, search.max_rank if record.missed_target_gap and mesh == earlier_plan.mesh else EXACT_RANK
    )
    chain = search.background_bound.chain_on(mesh, search.flow)
    assert chain is not None, "it was begun"
    fine = search.refine_graph(chain, mesh)
    at = earlier_plan.translate_to(
        fine, [variable for instance in chain.instances for variable in instance.variables[: instance.own_count]]
    )
    if at is None:
        return None
    search.report("search", str(mesh))
    resized = earlier_plan.axes_of_other_size(mesh)
    axes = sorted(mesh.sizes, key=lambda axis: axis in resized)
    rounds = len(axes) - len(resized) if resized and search.is_large else None
    near, solved = descend(chain, at, fine, axes, time_limit_s=search.time_limit_s(), most_rounds=rounds)
    plan = search.evaluate(near, solved, search.flow.notes)
    if not search.fits(plan) or plan.overlap_excess_s > MIN_GAIN * plan.cost.step_s:
        return None
    search.offer(plan)
    solution = MeshSolution(mesh=mesh, step_s=plan.cost.step_s, chain=near, solution=solved, notes=plan.notes)
    result = SearchResult(
        search=search, solutions=[solution], mesh_errors={}, best_plan=plan, remat_choice=record.remat_choice
    )
    result.base_result = result
    return result


def _load_earlier_plan(search: Search, record: SearchRecord) -> EarlierPlan | None:
    """The record's plan, when it was refined to three axes on the unchanged program and would be now."""
    is_plain = (
        record.remat_choice.rung == NO_REMAT and record.remat_choice.micro_batches == search.program.micro_batches
    )
    may_begin = is_plain and search.refines_to_three_axes and search.is_base_variant
    return (
        search.history.load_plan(record, opcode_digest(search.flow))
        if search.history is not None and may_begin
        else None
    )


def _is_good_enough(record: SearchRecord, search: Search, outcome: SearchResult) -> bool:
    """Whether no further search is needed."""
    assert outcome.best_plan is not None
    price = measure_cost(search, outcome.best_plan)
    is_explained = _is_cost_explained(record, price, descends=search.refines_to_three_axes)
    if _is_same_problem(record, search):
        return _is_fastest(outcome) or is_explained
    if outcome.base_result is outcome:
        return is_explained and _is_fastest(outcome)
    return is_explained and _is_memory_as_tight(record, search, price, outcome)


def _is_memory_as_tight(record: SearchRecord, search: Search, price: RecordedCost, outcome: SearchResult) -> bool:
    """Whether choices keeping more memory did not fit before and do not now: no less work per device and micro-batch,
    no more memory."""
    before, now = record.remat_choice, outcome.remat_choice
    assert now is not None
    saves_as_before = (now.rung == NO_REMAT) == (before.rung == NO_REMAT) and now.saved <= before.saved + MIN_SAVING
    part_s = record.cost.work_s / before.micro_batches
    is_as_large = price.work_s / now.micro_batches >= MIN_WORK_SHARE * part_s
    return saves_as_before and is_as_large and search.limit_bytes <= record.limit_bytes


def _is_fastest(outcome: SearchResult) -> bool:
    """Whether the plan is the unchanged program's fastest, memory aside: no other remat choice is faster."""
    plain = outcome.base_result
    return plain is outcome and outcome.step_s <= plain.fastest.step_s * (1 + MIN_GAIN)


def save_record(search: Search, outcome: SearchResult) -> None:
    """Save a whole search's record once its plan is bounded; nothing without a plan of its own."""
    record = _to_record(search, outcome)
    if search.history is None or search.query is None or record is None or outcome.best_plan is None:
        return
    search.history.save(record)
    _save_messages(search.history, search.query, outcome)
    if outcome.best_plan.is_refined and outcome.base_result is outcome:
        plan = EarlierPlan.of(outcome.best_plan.chain.graph, outcome.best_plan.solution.states)
        search.history.save_plan(search.query, opcode_digest(search.flow), plan)


def _to_record(search: Search, outcome: SearchResult) -> SearchRecord | None:
    plan, plain = outcome.best_plan, outcome.base_result
    if search.query is None or plan is None or plain is None or outcome.remat_choice is None:
        return None
    ways = sorted((MeshRecord.of(solution) for solution in plain.solutions), key=lambda way: way.step_s)
    won = next(way for way in map(MeshRecord.of, outcome.solutions) if way.matches(plan))
    return SearchRecord(
        query=search.query,
        mesh_records=tuple(ways),
        winner=won,
        remat_choice=outcome.remat_choice,
        cost=measure_cost(search, plan),
        limit_bytes=search.limit_bytes,
        missed_target_gap=plan.missed_target_gap,
    )


def warm_start_chain(search: Search, chain: Chain) -> None:
    """Warm-start message passing on the unchanged program from the earlier search on the same mesh and cluster; on
    another cluster costs differ too much to save rounds. `search.warm_start_notes` records the number of segments
    covered. With only more pins on a large program, the earlier lower bound becomes the target.

    Raises PlanError on contradicting pins.
    """
    history, record, mesh = search.history, search.record, chain.graph.prices.mesh
    if history is None or not (search.is_unforced and search.is_base_variant):
        return
    chain.warm_start = WarmStart()
    if record is None or not _is_same_cluster(record, search):
        return
    messages = history.load_messages(record, mesh, opcode_digest(search.flow))
    if messages is None:
        return
    try:
        chain.warm_start = messages.to_warm_start(chain)
    except ValueError as error:
        raise contradiction_error(error) from None
    alike = sum(chain.warm_start.states.keys() >= set(keys) for _, keys in chain.cores())
    search.warm_start_notes[mesh] = f"{alike} of {len(chain.instances)} segments"
    if _is_same_problem(record, search) and search.is_large:
        chain.target_s = messages.lower_bound_s * (1 + MIN_GAIN)


def _save_messages(history: SearchHistory, question: SearchQuery, outcome: SearchResult) -> None:
    """Save the final messages of the unchanged program on each mesh."""
    for solution in outcome.base_result.solutions if outcome.base_result is not None else ():
        chain = solution.chain
        if solution.coarse_solution is None and chain.warm_start is not None:
            messages = SavedMessages.of(chain, chain.warm_start, solution.solution.tied_bound)
            history.save_messages(question, solution.mesh, opcode_digest(chain.graph.flow), messages)


def measure_cost(search: Search, plan: CandidatePlan) -> RecordedCost:
    """Cost of a plan, and the unchanged program's work per device."""
    return RecordedCost(
        compute_s=plan.cost.compute_s + plan.cost.transfers_s,
        communication_s=plan.cost.communication_s,
        work_s=work_per_device_s(search),
    )


def work_per_device_s(search: Search) -> float:
    """Seconds of all instructions of the unchanged program divided by the device count: the compute time of a step
    without redundant work."""
    program, kernels = search.program, search.program.kernels
    total_s = sum(
        one_device_s(node, kernels, search.profile, ends_kernel=kernels.ends[node.index])
        for node in program.flow.nodes
        if not node.is_value
    )
    return total_s / search.cluster.device_count


def _is_cost_explained(record: SearchRecord, now: RecordedCost, *, descends: bool) -> bool:
    """Whether a plan costs at most the record's plan scaled by the growth of work."""
    before = record.cost
    growth = now.work_s / before.work_s
    expected_s = before.compute_s * growth + before.communication_s * max(1.0, growth)
    if record.winner.coarse_mesh is not None and not descends:  # such plans are no longer searched
        expected_s *= max(
            1.0, min(way.step_s for way in record.mesh_records if way.coarse_mesh is None) / record.winner.step_s
        )
    return now.step_s <= expected_s * (1 + COST_TOLERANCE)


def _build_restriction(record: SearchRecord, search: Search) -> SearchRestriction | None:
    """Search restriction of a record; None when none of its meshes is available.

    - Only more pins: all meshes, the plan's first, then by earlier time.
    - Memory was binding: all meshes (fixed costs weigh less in a larger batch).
    - Otherwise: the plan's mesh and the near-fastest ones.
    """
    program = search.program
    candidates = meshes_to_search(search.cluster, search.options, program.pins, program.rules.inside)
    if _is_same_problem(record, search):
        least_s = {mesh: _earlier_step_s(mesh, record) for mesh in candidates}
        first = _matching_meshes(record.winner.searched_mesh, len(record.winner.searched_mesh.axes), candidates)
        ordered = sorted(candidates, key=lambda mesh: (mesh not in first, least_s[mesh]))
        return SearchRestriction(
            meshes=tuple(ordered), min_step_s=least_s, remat_choices=(record.remat_choice,), without_multipliers=False
        )
    entries = _list_remat_choices(record, search)
    if entries[0].rung != NO_REMAT or entries[0].micro_batches != search.program.micro_batches:
        return SearchRestriction(
            meshes=tuple(candidates), min_step_s={}, remat_choices=entries, without_multipliers=True
        )
    near = (way for way in record.mesh_records if way.step_s <= NEAR_FASTEST_RATIO * record.mesh_records[0].step_s)
    found_meshes: set[Mesh] = set()
    for way in (record.winner, *near):
        resized = _resize_mesh(way.searched_mesh, search.cluster.device_count)
        found_meshes |= (
            set(_matching_meshes(resized, len(way.searched_mesh.axes), candidates)) if resized is not None else set()
        )
    if not found_meshes:
        return None
    meshes = tuple(mesh for mesh in candidates if mesh in found_meshes)
    return SearchRestriction(meshes=meshes, min_step_s={}, remat_choices=entries, without_multipliers=True)


def _list_remat_choices(record: SearchRecord, search: Search) -> tuple[RematChoice, ...]:
    """The record's remat choice. When memory was binding and a device now has twice the work: also with twice the
    micro-batches."""
    entry, parts = record.remat_choice, 2 * record.remat_choice.micro_batches
    is_plain = entry.rung == NO_REMAT and entry.micro_batches == search.program.micro_batches
    is_free = search.options.micro_batches is None and parts <= MAX_MICRO_BATCHES
    if is_plain or not is_free or work_per_device_s(search) < 2 * MIN_WORK_SHARE * record.cost.work_s:
        return (entry,)
    return entry, replace(entry, micro_batches=parts)


def _earlier_step_s(mesh: Mesh, record: SearchRecord) -> float:
    """Earlier fastest step on a mesh, memory aside: of the mesh itself, or of meshes with the same sizes in any order;
    0 when none was tried."""
    outright = [way for way in record.mesh_records if way.coarse_mesh is None]
    same = [way.step_s for way in outright if way.mesh == mesh]
    alike = [way.step_s for way in outright if sorted(way.mesh.sizes.values()) == sorted(mesh.sizes.values())]
    return min(same or alike, default=0.0)


def _is_same_problem(record: SearchRecord, search: Search) -> bool:
    """Whether the query only adds pins to the record's."""
    before, now = record.query, search.query
    return now is not None and (before.sizes, before.cluster) == (now.sizes, now.cluster)


def _is_same_cluster(record: SearchRecord, search: Search) -> bool:
    return search.query is not None and record.query.cluster == search.query.cluster


def _resize_mesh(mesh: Mesh, devices: int) -> Mesh | None:
    """The mesh with its first axis, or else its last, resized to the device count; None when neither divides."""
    for resized in (mesh.axes[0], mesh.axes[-1]):
        others = mesh.device_count // resized.size
        if devices % others == 0:
            sizes = {**mesh.sizes, resized.name: devices // others}
            return Mesh.of({name: size for name, size in sizes.items() if size > 1} or sizes)
    return None


def most_similar_mesh(mesh: Mesh, candidates: Sequence[Mesh]) -> Mesh | None:
    """The candidate with the same axes and the most axes of equal size, at least one; None without one."""

    def as_long(candidate: Mesh) -> int:
        return sum(candidate.sizes[axis.name] == axis.size for axis in mesh.axes)

    best_match = max(
        (candidate for candidate in candidates if candidate.sizes.keys() == mesh.sizes.keys()),
        key=as_long,
        default=None,
    )
    return best_match if best_match is not None and as_long(best_match) else None


def _matching_meshes(mesh: Mesh, axes: int, candidates: Sequence[Mesh]) -> list[Mesh]:
    """The mesh itself, or its refinements with `axes` axes; otherwise candidates of its sizes in another order."""
    if mesh in candidates and len(mesh.axes) == axes:
        return [mesh]
    finer = [candidate for candidate in candidates if len(candidate.axes) == axes and refines(candidate, mesh)]
    if finer:
        return finer
    return [candidate for candidate in candidates if sorted(candidate.sizes.values()) == sorted(mesh.sizes.values())]


def _describe_reuse(record: SearchRecord, search: Search, plan: CandidatePlan) -> str:
    """Note of the parts reused from the earlier search."""
    began = search.warm_start_notes.get((plan.coarse_solution or plan).mesh)
    reuse_note = f"; its search began with what was known of {began}" if began else ""
    return _describe_omissions(record, search, plan) + reuse_note


def _describe_omissions(record: SearchRecord, search: Search, plan: CandidatePlan) -> str:
    """Note of the parts not searched again."""
    before = f"planned like an earlier plan over {record.winner.mesh}"
    if plan.is_refined and plan.coarse_solution is None:
        return f'{before}: what that decides was the start, and no other mesh was searched (effort="best" does)'
    if _is_same_problem(record, search):
        return f"{before} that had less to satisfy: what its search found slower than this plan was not searched again"
    is_plain = record.remat_choice.rung == NO_REMAT and record.remat_choice.micro_batches == 1
    slower = (
        f"more than {NEAR_FASTEST_RATIO - 1:.0%} slower then"
        if is_plain
        else "needed more memory then, or computed more,"
    )
    return (
        f"{before} of the same program in other sizes or on other devices: what was {slower} was not searched again "
        '(effort="best" does)'
    )
