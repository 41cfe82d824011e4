"""Certify the search's plan: lower bound, assembly and final rewrites."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from shardwright.attention import read_call
from shardwright.cost import HardwareProfile, bytes_with_margin, predict_memory
from shardwright.cost.attention import runs_fused
from shardwright.errors import PlanCheckError
from shardwright.hlo import Module
from shardwright.planner.clock import OutOfTimeError
from shardwright.planner.constraints.forced import origin
from shardwright.planner.constraints.mesh_unification import scaling_notes
from shardwright.planner.graph.dataflow import Dataflow
from shardwright.planner.offload import note_offload
from shardwright.planner.parallel import ForkedFuture
from shardwright.planner.plans.assemble import segment_plans
from shardwright.planner.plans.attention_savings import price_savings
from shardwright.planner.plans.causes import Causes
from shardwright.planner.plans.collectives import list_collectives
from shardwright.planner.plans.kernel_notes import note_kernels
from shardwright.planner.plans.mixture_notes import note_mixtures
from shardwright.planner.plans.regions import manual_axes_on, region_notes
from shardwright.planner.plans.verify import check_plan
from shardwright.planner.rewrites import drop_idle_views
from shardwright.planner.rewrites.undo_split_dims import undo_split_dims
from shardwright.planner.rewrites.variable_views import with_views as plan_with_views
from shardwright.planner.search.dual_bound import SCOPE_FEASIBLE, SCOPE_TIED, remove_force, tighten_dual_bound
from shardwright.planner.search.mesh_search import MeshSearch
from shardwright.planner.search.multiplier_refinement import constant_cost_s
from shardwright.planner.search.solutions import CandidatePlan
from shardwright.planner.segments.bound import lower_bound
from shardwright.planner.segments.segment_chain import Chain, ChainSolution
from shardwright.planner.tuning import EXACT_RANK, MAX_TIE_SHARE, PARALLEL_TIMEOUT_S
from shardwright.plans.plan import Candidate, InstructionPlan, OptionValue, Plan
from shardwright.plans.shardings import Mesh

if TYPE_CHECKING:
    from shardwright.planner.search.search import Search


class BackgroundBound:
    """Lower bounds of chains; one chain can be bounded ahead on a second core."""

    def __init__(self) -> None:
        self._running: tuple[Chain, ForkedFuture[float]] | None = None

    def start(self, chain: Chain, time_limit_s: float) -> None:
        """Start bounding a chain, replacing any other."""
        self.cancel()
        patience_s = min(PARALLEL_TIMEOUT_S, time_limit_s + 1.0)  # the deadline has then passed here, too
        clock = chain.graph.clock
        work = partial(_compute_bound, chain, time_limit_s)
        self._running = chain, ForkedFuture(work, patience_s=patience_s, is_over=lambda: clock.is_interrupted)

    def bound_of(self, chain: Chain, time_limit_s: float) -> float:
        """`lower_bound` plus the cost of values recomputed per consumer, seconds; 0 when the deadline comes first."""
        if self._running is None or self._running[0] is not chain:
            return _compute_bound(chain, time_limit_s)
        return self._running[1].result()

    def chain_on(self, mesh: Mesh, flow: Dataflow) -> Chain | None:
        """The started chain, when it covers every plan of the program on the mesh. Rematerialized or micro-batched
        variants are programs of their own, slower than the original."""
        if self._running is None:
            return None
        chain = self._running[0]
        is_same = chain.graph.prices.mesh == mesh and chain.graph.flow is flow
        return chain if chain.is_for_bound and is_same else None

    def cancel(self) -> None:
        """Stop the running bound."""
        if self._running is not None:
            self._running[1].cancel()
            self._running = None


def _compute_bound(chain: Chain, time_limit_s: float) -> float:
    clock = chain.graph.clock
    interrupts, clock.may_stop = clock.may_stop, chain.is_for_bound
    try:
        free_s = 0.0 if chain.is_for_bound else chain.graph.min_recompute_s()  # negligible with many strategies
        return lower_bound(chain, time_limit_s) + free_s
    except OutOfTimeError:
        return 0.0
    finally:
        clock.may_stop = interrupts


def bound_plan(search: Search, plan: CandidatePlan, bounding: BackgroundBound) -> CandidatePlan:
    """The plan with a lower bound over all plans on its mesh."""
    cost = plan.cost
    if cost.bound_scope:  # an expert's plan
        return plan if search.clock.is_expired or search.is_fast else _bound_expert_plan(search, plan, bounding)
    if search.carried is not None:
        return replace(
            plan, cost=replace(cost, bound_scope="the decisions are an earlier plan's; no other was searched")
        )
    if search.options.mode == "propagate":
        return replace(plan, cost=replace(cost, bound_scope="nothing was searched: the pins were propagated"))
    if search.is_fast:
        return _bound_by_own_search(search, plan)
    if plan.is_refined:
        return _bound_on_mesh(search, plan, bounding)
    bound_s = _chain_bound_s(search, bounding, plan.chain, plan.solution, plan.dual_bound_s)
    bound_s = max(
        (
            bound_s,
            *(
                _chain_bound_s(search, bounding, solution.chain, solution.solution)
                for solution in plan.relaxed_solutions
            ),
        )
    )
    scope = _bound_scope(search, plan.chain)
    if plan.dual_bound_s:
        scope += SCOPE_FEASIBLE + SCOPE_TIED
    bounded_plan = replace(plan, cost=replace(cost, lower_bound_s=min(bound_s, cost.step_s), bound_scope=scope))
    return search.refine_multipliers(bounded_plan)


def _bound_by_own_search(search: MeshSearch, plan: CandidatePlan) -> CandidatePlan:
    """The plan with its own search's bound: a weak one, of its mesh alone."""
    bound_s = (plan.dual_bound_s or plan.solution.tied_bound) + constant_cost_s(plan.chain.graph)
    scope = f'{_bound_scope(search, plan.chain)}{SCOPE_TIED}; a weak bound, for effort="fast" does nothing to raise it'
    lower_bound_s = max(0.0, min(bound_s, plan.cost.step_s))
    return replace(plan, cost=replace(plan.cost, lower_bound_s=lower_bound_s, bound_scope=scope))


