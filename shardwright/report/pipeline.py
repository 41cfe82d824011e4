"""A PipelinePlan in text: stages, the schedule's picture, transfers, compared candidates."""

from __future__ import annotations

from collections import defaultdict

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from shardwright.plans.pipeline_plan import UNEVEN, PipelineCandidate, PipelinePlan, PipelineStage
from shardwright.report.attention import describe_attention
from shardwright.report.schedule import schedule_picture
from shardwright.report.tables import plain_table, plain_text, print_view, title
from shardwright.report.wrapping import Wrapped
from shardwright.tasks import simulate
from shardwright.units import format_bytes, format_percent, format_seconds

#: Rows of a table before the rest is only counted.
_SHOWN = 16


def explain_pipeline(plan: PipelinePlan, *, width: int = 110) -> str:
    """The report of `print_pipeline` in plain text of `width` columns; more for wide tables."""
    return plain_text(render_pipeline(plan, width), width)


def print_pipeline(plan: PipelinePlan, console: Console) -> None:
    """Print the report to a rich console."""
    print_view(render_pipeline(plan, console.width), console)


def render_pipeline(plan: PipelinePlan, width: int) -> Group:
    """The report in a form printed by rich."""
    return Group(
        *_header(plan),
        *_stages(plan),
        *_schedule(plan, width),
        *_transfers(plan),
        *_reductions(plan),
        *_candidates(plan),
        *_notes(plan),
    )


def _header(plan: PipelinePlan) -> list[RenderableType]:
    count = f"{len(plan.stages)} stages on {plan.device_count} devices, {plan.micro_batches} micro-batches"
    idle = f"{format_percent(plan.bubble_fraction, '.1%')} of the stages' time is idle"
    rows = [
        ("pipeline", f"{count}, {plan.schedule}"),
        ("step", f"{format_seconds(plan.step_s)} predicted; {idle}"),
        ("programs", f"{len(plan.programs)}, planned in {format_seconds(plan.planning_s)}"),
        *(("attention" if not i else "", line) for i, line in enumerate(describe_attention(plan.attention))),
        ("prices", f"hardware profile {plan.hardware!r}"),
    ]
    table = plain_table([("", "left"), ("", "left")], fold=("",))
    table.show_header = False
    for label, text in rows:
        table.add_row(Text(label), Wrapped(text))
    return [title(f"Plan of {plan.module_name}"), Padding(table, (0, 0, 1, 2))]


def _stages(plan: PipelinePlan) -> list[RenderableType]:
    columns = [("stage", "right"), ("devices", "left"), ("mesh", "left"), ("chunks", "left"), ("computes", "right")]
    columns += [("variables", "right"), ("peak", "right")]
    table = plain_table(columns, fold=("mesh",))
    for stage in plan.stages[:_SHOWN]:
        table.add_row(*_stage(stage))
    below = [f"and {len(plan.stages) - _SHOWN} more"] if len(plan.stages) > _SHOWN else []
    below += [note for note in plan.notes if note.startswith(UNEVEN)]
    lines = [Padding(Text(line), (0, 0, 0, 2)) for line in below]
    return [title("Stages"), Padding(table, (0, 0, 0 if lines else 1, 2)), *lines, *([Text()] if lines else [])]


def _stage(stage: PipelineStage) -> tuple[RenderableType, ...]:
    devices = f"{stage.devices.start}" if len(stage.devices) == 1 else f"{stage.devices.start}-{stage.devices.stop - 1}"
    return (
        Text(str(stage.number)),
        Text(devices),
        Wrapped(str(stage.mesh)),
        Text(", ".join(map(str, stage.chunks))),
        Text(format_seconds(stage.busy_s)),
        Text(format_bytes(stage.memory.arguments_bytes)),
        Text(format_bytes(stage.memory.peak_bytes)),
    )


def _schedule(plan: PipelinePlan, width: int) -> list[RenderableType]:
    lines = schedule_picture(plan.tasks, simulate(plan.tasks), width=max(40, width - 2))
    return [title("Schedule"), Padding(Text("\n".join(lines), no_wrap=True), (0, 0, 1, 2))] if lines else []


def _transfers(plan: PipelinePlan) -> list[RenderableType]:
    """Per pair of stages, the transfers of a step: bytes of one sending device."""
    sent: dict[tuple[int, int], list[int]] = defaultdict(list)
    for here, task in plan.tasks.tasks():
        if task.kind == "send" and task.peer is not None:
            sent[here.stage, task.peer].append(plan.tasks.sent_bytes.get(task.reads[0].value, 0))
    if not sent:
        return []
    table = plain_table(
        [("from", "right"), ("to", "right"), ("transfers a step", "right"), ("a device sends", "right")]
    )
    for (source, target), sizes in sorted(sent.items())[:_SHOWN]:
        table.add_row(str(source), str(target), str(len(sizes)), format_bytes(sum(sizes)))
    return [title("Sent between stages"), Padding(table, (0, 0, 1, 2))]


def _reductions(plan: PipelinePlan) -> list[RenderableType]:
    """Per kind of program the collectives of one step."""
    totals: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    per_micro_batch = {"split", "forward", "backward", "weight", "accumulate"}
    for program in plan.programs:
        times = plan.micro_batches if program.kind in per_micro_batch else 1
        for planned in program.plan.collectives:
            row = totals[program.kind, planned.kind, planned.over]
            row[0] += planned.count * times
            row[1] += planned.wire_bytes * planned.count * times
    if not totals:
        return []
    columns = [("in", "left"), ("collective", "left"), ("over", "left"), ("times", "right"), ("wire bytes", "right")]
    table = plain_table(columns)
    for (kind, collective, over), (count, wire) in sorted(totals.items()):
        table.add_row(kind, collective, over, str(count), format_bytes(wire))
    return [title("Collectives a step, all stages together"), Padding(table, (0, 0, 1, 2))]


def _candidates(plan: PipelinePlan) -> list[RenderableType]:
    if not plan.candidates:
        return []
    columns = [("stages", "right"), ("mesh of each", "left"), ("micro-batches", "right"), ("schedule", "left")]
    columns += [("predicted step", "right"), ("idle", "right"), ("note", "left")]
    table = plain_table(columns, fold=("mesh of each", "note"))
    ranked = sorted(plan.candidates, key=lambda candidate: (candidate.step_s is None, candidate.step_s or 0.0))
    for candidate in ranked[:_SHOWN]:
        table.add_row(*_candidate(candidate))
    hidden = len(ranked) - _SHOWN
    more = [Padding(Text(f"and {hidden} more"), (0, 0, 1, 2))] if hidden > 0 else []
    return [title("Pipelines considered"), Padding(table, (0, 0, 0 if more else 1, 2)), *more]


def _candidate(candidate: PipelineCandidate) -> tuple[RenderableType, ...]:
    is_simulated = candidate.step_s is not None and candidate.bubble_fraction > 0
    return (
        Text(str(candidate.stages)),
        Wrapped(str(candidate.mesh)),
        Text(str(candidate.micro_batches)),
        Text(candidate.schedule),
        Text(format_seconds(candidate.step_s) if candidate.step_s is not None else "left out"),
        Text(format_percent(candidate.bubble_fraction) if is_simulated else ""),
        Wrapped(candidate.note),
    )


def _notes(plan: PipelinePlan) -> list[RenderableType]:
    notes = [note for note in plan.notes if not note.startswith(UNEVEN)]
    if not notes:
        return []
    return [title("Notes"), *(Padding(Text(f"- {note}"), (0, 0, 0, 2)) for note in notes)]
