"""What messages say of memory: what dominates where a plan takes most, what it is made of, and why none was found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from shardwright.cost.peak.memory import shard_bytes
from shardwright.errors import MemoryBudgetError, ShardwrightError
from shardwright.planner.clock import Clock
from shardwright.planner.memory.constraint import MemoryConstraint
from shardwright.planner.memory.opaque_calls import REMEDY, OpaqueCalls, find_opaque_calls
from shardwright.planner.plans.assemble import Decisions
from shardwright.report.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from shardwright.planner.search.mesh_search import MeshSearch
    from shardwright.planner.search.solutions import CandidatePlan

#: Source lines that a message names, at most.
_MAX_LINES = 3

#: What a remedy adds to bytes, so that the three digits that it names are enough.
_ROUNDING_MARGIN = 1.01


def describe_largest_values(peak: MemoryConstraint, decisions: Decisions) -> str:
    """`2.1 GiB of model.py:93, 1.0 GiB of model.py:97`: the source lines whose values take most at a peak."""
    flow, mesh = decisions.graph.flow, decisions.graph.prices.mesh
    taken: dict[str, int] = {}
    for node, leaf in peak.values:
        where = flow.module.place(flow.nodes[node].instruction)
        if where and node not in flow.parameters:
            shape = flow.nodes[node].shapes[leaf]
            size = shard_bytes(shape.element_type, shape.dimensions, decisions.result((node, leaf)), mesh)
            taken[where] = taken.get(where, 0) + size
    largest = sorted(taken.items(), key=lambda item: (-item[1], item[0]))[:_MAX_LINES]
    return ", ".join(f"{format_bytes(size)} of {where}" for where, size in largest if size)


def describe_breakdown(parameters: Mapping[str, int], temporaries: int) -> str:
    """`parameters and state 1.2 GiB, activations and the rest 4.0 GiB`, the larger first."""
    parts = {**parameters, "activations, gradients and buffers": temporaries}
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    return ", ".join(f"{what} {format_bytes(size)}" for what, size in ordered if size)


class TooLargeError(MemoryBudgetError):
    """No plan that was looked at fits.

    needed: what a device must have for the one that needs least, and what that is made of, in words. needed_bytes: the
    bytes of it. stored_bytes: what arguments take of these.
    """

    needed: str
    needed_bytes: int
    stored_bytes: int


def summarize_error(error: ShardwrightError) -> str:
    """Why there is no plan, as short as a line of a table."""
    if isinstance(error, TooLargeError):
        return f"does not fit: the least that was found needs {format_bytes(error.needed_bytes)}"
    return error.message


def too_slow_error(found: CandidatePlan, bound_s: float) -> MemoryBudgetError:
    """That a plan which fits takes at least so long, which is no use."""
    return MemoryBudgetError(
        f"what fits over {found.mesh} takes {bound_s * 1e3:.3g} ms a step or more", where="memory_budget"
    )


def too_large_error(search: MeshSearch, least: CandidatePlan) -> TooLargeError:
    """What is needed, what dominates, and what would help."""
    needed = search.bytes_needed(least)
    said = _describe_needs(search, least, needed)
    remedy = f"allow {format_bytes(_ROUNDING_MARGIN * needed)} (1 % to spare), make the batch smaller"
    opaque = _find_blocking_calls(search, least, needed)
    if opaque is not None:
        said, remedy = f"{said}; {opaque}", f"{REMEDY}; or {remedy}"
    error = TooLargeError(
        f"no plan over {least.mesh} fits {format_bytes(search.limit_bytes)} a device: {said}",
        where="memory_budget",
        remedy=remedy,
    )
    error.needed, error.needed_bytes, error.stored_bytes = said, needed, least.memory.arguments_bytes
    return error


def _find_blocking_calls(search: MeshSearch, least: CandidatePlan, needed: int) -> OpaqueCalls | None:
    """Custom calls without which the plan might fit, if the devices shared what they keep."""
    model = search.memory_model(least.chain.graph.variables.shared_layouts)
    opaque = find_opaque_calls(model.constraint_at_peak(least.decisions), least.decisions)
    if opaque is None:
        return None
    shared = opaque.size_bytes * (1 - 1 / least.mesh.device_count)
    return opaque if shared >= needed - search.limit_bytes else None


def note_deadline(error: TooLargeError, clock: Clock) -> TooLargeError:
    """The same where a deadline ended the search: it may not have come to what needs less."""
    made = TooLargeError(
        f"{error.message}; the deadline of {clock.deadline_s:g} s came before a plan that fits",
        where=error.where,
        remedy=f"{error.remedy}, give a longer deadline",
    )
    made.needed, made.needed_bytes, made.stored_bytes = error.needed, error.needed_bytes, error.stored_bytes
    return made


def _describe_needs(search: MeshSearch, least: CandidatePlan, needed: int) -> str:
    state = sum(
        shard_bytes(v.element_type, v.stored_shape, v.stored_sharding, least.mesh)
        for v in least.parameters
        if v.alias is not None
    )
    parts = describe_breakdown(
        {
            "state": state,
            "other arguments and results": least.memory.arguments_bytes - state + least.memory.outputs_bytes,
            "kept free for what predictions miss": needed - least.memory.peak_bytes,
        },
        least.memory.temporaries_bytes,
    )
    model = search.memory_model(least.chain.graph.variables.shared_layouts)
    lines = describe_largest_values(model.constraint_at_peak(least.decisions), least.decisions)
    most = f"; of what the program computes, {lines} take most" if lines else ""
    again, parts_of_batch = search.recomputation, search.program.micro_batches
    although = [_describe_recomputation(len(again.instructions))] if again else []
    although += [f"the batch is taken in {parts_of_batch} micro-batches"] if parts_of_batch > 1 else []
    return (
        f"the least that was found needs {format_bytes(needed)} ({parts}{most}), "
        f"at {format_seconds(least.cost.step_s)} a step" + (f", though {' and '.join(although)}" if although else "")
    )


def _describe_recomputation(count: int) -> str:
    return "one value is computed again" if count == 1 else f"{count} values are computed again"
