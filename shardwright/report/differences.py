"""What differs between two plans: mesh, options, layouts, strategies, collectives, time and memory."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from shardwright.plans.pipeline_plan import PipelinePlan
from shardwright.plans.plan import Plan, PlannedCollective, VariablePlan, count_combined
from shardwright.report.groups import join_names
from shardwright.report.tables import plain_table, plain_text, title
from shardwright.units import format_bytes, format_percent, format_seconds

_NUMBER = re.compile(r"\d+")

#: Stands for what one of the plans does not have.
ABSENT = "–"

#: Section → its title, in the order of the report.
_SECTIONS = {
    "plan": "Plan",
    "cost": "Predicted",
    "strategies": "Strategies of variables",
    "arguments": "Layouts of arguments",
    "outputs": "Layouts of outputs",
    "collectives": "Collectives a step",
}

#: Section → name → what a plan says of it.
_Facts = dict[str, dict[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What two plans say otherwise. names: one, or several of which they say the same. before, after: in words."""

    section: str
    names: tuple[str, ...]
    before: str
    after: str


def compare_plans(before: Plan | PipelinePlan, after: Plan | PipelinePlan) -> tuple[Difference, ...]:
    """The differences of two plans, in the report's order; empty where they are the same plan."""
    one, other = _facts(before), _facts(after)
    changes: dict[tuple[str, str, str], list[str]] = {}
    for section in _SECTIONS:
        for name in dict.fromkeys((*one[section], *other[section])):
            said = one[section].get(name, ABSENT), other[section].get(name, ABSENT)
            if said[0] != said[1]:
                changes.setdefault((section, *said), []).append(name)
    return tuple(
        Difference(section=section, names=tuple(names), before=was, after=now)
        for (section, was, now), names in changes.items()
    )


def explain_differences(before: Plan | PipelinePlan, after: Plan | PipelinePlan, *, width: int = 110) -> str:
    """The differences in plain text of `width` columns."""
    differences = compare_plans(before, after)
    if not differences:
        return "The plans are the same.\n"
    lines: list[RenderableType] = [Text(_verdict(before, after)), Text("")]
    for section, heading in _SECTIONS.items():
        of_section = [difference for difference in differences if difference.section == section]
        if of_section:
            table = plain_table([("", "left"), ("before", "left"), ("after", "left")], fold=("", "before", "after"))
            for difference in of_section:
                table.add_row(Text(_names(difference.names)), Text(difference.before), Text(difference.after))
            lines += [title(heading), table, Text("")]
    return plain_text(Group(*lines), width)


def _names(names: Sequence[str]) -> str:
    """The names, those as one that differ in numbers only."""
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(_NUMBER.sub("#", name), []).append(name)
    return ", ".join(map(join_names, alike.values()))


def _verdict(before: Plan | PipelinePlan, after: Plan | PipelinePlan) -> str:
    steps_s = _step_s(before), _step_s(after)
    change = f" ({format_percent(steps_s[1] / steps_s[0] - 1, '+.1%')})" if steps_s[0] else ""
    was, now = map(format_seconds, steps_s)
    return f"A step is predicted to take {was} before, {now} after{change}."


def _step_s(plan: Plan | PipelinePlan) -> float:
    return plan.step_s if isinstance(plan, PipelinePlan) else plan.cost.step_s


def _facts(plan: Plan | PipelinePlan) -> _Facts:
    facts = _pipeline_facts(plan) if isinstance(plan, PipelinePlan) else _program_facts(plan)
    facts["plan"] |= {
        "program": f"{plan.module_name}, {_program_digest(plan)[:12]}",
        "hardware": plan.hardware,
        "chosen by": plan.origin,
        "micro-batches": str(plan.micro_batches),
    }
    return facts


def _program_digest(plan: Plan | PipelinePlan) -> str:
    """Hash of the user's text."""
    return (isinstance(plan, Plan) and plan.original_sha256) or plan.hlo_sha256


def _program_facts(plan: Plan) -> _Facts:
    cost, memory = plan.cost, plan.memory
    return {
        "plan": {
            "mesh": str(plan.mesh),
            "recomputed values": str(sum(segment.values * segment.repeats for segment in plan.recomputed)),
            **{name: str(value) for name, value in plan.compile_options.items()},
        },
        "cost": {
            "step": format_seconds(cost.step_s),
            "compute": format_seconds(cost.compute_s),
            "communication": format_seconds(cost.communication_s),
            "communication beside compute": format_seconds(cost.hidden_s),
            **({"to and from the host": format_seconds(cost.transfers_s)} if cost.transfers_s else {}),
            **({"host memory a device": format_bytes(memory.host_bytes)} if memory.host_bytes else {}),
            "memory peak a device": format_bytes(memory.peak_bytes),
            "memory of arguments a device": format_bytes(memory.arguments_bytes),
        },
        "strategies": {name: str(strategy) for name, strategy in plan.strategies.items()},
        "arguments": {variable.name: _layout(variable) for variable in plan.parameters},
        "outputs": {variable.name: _layout(variable) for variable in plan.outputs if variable.alias is None},
        "collectives": dict(_collectives(plan.collectives)),
    }


def _pipeline_facts(plan: PipelinePlan) -> _Facts:
    meshes = {f"mesh of stage {stage.number}": str(stage.mesh) for stage in plan.stages}
    return {
        "plan": {"stages": str(len(plan.stages)), "schedule": plan.schedule, **meshes},
        "cost": {
            "step": format_seconds(plan.step_s),
            "idle part of the stages' time": format_percent(plan.bubble_fraction, ".1%"),
            **{
                f"memory peak a device of stage {stage.number}": format_bytes(stage.memory.peak_bytes)
                for stage in plan.stages
            },
        },
        "strategies": {},
        "arguments": {
            f"{entry.variable.name} on stage {entry.stage}": _layout(entry.variable) for entry in plan.arguments
        },
        "outputs": {
            f"{entry.variable.name} on stage {entry.stage}": _layout(entry.variable)
            for entry in plan.outputs
            if entry.alias is None
        },
        "collectives": {
            f"{program.name}: {name}": said
            for program in plan.programs
            for name, said in _collectives(program.plan.collectives)
        },
    }


def _layout(variable: VariablePlan) -> str:
    stored = f", stored as {list(variable.stored_shape)}" if variable.is_padded else ""
    view = f" of a view {list(variable.shape)}" if variable.view_of is not None else ""
    return f"{variable.sharding}{view}{stored}"


def _collectives(collectives: tuple[PlannedCollective, ...]) -> Iterator[tuple[str, str]]:
    """(kind and axes, their number and bytes) in words."""
    if collectives:
        yield "all, once combined by the compiler", str(count_combined(collectives))
    counts: Counter[tuple[str, str]] = Counter()
    sent_bytes: Counter[tuple[str, str]] = Counter()
    for each in collectives:
        counts[each.kind, each.over] += each.count
        sent_bytes[each.kind, each.over] += each.count * each.wire_bytes
    for (kind, over), count in sorted(counts.items()):
        yield f"{kind} over {over}", f"{count}, {format_bytes(sent_bytes[kind, over])} a device"


def differences_as_dict(differences: tuple[Difference, ...]) -> dict[str, Any]:
    """The differences in plain data, for `--json`."""
    rows = [
        {"section": each.section, "names": list(each.names), "before": each.before, "after": each.after}
        for each in differences
    ]
    return {"differences": rows}
