"""A plan in text: layout per tensor, collectives and bytes a step, memory per device, the search's candidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardwright.cost.peak.memory import shard_bytes
from shardwright.plans.plan import MemorySummary, Plan, VariablePlan
from shardwright.plans.shardings import TensorSharding
from shardwright.report.groups import CollectiveGroup, VariableGroup, group_collectives, group_variables
from shardwright.report.search import (
    bound_section,
    candidates_section,
    group_segments,
    recompute_section,
    segments_section,
)
from shardwright.report.summary import state_kinds, summary
from shardwright.report.tables import plain_grid, print_view, title
from shardwright.report.tables import plain_table as plain_table
from shardwright.report.tables import plain_text as plain_text
from shardwright.report.wrapping import Wrapped
from shardwright.units import format_bytes, format_seconds

#: Groups of collectives shown before the rest is summed up in one row.
_SHOWN_COLLECTIVES = 16


def explain_plan(plan: Plan, *, width: int = 110) -> str:
    """The report of `print_plan` in plain text of `width` columns; more for a table with a long name."""
    return plain_text(render_plan(plan), width)


def print_plan(plan: Plan, console: Console) -> None:
    """Print the report to a rich console."""
    print_view(render_plan(plan), console)


def render_plan(plan: Plan) -> Group:
    """The report in a form printed by rich."""
    return Group(
        *_header(plan),
        *_variables("Arguments", plan.parameters, plan),
        *_variables("Outputs that are not updates of an argument", _fresh(plan.outputs), plan),
        *_collectives(plan),
        *_memory(plan),
        *recompute_section(plan),
        *candidates_section(plan),
        *segments_section(plan),
        *bound_section(plan),
        *_notes(plan),
    )


def as_dict(plan: Plan) -> dict[str, Any]:
    """The report in plain data, for `--json`; units are in the names."""
    return {
        "module": plan.module_name,
        "mesh": plan.mesh.sizes,
        "origin": plan.origin,
        "hardware": plan.hardware,
        "step_s": plan.cost.step_s,
        "compute_s": plan.cost.compute_s,
        "communication_s": plan.cost.communication_s,
        "hidden_s": plan.cost.hidden_s,
        "transfers_s": plan.cost.transfers_s,
        "lower_bound_s": plan.cost.lower_bound_s,
        "gap": plan.cost.gap if plan.cost.is_bounded else None,
        "bound_scope": plan.cost.bound_scope,
        "planning_s": plan.planning_s,
        "arguments": [_variable_dict(group) for group in group_variables(plan.parameters, plan.mesh)],
        "outputs": [_variable_dict(group) for group in group_variables(plan.outputs, plan.mesh)],
        "collectives": [
            {
                "kind": group.kind,
                "axes": list(group.axes),
                "over": group.over,
                "cause": group.cause,
                "count": group.count,
                "payload_bytes": group.payload_bytes,
                "wire_bytes": group.wire_bytes,
                "time_s": group.time_s,
            }
            for group in group_collectives(plan.collectives)
        ],
        "memory": {
            "arguments_bytes": plan.memory.arguments_bytes,
            "outputs_bytes": plan.memory.outputs_bytes,
            "temporaries_bytes": plan.memory.temporaries_bytes,
            "constants_bytes": plan.memory.constants_bytes,
            "peak_bytes": plan.memory.peak_bytes,
            "host_bytes": plan.memory.host_bytes,
            "host_limit_bytes": plan.memory.host_limit_bytes,
            "arguments_by_kind": dict(argument_bytes(plan)),
        },
        "candidates": [
            {
                "name": candidate.name,
                "mesh": candidate.mesh.sizes,
                "step_s": candidate.step_s,
                "note": candidate.note,
            }
            for candidate in plan.candidates
        ],
        "segments": [
            {
                "name": group.first.name,
                "instructions": group.first.instructions,
                "equal": group.count,
                "boundary": [[name, str(sharding)] for name, sharding in group.first.boundary],
            }
            for group in group_segments(plan.segments)
        ],
        "recomputed": [asdict(segment) for segment in plan.recomputed],
        "micro_batches": plan.micro_batches,
        "attention": [asdict(note) for note in plan.attention],
        "regions": [asdict(note) for note in plan.regions],
        "mixtures": [asdict(note) for note in plan.mixtures],
        "notes": list(plan.notes),
    }


def _variable_dict(group: VariableGroup) -> dict[str, Any]:
    return {
        "name": group.name,
        "count": group.count,
        "element_type": group.element_type,
        "shape": list(group.shape),
        "stored_shape": list(group.stored_shape),
        "split": [list(axes) for axes in group.sharding.dims],
        "bytes_per_device": group.bytes_per_device,
        "is_on_host": group.is_on_host,
    }


def _header(plan: Plan) -> list[RenderableType]:
    table = plain_grid("left", "left")
    for label, value in summary(plan):
        table.add_row(Text(label), Text(value))
    return [title(f"Plan of {plan.module_name}"), Padding(table, (0, 0, 1, 2))]


def _variables(heading: str, variables: Sequence[VariablePlan], plan: Plan) -> list[RenderableType]:
    if not variables:
        return []
    groups = group_variables(variables, plan.mesh)
    is_padded = any(group.shape != group.stored_shape for group in groups)
    columns = [("tensor", "left"), ("count", "right"), ("type", "left"), ("split over", "left")]
    columns += [("stored as", "left")] if is_padded else []
    table = plain_table([*columns, ("bytes/device", "right")], fold=("tensor",))
    for group in groups:
        cells = [str(group.count), _type(group.element_type, group.shape)]
        stored = [_type("", group.stored_shape) if group.shape != group.stored_shape else ""] if is_padded else []
        table.add_row(
            Wrapped(group.name),
            *(Text(cell) for cell in cells),
            Text(_describe_place(group).replace(", ", ",\n")),
            *(Text(cell) for cell in (*stored, format_bytes(group.bytes_per_device * group.count))),
        )
    return [title(heading), Padding(table, (0, 0, 1, 2))]


def _describe_place(group: VariableGroup) -> str:
    return describe_split(group.sharding) + (", on the host" if group.is_on_host else "")


def _fresh(outputs: Sequence[VariablePlan]) -> list[VariablePlan]:
    return [output for output in outputs if output.alias is None]


def _type(element_type: str, shape: Sequence[int]) -> str:
    return f"{element_type}[{','.join(map(str, shape))}]"


def describe_split(sharding: TensorSharding) -> str:
    """`dim 0 over data, dim 1 over model`, or `replicated`."""
    parts = [f"dim {dim} over {'·'.join(axes)}" for dim, axes in enumerate(sharding.dims) if axes]
    return ", ".join(parts) or "replicated"


def _collectives(plan: Plan) -> list[RenderableType]:
    heading = title("Collectives, a step")
    groups = group_collectives(plan.collectives)
    if not groups:
        return [heading, Padding(Text("none"), (0, 0, 1, 2))]
    shown, rest = groups[:_SHOWN_COLLECTIVES], groups[_SHOWN_COLLECTIVES:]
    table = plain_table(
        [
            ("collective", "left"),
            ("over", "left"),
            ("why", "left"),
            ("count", "right"),
            ("wire/device", "right"),
            ("time", "right"),
        ],
        fold=("why",),
    )
    for group in shown:
        _add_collectives(table, group.kind, group.over, group.cause, [group])
    if rest:
        _add_collectives(table, f"{len(rest)} more groups", "", "", rest)
    table.add_section()
    _add_collectives(table, "all", "", "", groups)
    return [heading, Padding(table, (0, 0, 1, 2))]


def _add_collectives(table: Table, kind: str, over: str, cause: str, groups: Sequence[CollectiveGroup]) -> None:
    cells = (
        str(sum(group.count for group in groups)),
        format_bytes(sum(group.wire_bytes for group in groups)),
        format_seconds(sum(group.time_s for group in groups)),
    )
    table.add_row(Text(kind), Text(over), Wrapped(cause), *(Text(cell) for cell in cells))


def _memory(plan: Plan) -> list[RenderableType]:
    memory = plan.memory
    table = plain_grid("left", "right")
    for label, size_bytes in (
        ("arguments", memory.arguments_bytes),
        *((f"  {label}", size_bytes) for label, size_bytes in argument_bytes(plan)),
        ("outputs, updates in place left out", memory.outputs_bytes),
        ("temporaries", memory.temporaries_bytes),
        *((("constants, whole", memory.constants_bytes),) if memory.constants_bytes else ()),
        ("peak", memory.peak_bytes),
        *_host_rows(memory),
    ):
        table.add_row(Text(label), Text(format_bytes(size_bytes)))
    return [title("Predicted memory per device"), Padding(table, (0, 0, 1, 2))]


def _host_rows(memory: MemorySummary) -> list[tuple[str, int]]:
    """What lies in the memory of the device's host, where something does."""
    if not memory.host_bytes:
        return []
    return [
        ("on its host", memory.host_bytes),
        ("  arguments", memory.host_arguments_bytes),
        ("  outputs, updates in place left out", memory.host_outputs_bytes),
        ("  temporaries", memory.host_temporaries_bytes),
    ]


def argument_bytes(plan: Plan) -> list[tuple[str, int]]:
    """(kind, bytes in one device's own memory) of inputs, parameters and optimizer state, in storage."""
    return [
        (
            kind,
            sum(
                shard_bytes(v.element_type, v.stored_shape, v.stored_sharding, plan.mesh)
                for v in variables
                if not v.is_on_host
            ),
        )
        for kind, variables in state_kinds(plan)
        if variables
    ]


def _notes(plan: Plan) -> list[RenderableType]:
    if not plan.notes:
        return []
    return [title("Notes"), *(Padding(Text(f"- {note}"), (0, 0, 0, 2)) for note in plan.notes)]
