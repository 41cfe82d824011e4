"""The plan of each benchmark model in short, as compared with the files in `golden/`.

    python -m tests.planner.golden_plans            # write the files (make golden)
    python -m tests.planner.golden_plans vit --print

Models have few layers and their published widths: the plan of one layer is that of many.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax

import shardwright as sw
from benchmarks.planner.suite import cluster_json
from shardwright.clusters.cluster import Cluster
from shardwright.plans.plan import Plan, VariablePlan
from shardwright.report.groups import VariableGroup, group_collectives, group_variables
from shardwright.report.search import group_segments
from shardwright.units import format_bytes, format_seconds
from workloads.models.registry import MODELS

FOLDER = Path(__file__).parent / "golden"
DEVICES = 8

#: Model → its size, what is smaller than there, and options of the plan. Where no mesh is given it is searched.
CASES: dict[str, tuple[str, Mapping[str, Any], Mapping[str, Any]]] = {
    "gpt2": ("124M", {"layers": 2}, {}),
    "llama": ("1B", {"layers": 2}, {"mesh": "2x4"}),
    "moe": ("8e", {"layers": 2}, {"mesh": "2x4"}),
    "bert": ("base", {"layers": 2}, {"mesh": "8"}),
    "vit": ("B16", {"layers": 2}, {"mesh": "8"}),
    "resnet": ("250M", {"blocks": (1, 1, 1, 1)}, {"mesh": "8"}),
    "unet": ("128", {"blocks": 1, "multipliers": (1, 2), "attention_at": (1,)}, {"mesh": "2x4"}),
    "t5": ("base", {"layers": 1}, {"mesh": "2x4"}),
    "lstm": ("1024", {}, {"mesh": "2x4"}),
    "dlrm": ("1M", {"tables": 4}, {"mesh": "8"}),
}


def plan_of(model: str) -> Plan:
    """The plan of a model's case on one node of eight A100, attention as it is written."""
    size, changes, options = CASES[model]
    text = MODELS[model].build(size, DEVICES, **changes).lower().as_text("hlo", debug_info=True)
    cluster = Cluster.from_json(cluster_json(DEVICES, "a100"))
    return sw.plan(text, cluster, cache=False, fused_attention="off", **options)


def golden_text(model: str, plan: Plan) -> str:
    """What is kept of a model's plan: prices, layouts, collectives by cause, segments. No names of instructions
    and no source lines, which change when nothing does."""
    size, changes, _ = CASES[model]
    smaller = ", ".join(f"{name}={value}" for name, value in changes.items())
    wire = sum(each.wire_bytes * each.count for each in plan.collectives)
    beyond = "" if plan.cost.is_bounded else ", of the mesh it was found from"
    lines = [
        f"{model} {size}{f' with {smaller}' if smaller else ''} on {DEVICES} × a100, jax {jax.__version__}",
        f"mesh    {plan.mesh}",
        f"step    {format_seconds(plan.cost.step_s)}, of it communication {format_seconds(plan.cost.communication_s)}",
        f"bound   {format_seconds(plan.cost.lower_bound_s)}{beyond}",
        f"wire    {format_bytes(round(wire))}",
        f"memory  {format_bytes(plan.memory.peak_bytes)}",
        *_variables("arguments", plan.parameters, plan),
        *_variables("outputs", [each for each in plan.outputs if each.alias is None], plan),
        *_collectives(plan),
        "segments",
    ]
    for segment in group_segments(plan.segments):
        handed = ", ".join(str(sharding) for _, sharding in segment.first.boundary)
        lines.append(f"  {segment.count} of {segment.first.instructions} instructions, hands on {handed or 'nothing'}")
    lines += ["notes", *(f"  {note}" for note in plan.notes)] if plan.notes else []
    return "\n".join(lines) + "\n"


def _collectives(plan: Plan) -> list[str]:
    """A line per kind, axes and cause; causes that differ in a source line or in the parameter are one."""
    alike: dict[tuple[str, str, str], list[int]] = {}
    for group in group_collectives(plan.collectives):
        cause = re.sub(r"\.py:\d+(?:(?:,|\.\.)\d+)*", ".py", re.sub(r"(?<=\w)(\[[^\]]*\])+", "[…]", group.cause))
        figures = alike.setdefault((group.kind, group.over, cause), [0, 0])
        figures[0] += group.count
        figures[1] += round(group.wire_bytes)
    return [
        "collectives",
        *(
            f"  {kind} over {axes}, {count} ×, {format_bytes(wire_bytes)}: {cause}"
            for (kind, axes, cause), (count, wire_bytes) in alike.items()
        ),
    ]


def _variables(heading: str, variables: Iterable[VariablePlan], plan: Plan) -> list[str]:
    def layout(group: VariableGroup) -> str:
        stored = f" as {list(group.stored_shape)}" if group.stored_shape != group.shape else ""
        return f"  {group.name} {group.element_type}{list(group.shape)}{stored}: {group.sharding}"

    return [heading, *(layout(group) for group in group_variables(variables, plan.mesh))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"default: {' '.join(CASES)}")
    parser.add_argument("--print", action="store_true", help="print the texts, write nothing")
    arguments = parser.parse_args()
    for model in arguments.models or CASES:
        text = golden_text(model, plan_of(model))
        if arguments.print:
            print(text, end="")
        else:
            path = FOLDER / f"{model}.txt"
            changed = not path.exists() or path.read_text() != text
            path.write_text(text)
            print(f"{model}: {'changed, see git diff' if changed else 'as before'}", flush=True)


if __name__ == "__main__":
    main()
