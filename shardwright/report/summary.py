"""A plan in a few lines: shardings, traffic, time and memory."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from shardwright.plans.plan import MIXTURES, OFFLOADED, TYPED, MemorySummary, Plan, VariablePlan, count_combined
from shardwright.report.attention import describe_attention
from shardwright.report.groups import is_copy
from shardwright.report.kernels import describe_kernels
from shardwright.report.mixtures import describe_mixtures
from shardwright.report.regions import describe_regions
from shardwright.report.search import certificate
from shardwright.units import format_bytes, format_seconds

#: Arguments besides state that are named one by one.
_SHOWN_INPUTS = 6

#: How the scope of a bound begins where the plan is one that experts write by hand.
_KNOWN_AS = re.compile(r"this is the plan that is known as '([^']+)'")

#: Part of the step from which the time that inputs take to arrive is said.
_MIN_ARRIVAL = 0.01

_SINGULAR = {"tensors": "tensor", "matrices": "matrix", "vectors": "vector"}


def summary(plan: Plan) -> list[tuple[str, str]]:
    """(label, text) per line."""
    cost, memory = plan.cost, plan.memory
    known, unknown = ([note for note in plan.kernels if note.is_known == is_known] for is_known in (True, False))
    wire = sum(collective.wire_bytes * collective.count for collective in plan.collectives)
    chosen = "found by search" if plan.origin == "search" else plan.origin
    match = _KNOWN_AS.match(cost.bound_scope)
    chosen = f"{match[1]}, {chosen}" if match else chosen
    moves = f" + {format_seconds(cost.transfers_s)} to and from the host" if cost.transfers_s else ""
    communication = f"{format_seconds(cost.communication_s)} communication"
    parts = f"{format_seconds(cost.compute_s)} compute{moves} + {communication}"
    arrival_s = _arrival_s(plan)
    parts += f", {format_seconds(arrival_s)} of it for inputs" if arrival_s >= _MIN_ARRIVAL * cost.step_s else ""
    parts += f" ({format_seconds(cost.hidden_s)} more beside compute)" if cost.hidden_s else ""
    return [
        *(("kernels" if not i else "", line) for i, line in enumerate(describe_kernels(unknown))),
        ("mesh", f"{plan.mesh} ({plan.mesh.device_count} devices), {chosen} in {format_seconds(plan.planning_s)}"),
        *_layouts(plan),
        *(("offload", note) for note in plan.notes if note.startswith(OFFLOADED)),
        ("step", f"{format_seconds(cost.step_s)} predicted = {parts}"),
        ("on the wire", f"{format_bytes(wire)} a device and step, {_runs(plan)}" if plan.collectives else "nothing"),
        ("memory", f"{format_bytes(memory.peak_bytes)} peak a device"),
        *_host_memory(memory),
        *(("kernels" if not i else "", line) for i, line in enumerate(describe_kernels(known))),
        *(("attention" if not i else "", line) for i, line in enumerate(describe_attention(plan.attention))),
        *(("mixtures" if not i else "", line) for i, line in enumerate(describe_mixtures(plan.mixtures))),
        *(("regions" if not i else "", line) for i, line in enumerate(describe_regions(plan.regions))),
        *(("experts", note.removeprefix(MIXTURES).strip()) for note in plan.notes if note.startswith(MIXTURES)),
        *(("types", note) for note in plan.notes if note.startswith(TYPED)),
        ("bound", certificate(cost, unknown)),
        ("prices", f"hardware profile {plan.hardware!r}{_describe_compile_options(plan)}"),
    ]


def _host_memory(memory: MemorySummary) -> Iterable[tuple[str, str]]:
    """`host memory 12.0 GiB a device (limit 232 GiB)`, where something lies there."""
    if memory.host_bytes:
        limit = f" (limit {format_bytes(memory.host_limit_bytes)})" if memory.host_limit_bytes else ""
        yield "host memory", f"{format_bytes(memory.host_bytes)} a device{limit}"


def _runs(plan: Plan) -> str:
    """`12 collectives`, `646 collectives, 128 once combined` by the compiler."""
    count, combined_count = sum(collective.count for collective in plan.collectives), count_combined(plan.collectives)
    return f"{count} collectives" + (f", {combined_count} once combined" if combined_count < count else "")


def _describe_compile_options(plan: Plan) -> str:
    """`, compiled with xla_gpu_enable_latency_hiding_scheduler=True`: options assumed by the prices."""
    options = ", ".join(f"{name}={value}" for name, value in plan.compile_options.items())
    return f", compiled with {options}" if options else ""


def _arrival_s(plan: Plan) -> float:
    """Seconds a step of the client's arguments: communication outside the collectives."""
    moving_s = sum(collective.time_s for collective in plan.collectives)
    return plan.cost.communication_s + plan.cost.hidden_s - moving_s


