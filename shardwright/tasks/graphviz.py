"""A task graph in the DOT language."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.tasks.graph import Task, TaskGraph

_COLOURS = {
    "forward": "#cfe2f3", "backward": "#d9ead3", "weight": "#fff2cc", "apply": "#ead1dc",
    "send": "#eeeeee", "receive": "#eeeeee",
}  # fmt: skip


def to_dot(graph: TaskGraph) -> str:
    """A cluster per stage with its tasks in order, a dashed edge per transfer, labelled with what goes over it."""
    return "\n".join(_lines(graph)) + "\n"


def _lines(graph: TaskGraph) -> Iterator[str]:
    yield "digraph tasks {"
    yield "  rankdir=LR; node [shape=box, style=filled, fillcolor=white, fontname=monospace];"
    ends: dict[int, list[str]] = {}
    for stage, tasks in enumerate(graph.stages):
        yield f"  subgraph cluster_{stage} {{"
        yield f'    label="stage {stage}";'
        for index, task in enumerate(tasks):
            yield f"    t{stage}_{index} [label={_quote(str(task))}, tooltip={_quote(_buffers(task))}{_fill(task)}];"
        if len(tasks) > 1:
            yield "    " + " -> ".join(f"t{stage}_{index}" for index in range(len(tasks))) + ";"
        yield "  }"
        for index, task in enumerate(tasks):
            if task.transfer is not None:
                at = ends.setdefault(task.transfer, ["", "", ""])
                at[0 if task.kind == "send" else 1] = f"t{stage}_{index}"
                at[2] = str((*task.reads, *task.writes)[0])
    for source, target, buffer in ends.values():
        yield f"  {source} -> {target} [style=dashed, constraint=false, label={_quote(buffer)}];"
    yield "}"


def _buffers(task: Task) -> str:
    parts = (("reads", task.reads), ("writes", task.writes), ("donates", task.donates), ("frees", task.frees))
    return "; ".join(f"{verb} {', '.join(map(str, buffers))}" for verb, buffers in parts if buffers)


def _fill(task: Task) -> str:
    return f', fillcolor="{_COLOURS[task.kind]}"' if task.kind in _COLOURS else ""


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