def _bound_expert_plan(search: MeshSearch, plan: CandidatePlan, bounding: BackgroundBound) -> CandidatePlan:
    """An expert's plan with a bound over all feasible plans on its mesh."""
    free = tighten_dual_bound(search, remove_force(search, plan, search.solve_mesh(plan.mesh)))
    bound_s = _chain_bound_s(search, bounding, free.chain, free.solution, free.dual_bound_s)
    scope = f"{plan.cost.bound_scope}; bounded is every plan {_bound_scope(search, free.chain)}"
    if free.dual_bound_s:
        scope += SCOPE_FEASIBLE + SCOPE_TIED
    lower_bound_s = min(bound_s, plan.cost.step_s)
    return replace(plan, cost=replace(plan.cost, lower_bound_s=lower_bound_s, bound_scope=scope))


def _bound_on_mesh(search: Search, plan: CandidatePlan, bounding: BackgroundBound) -> CandidatePlan:
    """A refined plan with a bound over all plans on its mesh and on coarser meshes."""
    cost, time_limit_s = plan.cost, search.time_limit_s()
    chain = bounding.chain_on(plan.mesh, search.flow)
    if chain is None and not search.clock.is_expired:
        chain = search.build_bounding_chain(plan.mesh)
    bound_s = bounding.bound_of(chain, time_limit_s) if chain is not None else 0.0
    if chain is None or bound_s <= 0:
        return _bound_by_coarse_solution(search, plan)
    scope = f"{_bound_scope(search, chain)}; repeats decide each for itself"
    is_followed = search.with_exact_moves(chain, search.max_rank) is chain
    if not is_followed:
        scope += (
            f"; moves of arrays of more than {EXACT_RANK} dimensions, or that an axis does not divide, are counted by "
            "what a device must receive"
        )
    first = replace(cost, lower_bound_s=min(bound_s, cost.step_s), bound_scope=scope)
    plan = replace(plan, cost=first)
    search.report_plan(plan)  # gap closing may take long
    refined_plan = search.refine_multipliers(search.close_gap(plan, chain))
    return replace(refined_plan, missed_target_gap=is_followed or first.gap > search.limits.target_gap)