def state_kinds(plan: Plan) -> list[tuple[str, list[VariablePlan]]]:
    """Arguments by kind: those not updated, parameters, and their optimizer state."""
    state = [variable for variable in plan.parameters if variable.alias is not None]
    copies = is_copy(plan.parameters)
    optimizer_state = [variable for variable in state if copies.get(variable.name, False)]
    return [
        ("inputs", [variable for variable in plan.parameters if variable.alias is None]),
        ("parameters", [variable for variable in state if not copies.get(variable.name, False)]),
        ("optimizer", optimizer_state),
    ]


def _layouts(plan: Plan) -> Iterable[tuple[str, str]]:
    """State counted, parameters and optimizer apart; the first few of all other arguments one by one."""
    (_, inputs), *state = state_kinds(plan)
    if inputs:
        shown = [f"{argument.name} {_input(argument, plan)}" for argument in inputs[:_SHOWN_INPUTS]]
        more = f", and {len(inputs) - _SHOWN_INPUTS} more" if len(inputs) > _SHOWN_INPUTS else ""
        yield "inputs", ", ".join(shown) + more
    for kind, variables in state:
        arrays = [variable for variable in variables if variable.user_shape]
        if arrays:
            yield kind, _count_split(arrays, plan)


def _input(variable: VariablePlan, plan: Plan) -> str:
    if variable.sharding.is_replicated:
        return "replicated"
    batch = variable.sharding.dims[0]
    if batch and batch == variable.sharding.axes:
        return f"split along the batch over {'·'.join(batch)} ({plan.mesh.size(batch)}-way)"
    return f"split over {'·'.join(variable.sharding.axes)}"


def _count_split(variables: Sequence[VariablePlan], plan: Plan) -> str:
    """`12 of 16 matrices split over data, 4 replicated; 32 vectors replicated`."""
    parts = []
    vectors = [variable for variable in variables if len(variable.user_shape) == 1]
    others = [variable for variable in variables if len(variable.user_shape) > 1]
    name = "tensors" if any(len(variable.user_shape) > 2 for variable in others) else "matrices"
    for what, members in ((name, others), ("vectors", vectors)):
        if members:
            parts.append(_count_by_split(what, members, plan))
    return "; ".join(parts)


def _count_by_split(what: str, members: Sequence[VariablePlan], plan: Plan) -> str:
    order = [axis.name for axis in plan.mesh.axes]
    over = Counter("·".join(sorted(member.sharding.axes, key=order.index)) for member in members)
    if len(over) == 1:
        (axes,) = over
        counted = f"all {len(members)} {what}" if len(members) > 1 else f"1 {_SINGULAR[what]}"
        return f"{counted} split over {axes}" if axes else f"{counted} replicated"
    texts = [
        f"{count}{f' of {len(members)} {what}' if not i else ''} " + (f"split over {axes}" if axes else "replicated")
        for i, (axes, count) in enumerate(sorted(over.items(), key=lambda item: (not item[0], -item[1], item[0])))
    ]
    return ", ".join(texts)
