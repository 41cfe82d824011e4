"""A task graph in the DOT language: a box per stage, with its tasks as cells in reading order.

Cells wrap like words in a paragraph, so that the drawing of a thousand tasks is about as high as it is wide.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from math import ceil, sqrt

from shardwright.tasks.graph import Task, TaskGraph

_COLOURS = {
    "forward": "#cfe2f3", "backward": "#d9ead3", "weight": "#fff2cc", "apply": "#ead1dc",
    "send": "#eeeeee", "receive": "#eeeeee",
}  # fmt: skip

#: Height of a cell over its width, as labels go.
_CELL_RATIO = 0.2

#: Cells in a row, at least and at most.
_MIN_COLUMNS, _MAX_COLUMNS = 4, 24


def to_dot(graph: TaskGraph) -> str:
    """A cluster per stage with its tasks in order, row by row, and a dashed edge per transfer, labelled with what goes
    over it; a task's buffers are in its tooltip.
    """
    return "\n".join(_lines(graph)) + "\n"


def _lines(graph: TaskGraph) -> Iterator[str]:
    columns = _columns(graph)
    yield "digraph tasks {"
    yield "  node [shape=plain, fontname=monospace]; edge [fontname=monospace, fontsize=9];"
    ends: dict[int, list[str]] = {}
    for stage, tasks in enumerate(graph.stages):
        yield f"  subgraph cluster_{stage} {{"
        yield f'    label="stage {stage}";'
        yield f'    s{stage} [label=<<TABLE BORDER="0" CELLSPACING="2">'
        for first in range(0, len(tasks), columns):
            row = enumerate(tasks[first : first + columns], first)
            yield f"      <TR>{''.join(_cell(index, task) for index, task in row)}</TR>"
        yield "    </TABLE>>];" if tasks else "      <TR><TD></TD></TR></TABLE>>];"
        yield "  }"
        for index, task in enumerate(tasks):
            if task.transfer is not None:
                at = ends.setdefault(task.transfer, ["", "", ""])
                at[0 if task.kind == "send" else 1] = f"s{stage}:t{index}"
                at[2] = str((*task.reads, *task.writes)[0])
    for earlier in range(len(graph.stages) - 1):
        yield f"  s{earlier} -> s{earlier + 1} [style=invis];"
    for source, target, buffer in ends.values():
        yield f"  {source} -> {target} [style=dashed, constraint=false, label={_quote(buffer)}];"
    yield "}"


def _columns(graph: TaskGraph) -> int:
    """Cells in a row, for a drawing about as high as wide."""
    count = sum(len(tasks) for tasks in graph.stages)
    return max(_MIN_COLUMNS, min(_MAX_COLUMNS, ceil(sqrt(count * _CELL_RATIO))))


def _cell(index: int, task: Task) -> str:
    colour = f' BGCOLOR="{_COLOURS[task.kind]}"' if task.kind in _COLOURS else ""
    # A tooltip is shown of cells with a link alone.
    return f'<TD PORT="t{index}" HREF="#" TOOLTIP="{escape(_buffers(task))}"{colour}>{escape(str(task))}</TD>'


def _buffers(task: Task) -> str:
    parts = (("reads", task.reads), ("writes", task.writes), ("donates", task.donates), ("frees", task.frees))
    return "; ".join(f"{verb} {', '.join(map(str, buffers))}" for verb, buffers in parts if buffers)


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