def _bound_by_coarse_solution(search: MeshSearch, plan: CandidatePlan) -> CandidatePlan:
    """A refined plan with its coarse solution's bound, after a deadline."""
    cost, start, late = plan.cost, plan.coarse_solution, f"{search.clock.end} came before a bound on {plan.mesh}"
    if start is None:
        return replace(plan, cost=replace(cost, bound_scope=late))
    bound_s = start.solution.tied_bound + start.chain.graph.min_recompute_s()
    scope = f"{_bound_scope(search, start.chain)}; {late}"
    return replace(plan, cost=replace(cost, lower_bound_s=bound_s, bound_scope=scope, is_bounded=False))


def _chain_bound_s(
    search: MeshSearch, bounding: BackgroundBound, chain: Chain, solved: ChainSolution, price_bound_s: float = 0.0
) -> float:
    bound_s = price_bound_s or solved.tied_bound
    if chain.runs and not price_bound_s:
        return bounding.bound_of(chain, search.time_limit_s()) - MAX_TIE_SHARE * chain.graph.min_compute_s()
    return bound_s + constant_cost_s(chain.graph)


def _bound_scope(search: MeshSearch, chain: Chain) -> str:
    """Scope of the bound: by this cost model, no plan within it is cheaper."""
    forced_by = f" that {origin(search.options).removeprefix('forced: ')} leaves" if search.options.force else ""
    again = f"these {len(search.recomputation.instructions)} values computed again, " if search.recomputation else ""
    again += "optimizer state on the host, " if search.chose_offload else ""
    again += f"{search.program.micro_batches} micro-batches, " if search.program.micro_batches > 1 else ""
    return (
        f"on mesh {chain.graph.prices.mesh}, {again}one factor or none per axis and instruction{forced_by}, "
        f"{len(search.flow.nodes)} decisions in {len(chain.instances)} segments of {chain.kind_count} kinds; sums "
        "are reduced before the next product, a value has one layout for its readers besides the one it is made "
        "in, and each reader that wants another one pays for that itself"
        + (
            f"; {chain.graph.exposed_fraction:.0%} of the time that gradients move is priced, the rest is hidden"
            if chain.graph.exposed_fraction < 1
            else ", nothing overlaps"
        )
    )


def assemble_plan(search: MeshSearch, winner: CandidatePlan, candidates: tuple[Candidate, ...]) -> Plan:
    decisions, program = winner.decisions, search.program
    collectives = list_collectives(decisions, Causes(search.flow, program.arguments, program.outputs))
    plan = Plan(
        module_name=program.module.name,
        hlo_sha256=hashlib.sha256(program.text.encode()).hexdigest(),
        mesh=winner.mesh,
        hardware=search.profile.name,
        origin=origin(search.options),
        instructions=winner.instructions,
        parameters=winner.parameters,
        outputs=winner.outputs,
        collectives=collectives,
        cost=winner.cost,
        memory=winner.memory,
        candidates=candidates,
        segments=segment_plans(decisions, winner.chain),
        recomputed=search.recomputation.segments if search.recomputation else (),
        micro_batches=program.micro_batches,
        compile_options=_compile_options(search, winner),
        attention=price_savings(program.attention, decisions, search.profile, program.twins),
        manual_axes=manual_axes_on(winner.mesh, program.rules.inside),
        regions=region_notes(program.module, program.rules.inside, collectives),
        kernels=note_kernels(decisions, search.profile, step_s=winner.cost.step_s, peak_bytes=winner.memory.peak_bytes),
        mixtures=note_mixtures(program.mixture_parts, decisions, collectives, program.micro_batches),
        notes=(
            *note_offload(program.on_host, winner.parameters, winner.mesh, search.options.offload == "optimizer"),
            *winner.notes,
            *scaling_notes(program.pins, winner.mesh),
            *_note_replication(winner.instructions),
            *_note_bucket(search),
            *_note_written_out(program.module, search.profile),
        ),
        hlo_text=program.text,
    )
    original = hashlib.sha256(program.original_text.encode()).hexdigest()
    return plan_with_views(plan, program.rewritten, program.original, original)


