"""Messages on memory: the largest values at a plan's peak, the parts of its memory, the reason for a missing plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from shardwright.cost.peak.memory import shard_bytes
from shardwright.errors import MemoryBudgetError, ShardwrightError
from shardwright.planner.clock import Clock
from shardwright.planner.memory.constraint import MemoryConstraint
from shardwright.planner.memory.opaque_calls import REMEDY, OpaqueCalls, find_opaque_calls
from shardwright.planner.plans.assemble import Decisions
from shardwright.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from shardwright.planner.search.mesh_search import MeshSearch
    from shardwright.planner.search.solutions import CandidatePlan

#: Source lines in a message, at most.
_MAX_LINES = 3

#: Factor on the bytes in a remedy: its three digits are then enough.
_ROUNDING_MARGIN = 1.01


def describe_largest_values(peak: MemoryConstraint, decisions: Decisions) -> str:
    """`2.1 GiB of model.py:93, 1.0 GiB of model.py:97`: the source lines with the largest values at a peak."""
    flow, mesh = decisions.graph.flow, decisions.graph.prices.mesh
    bytes_by_line: dict[str, int] = {}
    for node, leaf in peak.values:
        where = flow.module.place(flow.nodes[node].instruction)
        if where and node not in flow.parameters:
            shape = flow.nodes[node].shapes[leaf]
            size = shard_bytes(shape.element_type, shape.dimensions, decisions.result((node, leaf)), mesh)
            bytes_by_line[where] = bytes_by_line.get(where, 0) + size
    largest = sorted(bytes_by_line.items(), key=lambda item: (-item[1], item[0]))[:_MAX_LINES]
    return ", ".join(f"{format_bytes(size)} of {where}" for where, size in largest if size)


def describe_breakdown(parameters: Mapping[str, int], temporaries: int) -> str:
    """`parameters and state 1.2 GiB, activations and the rest 4.0 GiB`, the larger first."""
    parts = {**parameters, "activations, gradients and buffers": temporaries}
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    return ", ".join(f"{what} {format_bytes(size)}" for what, size in ordered if size)


class TooLargeError(MemoryBudgetError):
    """None of the plans seen fits.

    needed: the memory of the smallest plan and its parts, in words.
    needed_bytes: its bytes on a device.
    stored_bytes: the bytes of its arguments.
    """

    needed: str
    needed_bytes: int
    stored_bytes: int


def summarize_error(error: ShardwrightError) -> str:
    """The reason for a missing plan, short enough to be a line of a table."""
    if isinstance(error, TooLargeError):
        return f"does not fit: the least that was found needs {format_bytes(error.needed_bytes)}"
    return error.message


def too_slow_error(plan: CandidatePlan, bound_s: float) -> MemoryBudgetError:
    """The error of a useless bound: every feasible plan takes at least `bound_s` seconds."""
    return MemoryBudgetError(
        f"what fits over {plan.mesh} takes {format_seconds(bound_s)} a step or more", where="memory_budget"
    )


def too_large_error(search: MeshSearch, least: CandidatePlan) -> TooLargeError:
    """The error of an infeasible program: bytes needed, largest values, remedies."""
    needed = search.bytes_needed(least)
    said = _describe_needs(search, least, needed)
    allowed = _ROUNDING_MARGIN * needed
    remedy = f"allow {format_bytes(allowed)} (1 % to spare), make the batch smaller"
    if search.profile.compiler.runs("caps_memory") and allowed > search.profile.memory_bytes:
        remedy = "make the batch smaller"  # no option gives programs more
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
    """Custom calls that block a plan: it might fit with their bytes shared among devices."""
    model = search.memory_model(least.chain.graph.variables.shared_layouts)
    opaque = find_opaque_calls(model.constraint_at_peak(least.decisions), least.decisions)
    if opaque is None:
        return None
    shared = opaque.size_bytes * (1 - 1 / least.mesh.device_count)
    return opaque if shared >= needed - search.limit_bytes else None


def note_deadline(error: TooLargeError, clock: Clock) -> TooLargeError:
    """The same error after a deadline: the search may have missed smaller plans."""
    noted = TooLargeError(
        f"{error.message}; {clock.end} came before a plan that fits",
        where=error.where,
        remedy=f"{error.remedy}, give a longer deadline",
    )
    noted.needed, noted.needed_bytes, noted.stored_bytes = error.needed, error.needed_bytes, error.stored_bytes
    return noted


def _describe_needs(search: MeshSearch, least: CandidatePlan, needed: int) -> str:
    state = sum(
        shard_bytes(v.element_type, v.stored_shape, v.stored_sharding, least.mesh)
        for v in least.parameters
        if v.alias is not None and not v.is_on_host
    )
    parts = describe_breakdown(
        {
            "state": state,
            "other arguments and results": least.memory.arguments_bytes - state + least.memory.outputs_bytes,
            "constants of the program": least.memory.constants_bytes,
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
