"""Planning nearly the same program again: along the way that led to the plan of the earlier one.

After one more annotation, with another batch or on other nodes the plan is mostly of the same kind as before: the same
mesh, as much computed again, as many micro-batches. Most of a search goes into showing that everything else is
slower. So each whole search leaves a *trail* (`trails`): the meshes that it tried with their times, and the mesh and
the *entry* (what is computed again, in how many micro-batches) that won. A later search for a program of the same
outline (`digests.outline`) takes that way first, with its own rules, prices and bounds: the earlier plan itself is a
start at most, so that a trail can cost time and never make a plan wrong.

Where only more is asked of the same program on the same cluster, no plan becomes faster. So the meshes are searched in
the order of their earlier times, and those whose earlier time is above that of a plan found now are left out. The plan
is taken if it is the fastest one memory aside, or close to the earlier one, which had less to satisfy. That is as
certain as the earlier plans were close to optimal: their times stand for bounds, which are not kept.

With other sizes or devices the search begins at the earlier plan itself, if that has three axes (`earlier`), and tries
no other mesh: that of the plan, or the one most like it. Where that leads to no plan as good, earlier times prove
nothing: the mesh of the plan and those that came near it are searched again, and all where memory bound it. The plan is
taken if it fits as it is and costs no more than the earlier one, grown as the work of a device has grown: compute by
that ratio, communication by it where it is more than one (what moves weights does not grow, what moves activations does
at most so much). That is a judgement, and the plan's notes say so.

Where memory bound the earlier plan, its entry may now be more than is needed, or less. Where a device has as much work
as before or more, whatever keeps more did not fit then and does not now: the plan of the entry is taken if it fits, as
it is or at a price of memory; and that of twice as many parts of the batch, where there is twice the work. Else
everything is searched but for what bounds show to be no faster than such a plan (`Search.followed`).

Else everything is searched; what was searched on the trail is not searched twice.

On the very meshes of the same cluster message passing begins where that of the earlier search ended (`messages`). Where
only more is asked of a large program, a plan that costs as little as was proven before is taken at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardwright.errors import AnnotationError, PlanError
from shardwright.planner.clock import OutOfTimeError
from shardwright.planner.costs.kernels import one_device_s
from shardwright.planner.costs.relaxed_prices import EXACT_RANK
from shardwright.planner.memory.recompute import MIN_SAVING
from shardwright.planner.search.memory_tradeoffs import NO_REMAT, fit_with_remat
from shardwright.planner.search.meshes import meshes_to_search, refines
from shardwright.planner.search.min_memory_plan import MAX_MICRO_BATCHES
from shardwright.planner.search.overlap_cap import enforce_overlap_cap
from shardwright.planner.search.solutions import MIN_GAIN, CandidatePlan, MeshSolution, SearchResult
from shardwright.planner.segments.descent import descend
from shardwright.planner.solver.solve import contradiction_error
from shardwright.planner.solver.warm_start import WarmStart
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
from shardwright.shardings import Mesh

if TYPE_CHECKING:
    from shardwright.planner.search.search import Search
    from shardwright.planner.segments.segment_chain import Chain

#: Part by which a plan may take longer than the earlier one explains: as much as a certified gap may be.
COST_TOLERANCE = 0.01

#: Meshes on which the fastest plan, memory aside, took at most so much longer than on the best one are searched again
#: where sizes or devices are others.
NEAR_FASTEST = 1.03

#: Work of a part of the batch that counts as no less than before, as a part of that: what runs once does not grow with
#: the batch.
_MIN_WORK_SHARE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRestriction:
    """The part of a search that is done again.

    meshes: those searched outright, in this order, but for those where the earlier plan (`least_s`, where less was
    asked) took as long as the fastest one now. entries: the programs that are planned until a plan fits. at_once:
    whether it has to fit the memory as it is, without a price.
    """

    meshes: tuple[Mesh, ...]
    min_step_s: Mapping[Mesh, float]
    remat_choices: tuple[RematChoice, ...]
    without_multipliers: bool

    def may_be_faster(self, mesh: Mesh, tried: Sequence[MeshSolution]) -> bool:
        """Whether a plan on a mesh may take less than those that were found."""
        return all(self.min_step_s.get(mesh, 0.0) < each.step_s for each in tried)


def replan(search: Search, trail: SearchRecord) -> SearchResult | None:
    """The outcome of what is left to search if a trail is followed; None where it leads to no plan, or to one that
    costs more than the trail explains, which the search then knows. Raises OutOfTimeError."""
    for follow in (_descend_from_earlier_plan, _search_restricted):
        try:
            outcome = follow(search, trail)
        except OutOfTimeError:
            raise
        except (PlanError, AnnotationError):
            continue
        if outcome is not None and outcome.best_plan is not None and _is_good_enough(trail, search, outcome):
            outcome.notes.append(_describe_reuse(trail, search, outcome.best_plan))
            return outcome
    return None


def _search_restricted(search: Search, trail: SearchRecord) -> SearchResult | None:
    """What the meshes and entries give that are near those of the earlier plan."""
    route = _build_restriction(trail, search)
    if route is None:
        return None
    made = copy(search)
    made.restriction = route
    return enforce_overlap_cap(fit_with_remat(made.search_meshes()))


def _descend_from_earlier_plan(search: Search, trail: SearchRecord) -> SearchResult | None:
    """What is descended to from the earlier plan itself, if it has three axes; None where it cannot be had any more, or
    what is found does not fit as it is. The bound that it needs is begun meanwhile.

    On another mesh the axes that are as long as before are set free first: the others go on with a part of what they
    did, or more. Of a large program they do only that.
    """
    known = _load_earlier_plan(search, trail)
    mesh = most_similar_mesh(known.mesh, search.three_axis_meshes()) if known is not None else None
    if known is None or mesh is None:
        return None
    search.start_bounding(mesh, search.max_rank if trail.missed_target_gap and mesh == known.mesh else EXACT_RANK)
    chain = search.background_bound.chain_on(mesh, search.flow)
    assert chain is not None, "it was begun"
    fine = search.refine_graph(chain, mesh)
    at = known.translate_to(
        fine, [variable for each in chain.instances for variable in each.variables[: each.own_count]]
    )
    if at is None:
        return None
    search.report("search", str(mesh))
    resized = known.axes_of_other_size(mesh)
    axes = sorted(mesh.sizes, key=lambda axis: axis in resized)
    rounds = len(axes) - len(resized) if resized and search.is_large else None
    near, solved = descend(chain, at, fine, axes, time_limit_s=search.time_limit_s(), most_rounds=rounds)
    found = search.evaluate(near, solved, search.flow.notes)
    if not search.fits(found) or found.overlap_excess_s > MIN_GAIN * found.cost.step_s:
        return None
    search.offer(found)
    tried = MeshSolution(mesh=mesh, step_s=found.cost.step_s, chain=near, solution=solved, notes=found.notes)
    made = SearchResult(
        search=search, solutions=[tried], mesh_errors={}, best_plan=found, remat_choice=trail.remat_choice
    )
    made.base_result = made
    return made


def _load_earlier_plan(search: Search, trail: SearchRecord) -> EarlierPlan | None:
    """The plan of a trail, if it was descended to for the program as it is, and one would be now."""
    is_plain = trail.remat_choice.rung == NO_REMAT and trail.remat_choice.micro_batches == search.program.micro_batches
    may_begin = is_plain and search.refines_to_three_axes and search.is_base_variant
    return (
        search.history.load_plan(trail, opcode_digest(search.flow))
        if search.history is not None and may_begin
        else None
    )


def _is_good_enough(trail: SearchRecord, search: Search, outcome: SearchResult) -> bool:
    """Whether nothing else need be searched."""
    assert outcome.best_plan is not None
    price = measure_cost(search, outcome.best_plan)
    is_explained = _is_cost_explained(trail, price, descends=search.refines_to_three_axes)
    if _is_same_problem(trail, search):
        return _is_fastest(outcome) or is_explained
    if outcome.base_result is outcome:
        return is_explained and _is_fastest(outcome)
    return is_explained and _is_memory_as_tight(trail, search, price, outcome)


def _is_memory_as_tight(trail: SearchRecord, search: Search, price: RecordedCost, outcome: SearchResult) -> bool:
    """Whether what keeps more than the plan of an entry was too large before, and so is now: a device has no less work
    in each part of the batch, and no more memory."""
    before, now = trail.remat_choice, outcome.remat_choice
    assert now is not None
    saves_as_before = (now.rung == NO_REMAT) == (before.rung == NO_REMAT) and now.saved <= before.saved + MIN_SAVING
    part_s = trail.cost.work_s / before.micro_batches
    is_as_large = price.work_s / now.micro_batches >= _MIN_WORK_SHARE * part_s
    return saves_as_before and is_as_large and search.limit_bytes <= trail.limit_bytes


def _is_fastest(outcome: SearchResult) -> bool:
    """Whether the plan is the fastest one of the program as it is, memory aside: no other entry is faster."""
    plain = outcome.base_result
    return plain is outcome and outcome.step_s <= plain.fastest.step_s * (1 + MIN_GAIN)


def save_record(search: Search, outcome: SearchResult) -> None:
    """Keep what a whole search leaves for later ones, once its plan is bounded: nothing where it found none of its
    own."""
    trail = _to_record(search, outcome)
    if search.history is None or search.query is None or trail is None or outcome.best_plan is None:
        return
    search.history.save(trail)
    _save_messages(search.history, search.query, outcome)
    if outcome.best_plan.is_refined and outcome.base_result is outcome:
        plan = EarlierPlan.of(outcome.best_plan.chain.graph, outcome.best_plan.solution.states)
        search.history.save_plan(search.query, opcode_digest(search.flow), plan)


def _to_record(search: Search, outcome: SearchResult) -> SearchRecord | None:
    found, plain = outcome.best_plan, outcome.base_result
    if search.query is None or found is None or plain is None or outcome.remat_choice is None:
        return None
    ways = sorted((MeshRecord.of(each) for each in plain.solutions), key=lambda way: way.step_s)
    won = next(way for way in map(MeshRecord.of, outcome.solutions) if way.matches(found))
    return SearchRecord(
        query=search.query,
        mesh_records=tuple(ways),
        winner=won,
        remat_choice=outcome.remat_choice,
        cost=measure_cost(search, found),
        limit_bytes=search.limit_bytes,
        missed_target_gap=found.missed_target_gap,
    )


def warm_start_chain(search: Search, chain: Chain) -> None:
    """Have message passing over the program as it is begin where that of an earlier search on the same mesh of the same
    cluster ended: on another one prices lie too far apart for that to save rounds. `search.warm_start_notes` says how
    much was known. Where only more is asked of a large program, what costs as little as was proven then is taken at
    once.

    Raises PlanError where the pins contradict each other.
    """
    trails, trail, mesh = search.history, search.record, chain.graph.prices.mesh
    if trails is None or not (search.is_unforced and search.is_base_variant):
        return
    chain.warm_start = WarmStart()
    if trail is None or not _is_same_cluster(trail, search):
        return
    known = trails.load_messages(trail, mesh, opcode_digest(search.flow))
    if known is None:
        return
    try:
        chain.warm_start = known.to_warm_start(chain)
    except ValueError as error:
        raise contradiction_error(error) from None
    alike = sum(chain.warm_start.states.keys() >= set(keys) for _, keys in chain.cores())
    search.warm_start_notes[mesh] = f"{alike} of {len(chain.instances)} segments"
    if _is_same_problem(trail, search) and search.is_large:
        chain.target_s = known.lower_bound_s * (1 + MIN_GAIN)


def _save_messages(trails: SearchHistory, question: SearchQuery, outcome: SearchResult) -> None:
    """Keep where message passing over the program as it is ended on each mesh."""
    for tried in outcome.base_result.solutions if outcome.base_result is not None else ():
        chain = tried.chain
        if tried.coarse_solution is None and chain.warm_start is not None:
            messages = SavedMessages.of(chain, chain.warm_start, tried.solution.tied_bound)
            trails.save_messages(question, tried.mesh, opcode_digest(chain.graph.flow), messages)


def measure_cost(search: Search, found: CandidatePlan) -> RecordedCost:
    """What a plan costs, and the work of the program as it is."""
    return RecordedCost(
        compute_s=found.cost.compute_s, communication_s=found.cost.communication_s, work_s=work_per_device_s(search)
    )


def work_per_device_s(search: Search) -> float:
    """Seconds of all instructions of the program as it is, divided by the devices: what a step takes of each if nothing
    is computed twice."""
    program, kernels = search.program, search.program.kernels
    total_s = sum(
        one_device_s(node, kernels, search.profile, ends_kernel=kernels.ends[node.index])
        for node in program.flow.nodes
        if not node.is_value
    )
    return total_s / search.cluster.device_count


def _is_cost_explained(trail: SearchRecord, now: RecordedCost, *, descends: bool) -> bool:
    """Whether a plan costs no more than that of the trail, grown as the least work has."""
    before = trail.cost
    growth = now.work_s / before.work_s
    expected_s = before.compute_s * growth + before.communication_s * max(1.0, growth)
    if trail.winner.coarse_mesh is not None and not descends:  # no such plan is looked for any more
        expected_s *= max(
            1.0, min(way.step_s for way in trail.mesh_records if way.coarse_mesh is None) / trail.winner.step_s
        )
    return now.step_s <= expected_s * (1 + COST_TOLERANCE)


def _build_restriction(trail: SearchRecord, search: Search) -> SearchRestriction | None:
    """What of a search follows a trail; None where none of its meshes can be had.

    Where only more is asked, all meshes, that of the plan first, then the fastest. All, too, where memory bound the
    plan, for what runs once weighs less in a larger batch. Else the plan's and those near it.
    """
    candidates = meshes_to_search(search.cluster, search.options, search.program.pins)
    if _is_same_problem(trail, search):
        least_s = {mesh: _earlier_step_s(mesh, trail) for mesh in candidates}
        first = _matching_meshes(trail.winner.searched_mesh, len(trail.winner.searched_mesh.axes), candidates)
        ordered = sorted(candidates, key=lambda mesh: (mesh not in first, least_s[mesh]))
        return SearchRestriction(
            meshes=tuple(ordered), min_step_s=least_s, remat_choices=(trail.remat_choice,), without_multipliers=False
        )
    entries = _list_remat_choices(trail, search)
    if entries[0].rung != NO_REMAT or entries[0].micro_batches != search.program.micro_batches:
        return SearchRestriction(
            meshes=tuple(candidates), min_step_s={}, remat_choices=entries, without_multipliers=True
        )
    near = (way for way in trail.mesh_records if way.step_s <= NEAR_FASTEST * trail.mesh_records[0].step_s)
    found: set[Mesh] = set()
    for way in (trail.winner, *near):
        resized = _resize_mesh(way.searched_mesh, search.cluster.device_count)
        found |= (
            set(_matching_meshes(resized, len(way.searched_mesh.axes), candidates)) if resized is not None else set()
        )
    if not found:
        return None
    meshes = tuple(mesh for mesh in candidates if mesh in found)
    return SearchRestriction(meshes=meshes, min_step_s={}, remat_choices=entries, without_multipliers=True)


def _list_remat_choices(trail: SearchRecord, search: Search) -> tuple[RematChoice, ...]:
    """The entry of a trail and, where memory bound its plan and a device has twice the work now, that of twice the
    parts."""
    entry, parts = trail.remat_choice, 2 * trail.remat_choice.micro_batches
    is_plain = entry.rung == NO_REMAT and entry.micro_batches == search.program.micro_batches
    is_free = search.options.micro_batches is None and parts <= MAX_MICRO_BATCHES
    if is_plain or not is_free or work_per_device_s(search) < 2 * _MIN_WORK_SHARE * trail.cost.work_s:
        return (entry,)
    return entry, replace(entry, micro_batches=parts)


def _earlier_step_s(mesh: Mesh, trail: SearchRecord) -> float:
    """What the fastest plan on a mesh took, memory aside: of the mesh itself, or of those of its sizes in any order;
    0 where none was tried."""
    outright = [way for way in trail.mesh_records if way.coarse_mesh is None]
    same = [way.step_s for way in outright if way.mesh == mesh]
    alike = [way.step_s for way in outright if sorted(way.mesh.sizes.values()) == sorted(mesh.sizes.values())]
    return min(same or alike, default=0.0)


def _is_same_problem(trail: SearchRecord, search: Search) -> bool:
    """Whether only more is asked than before."""
    before, now = trail.query, search.query
    return now is not None and (before.sizes, before.cluster) == (now.sizes, now.cluster)


def _is_same_cluster(trail: SearchRecord, search: Search) -> bool:
    return search.query is not None and trail.query.cluster == search.query.cluster


def _resize_mesh(mesh: Mesh, devices: int) -> Mesh | None:
    """The mesh with its first axis, or else its last, as long as so many devices make it; None if neither can be."""
    for resized in (mesh.axes[0], mesh.axes[-1]):
        others = mesh.device_count // resized.size
        if devices % others == 0:
            sizes = {**mesh.sizes, resized.name: devices // others}
            return Mesh.of({name: size for name, size in sizes.items() if size > 1} or sizes)
    return None


def most_similar_mesh(mesh: Mesh, candidates: Sequence[Mesh]) -> Mesh | None:
    """The candidate of the same axes of which most are as long, and one at least; None where there is none."""

    def as_long(candidate: Mesh) -> int:
        return sum(candidate.sizes[axis.name] == axis.size for axis in mesh.axes)

    found = max((each for each in candidates if each.sizes.keys() == mesh.sizes.keys()), key=as_long, default=None)
    return found if found is not None and as_long(found) else None


def _matching_meshes(mesh: Mesh, axes: int, candidates: Sequence[Mesh]) -> list[Mesh]:
    """The mesh itself, or such of `axes` axes as refine it; else candidates of its sizes in another order."""
    if mesh in candidates and len(mesh.axes) == axes:
        return [mesh]
    finer = [each for each in candidates if len(each.axes) == axes and refines(each, mesh)]
    if finer:
        return finer
    return [each for each in candidates if sorted(each.sizes.values()) == sorted(mesh.sizes.values())]


def _describe_reuse(trail: SearchRecord, search: Search, found: CandidatePlan) -> str:
    """What was taken from the earlier search, for the plan."""
    began = search.warm_start_notes.get((found.coarse_solution or found).mesh)
    known = f"; its search began with what was known of {began}" if began else ""
    return _describe_omissions(trail, search, found) + known


def _describe_omissions(trail: SearchRecord, search: Search, found: CandidatePlan) -> str:
    """What was not searched again."""
    before = f"planned like an earlier plan over {trail.winner.mesh}"
    if found.is_refined and found.coarse_solution is None:
        return f'{before}: what that decides was the start, and no other mesh was searched (effort="best" does)'
    if _is_same_problem(trail, search):
        return f"{before} that had less to satisfy: what its search found slower than this plan was not searched again"
    is_plain = trail.remat_choice.rung == NO_REMAT and trail.remat_choice.micro_batches == 1
    slower = (
        f"more than {NEAR_FASTEST - 1:.0%} slower then" if is_plain else "needed more memory then, or computed more,"
    )
    return (
        f"{before} of the same program in other sizes or on other devices: what was {slower} was not searched again "
        '(effort="best" does)'
    )