def _compile_options(search: MeshSearch, plan: CandidatePlan) -> dict[str, OptionValue]:
    """XLA options that the plan's cost assumes: to overlap gradient communication, and the bucket of combined ones."""
    option = search.profile.compiler.hiding_option
    hiding: dict[str, OptionValue] = {option: True} if option and plan.cost.hidden_s else {}
    return hiding | search.profile.bucket_options(search.options.bucket_bytes)


def _note_bucket(search: MeshSearch) -> list[str]:
    """Note of a bucket that the compiler has no option for."""
    bucket_bytes, profile = search.options.bucket_bytes, search.profile
    if bucket_bytes is None or profile.combiner_options:
        return []
    instead = (
        "combines all-reduces of any size" if profile.compiler.runs("merges_all_reduces") else "has its own limits"
    )
    return [f"bucket={bucket_bytes}: no effect, the compiler for {profile.name!r} has no such threshold and {instead}"]


def _note_written_out(module: Module, profile: HardwareProfile) -> list[str]:
    """Note of attention that devices without a kernel of it compute written out."""
    calls = [call for instruction in module.instructions() if (call := read_call(instruction)) is not None]
    count = sum(not runs_fused(call, profile.attention) for call in calls)
    if not count:
        return []
    what = "1 call runs" if count == 1 else f"{count} calls run"
    return [f"attention: {what} written out, {profile.name!r} devices have no fused kernel of it"]


def _note_replication(instructions: tuple[InstructionPlan, ...]) -> list[str]:
    """`3 × cholesky: no strategy rule…`, one note per opcode and reason."""
    counts = Counter((entry.opcode, entry.reason) for entry in instructions if entry.reason)
    return [f"{count} × {opcode}: {reason}" for (opcode, reason), count in sorted(counts.items())]


def _unsplit(module: Module, plan: Plan, written: Module) -> tuple[Module, Plan]:
    """The program before dimension splitting, with its plan when one exists; otherwise both unchanged."""
    unsplit_plan = None if module is written else undo_split_dims(module, plan, written)
    if unsplit_plan is None:
        return module, plan
    try:
        check_plan(written, unsplit_plan)
    except PlanCheckError:
        return module, plan
    return written, unsplit_plan


def remove_idle_views(search: MeshSearch, plan: Plan) -> tuple[Module, Plan]:
    """The planned program and plan without unused views, when that still fits the memory.

    Boundary reshapes take no time, but a compiler may copy donated arguments there.
    """
    module, options, profile = search.program.module, search.options, search.profile
    if not (options.argument_views or options.output_views):
        module, plan = _unsplit(module, plan, search.program.unsplit)
    reduced_module, settled = drop_idle_views(
        module, plan, arguments=options.argument_views, outputs=options.output_views
    )
    if reduced_module is module or not profile.compiler.runs("copies_donated"):
        return reduced_module, settled
    predicted = predict_memory(
        reduced_module, settled.instructions, settled.parameters, settled.outputs, settled.mesh, profile
    )
    if bytes_with_margin(predicted, profile) > search.limit_bytes:
        return module, plan
    return reduced_module, replace(settled, memory=predicted)
