"""From what the search found to the plan that is handed out: bounded and written down."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import replace
from functools import partial

from shardwright.cost import memory, required_bytes
from shardwright.errors import PlanCheckError
from shardwright.hlo import Module
from shardwright.planner.clock import OutOfTimeError
from shardwright.planner.constraints.forced import origin
from shardwright.planner.constraints.mesh_unification import scaling_notes
from shardwright.planner.costs.relaxed_prices import EXACT_RANK
from shardwright.planner.graph.dataflow import Dataflow
from shardwright.planner.parallel import PATIENCE_S, Ahead
from shardwright.planner.plans.assemble import segment_plans
from shardwright.planner.plans.causes import Causes
from shardwright.planner.plans.collectives import list_collectives
from shardwright.planner.plans.verify import check_plan
from shardwright.planner.rewrites import drop_idle_views
from shardwright.planner.rewrites.undo_split_dims import undo_split_dims
from shardwright.planner.rewrites.variable_views import with_views as plan_with_views
from shardwright.planner.search.closing import MOST_OPEN, closed
from shardwright.planner.search.found import Found
from shardwright.planner.search.memory_bound import ALIKE, OF_WHAT_FITS, bounded_by_price, freed
from shardwright.planner.search.mesh_search import MeshSearch
from shardwright.planner.search.refining import beside_s, refined
from shardwright.planner.segments.bound import lower_bound
from shardwright.planner.segments.chain import Chain, SolvedChain
from shardwright.planner.strategies.tie_break import MAX_SHARE
from shardwright.plans import Candidate, InstructionPlan, OptionValue, Plan
from shardwright.shardings import Mesh


class Bounding:
    """Lower bounds of chains; that of one chain can be begun ahead, on a second core."""

    def __init__(self) -> None:
        self._begun: tuple[Chain, Ahead[float]] | None = None

    def begin(self, chain: Chain, time_limit_s: float) -> None:
        """Bound a chain from now on, instead of another one."""
        self.cancel()
        patience_s = min(PATIENCE_S, time_limit_s + 1.0)  # then it is late here, too
        self._begun = chain, Ahead(partial(_bound, chain, time_limit_s), patience_s=patience_s)

    def of(self, chain: Chain, time_limit_s: float) -> float:
        """`lower_bound` with what is made anew for its readers; 0 where a deadline comes first."""
        if self._begun is None or self._begun[0] is not chain:
            return _bound(chain, time_limit_s)
        return self._begun[1].result()

    def begun_on(self, mesh: Mesh, flow: Dataflow) -> Chain | None:
        """The chain that was begun, if it is one of every plan of a program on a mesh: what computes values again or
        takes the batch in parts is a program of its own, and takes more than the one as given."""
        if self._begun is None:
            return None
        chain = self._begun[0]
        is_same = chain.graph.prices.mesh == mesh and chain.graph.flow is flow
        return chain if chain.is_for_bound and is_same else None

    def cancel(self) -> None:
        """Leave off bounding what was begun."""
        if self._begun is not None:
            self._begun[1].cancel()
            self._begun = None


def _bound(chain: Chain, time_limit_s: float) -> float:
    clock = chain.graph.clock
    interrupts, clock.interrupts = clock.interrupts, chain.is_for_bound
    try:
        free_s = 0.0 if chain.is_for_bound else chain.graph.least_of_free_s()  # hardly anything, for many strategies
        return lower_bound(chain, time_limit_s) + free_s
    except OutOfTimeError:
        return 0.0
    finally:
        clock.interrupts = interrupts


def bounded(search: MeshSearch, found: Found, bounding: Bounding) -> Found:
    """The same with a lower bound on what any plan on its mesh costs."""
    cost = found.cost
    if cost.bound_scope:  # no search found it
        return found if search.clock.is_late or search.is_fast else _bounded_freely(search, found, bounding)
    if search.options.mode == "propagate":
        return replace(found, cost=replace(cost, bound_scope="nothing was searched: the pins were propagated"))
    if search.is_fast:
        return _bounded_at_once(search, found)
    if found.is_descended:
        return _bounded_on_its_mesh(search, found, bounding)
    bound_s = _bound_s(search, bounding, found.chain, found.solved, found.price_bound_s)
    bound_s = max((bound_s, *(_bound_s(search, bounding, each.chain, each.solved) for each in found.relaxed)))
    scope = _scope(search, found.chain)
    if found.price_bound_s:
        scope += OF_WHAT_FITS + ALIKE
    made = replace(found, cost=replace(cost, lower_bound_s=min(bound_s, cost.step_s), bound_scope=scope))
    return refined(search, made)


def _bounded_at_once(search: MeshSearch, found: Found) -> Found:
    """A plan with the bound that its own search ended at: a weak one, of its mesh alone."""
    bound_s = (found.price_bound_s or found.solved.rolled_bound) + beside_s(found.chain.graph)
    scope = f'{_scope(search, found.chain)}{ALIKE}; a weak bound, for effort="fast" does nothing to raise it'
    lower_bound_s = max(0.0, min(bound_s, found.cost.step_s))
    return replace(found, cost=replace(found.cost, lower_bound_s=lower_bound_s, bound_scope=scope))


def _bounded_freely(search: MeshSearch, found: Found, bounding: Bounding) -> Found:
    """A plan that an expert would write, with a bound on all plans on its mesh that fit the memory."""
    free = bounded_by_price(search, freed(search, found, search.on_mesh(found.mesh)))
    bound_s = _bound_s(search, bounding, free.chain, free.solved, free.price_bound_s)
    scope = f"{found.cost.bound_scope}; bounded is every plan {_scope(search, free.chain)}"
    if free.price_bound_s:
        scope += OF_WHAT_FITS + ALIKE
    lower_bound_s = min(bound_s, found.cost.step_s)
    return replace(found, cost=replace(found.cost, lower_bound_s=lower_bound_s, bound_scope=scope))


def _bounded_on_its_mesh(search: MeshSearch, found: Found, bounding: Bounding) -> Found:
    """A plan that was descended to, with a bound on all plans on its mesh and on those that this one refines."""
    cost, time_limit_s = found.cost, search.time_limit_s()
    chain = bounding.begun_on(found.mesh, search.flow)
    if chain is None and not search.clock.is_late:
        chain = search.chain_to_bound(found.mesh)
    bound_s = bounding.of(chain, time_limit_s) if chain is not None else 0.0
    if chain is None or bound_s <= 0:
        return _bounded_by_its_start(search, found)
    scope = f"{_scope(search, chain)}; repeats decide each for itself"
    is_followed = search.following(chain, search.most_rank) is chain
    if not is_followed:
        scope += (
            f"; moves of arrays of more than {EXACT_RANK} dimensions, or that an axis does not divide, are counted by "
            "what a device must receive"
        )
    first = replace(cost, lower_bound_s=min(bound_s, cost.step_s), bound_scope=scope)
    found = replace(found, cost=first)
    search.tell_of(found)  # closing what is open may take long
    made = refined(search, closed(search, found, chain))
    return replace(made, was_open=is_followed or first.gap > MOST_OPEN)


def _bounded_by_its_start(search: MeshSearch, found: Found) -> Found:
    """The same with what is known of the plan that it was descended from, where a deadline came before more was."""
    cost, start, late = found.cost, found.start, f"the deadline came before a bound on {found.mesh}"
    if start is None:
        return replace(found, cost=replace(cost, bound_scope=late))
    bound_s = start.solved.rolled_bound + start.chain.graph.least_of_free_s()
    scope = f"{_scope(search, start.chain)}; {late}"
    return replace(found, cost=replace(cost, lower_bound_s=bound_s, bound_scope=scope, is_bounded=False))


def _bound_s(
    search: MeshSearch, bounding: Bounding, chain: Chain, solved: SolvedChain, price_bound_s: float = 0.0
) -> float:
    bound_s = price_bound_s or solved.rolled_bound
    if chain.runs and not price_bound_s:
        return bounding.of(chain, search.time_limit_s()) - MAX_SHARE * chain.graph.least_s()
    return bound_s + beside_s(chain.graph)


def _scope(search: MeshSearch, chain: Chain) -> str:
    """What the bound is of: no plan within this scope is cheaper, by this cost model."""
    forced_by = f" that {origin(search.options).removeprefix('forced: ')} leaves" if search.options.force else ""
    again = f"these {len(search.recomputation.instructions)} values computed again, " if search.recomputation else ""
    again += f"{search.program.micro_batches} micro-batches, " if search.program.micro_batches > 1 else ""
    return (
        f"on mesh {chain.graph.prices.mesh}, {again}one factor or none per axis and instruction{forced_by}, "
        f"{len(search.flow.nodes)} decisions in {len(chain.instances)} segments of {chain.kind_count} kinds; sums "
        "are reduced before the next product, a value has one layout for its readers besides the one it is made "
        "in, and each reader that wants another one pays for that itself"
        + (
            f"; {chain.graph.exposed:.0%} of the time that gradients move is priced, the rest is hidden"
            if chain.graph.exposed < 1
            else ", nothing overlaps"
        )
    )


def assembled(search: MeshSearch, found: Found, candidates: tuple[Candidate, ...]) -> Plan:
    decisions, program = found.decisions, search.program
    made = Plan(
        module_name=program.module.name,
        hlo_sha256=hashlib.sha256(program.text.encode()).hexdigest(),
        mesh=found.mesh,
        hardware=search.profile.name,
        origin=origin(search.options),
        instructions=found.instructions,
        parameters=found.parameters,
        outputs=found.outputs,
        collectives=list_collectives(decisions, Causes(search.flow, program.arguments, program.outputs)),
        cost=found.cost,
        memory=found.memory,
        candidates=candidates,
        segments=segment_plans(decisions, found.chain),
        recomputed=search.recomputation.segments if search.recomputation else (),
        micro_batches=program.micro_batches,
        compile_options=_compile_options(search, found),
        notes=(*found.notes, *scaling_notes(program.pins, found.mesh), *_replicated_notes(found.instructions)),
        hlo_text=program.text,
    )
    original = hashlib.sha256(program.original_text.encode()).hexdigest()
    return plan_with_views(made, program.rewritten, program.original, original)


def _compile_options(search: MeshSearch, found: Found) -> dict[str, OptionValue]:
    """What XLA must be told for gradients to move beside compute, where a plan's price says that they do."""
    option = search.profile.compiler.hiding_option
    return {option: True} if option and found.cost.hidden_s else {}


def _replicated_notes(instructions: tuple[InstructionPlan, ...]) -> list[str]:
    """`3 × cholesky: no strategy rule…`, one note per opcode and reason."""
    counts = Counter((entry.opcode, entry.reason) for entry in instructions if entry.reason)
    return [f"{count} × {opcode}: {reason}" for (opcode, reason), count in sorted(counts.items())]


def _unsplit(module: Module, plan: Plan, written: Module) -> tuple[Module, Plan]:
    """The program before dimensions were written as two and its plan, where that is one; else both as they are."""
    made = None if module is written else undo_split_dims(module, plan, written)
    if made is None:
        return module, plan
    try:
        check_plan(written, made)
    except PlanCheckError:
        return module, plan
    return written, made


def as_stored(search: MeshSearch, plan: Plan) -> tuple[Module, Plan]:
    """The planned program and its plan without the views that it makes no use of, where that fits the memory too.

    Reshapes at the boundary take no time, but a compiler may copy donated arguments for them.
    """
    module, options, profile = search.program.module, search.options, search.profile
    if not (options.argument_views or options.output_views):
        module, plan = _unsplit(module, plan, search.program.unsplit)
    made, settled = drop_idle_views(module, plan, arguments=options.argument_views, outputs=options.output_views)
    if made is module or not profile.compiler.copies_donated:
        return made, settled
    predicted = memory(made, settled.instructions, settled.parameters, settled.outputs, settled.mesh, profile)
    if required_bytes(predicted, profile) > search.limit_bytes:
        return module, plan
    return made, replace(settled, memory=predicted)
