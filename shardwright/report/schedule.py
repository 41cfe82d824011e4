"""The schedule of a pipelined step in text: a row per stage, time from left to right.

    stage 0  F0─F1─F2─············B0────F3─B1────···B2────···B3────A──
    stage 1  ···F0─F1─······B0────F2─B1────F3─B2────···B3────A──······
    stage 2  ······F0─B0────F1─B1────F2─B2────F3─B3────A──············

A letter and a number mark the beginning of that micro-batch's cell, dots are idle time. The middle of a step longer
than the width is left out. Where the rest is mostly idle (of many stages the last ones begin late and
end early), the whole step is drawn instead, and each column says what the stage does in it:

    stage 0  FFFFFF····xxxxxxBBBA
    stage 1  ·FFFFF···xxxxxxBBB·A
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from textwrap import wrap

from shardwright.tasks import Task, TaskGraph, Timeline
from shardwright.units import format_seconds

LETTERS = {"forward": "F", "backward": "B", "weight": "W", "apply": "A"}
_NAMES = {"F": "forward", "B": "backward", "W": "gradients of variables", "A": "update"}

_IDLE = "·"
_BUSY = "─"
_CUT = " ⋯ "
_MIXED = "x"

#: Part of a shortened picture that is idle from which on the whole step says more.
_MOSTLY_IDLE = 0.5

#: Part of a column's busy time from which one kind of task stands for it.
_MOST = 0.9

#: Columns that are drawn of a step at most, before those that have no room are cut out.
_MAX_COLUMNS = 1_000_000

#: Stages shown; of more than that the first and the last ones.
_MAX_ROWS = 16


@dataclass(frozen=True, slots=True)
class _Block:
    label: str
    begin_s: float
    end_s: float


def schedule_picture(graph: TaskGraph, timeline: Timeline, *, width: int = 110) -> list[str]:
    """Lines of at most `width` columns (40 or more): one a stage, then the legend."""
    rows = [list(_blocks(tasks, spans)) for tasks, spans in zip(graph.stages, timeline.tasks, strict=True)]
    blocks = [block for row in rows for block in row]
    if not blocks or timeline.step_s <= 0:
        return []
    heads = [f"stage {stage}  " for stage in range(len(rows))]
    margin = max(map(len, heads))
    room = width - margin
    column_s = _column_s(blocks, timeline.step_s, room)
    drawn = [_shorten(_draw_row(row, column_s, timeline.step_s), room) for row in rows]
    text = "".join(drawn)
    if _CUT in text and text.count(_IDLE) > _MOSTLY_IDLE * len(text):
        column_s = timeline.step_s / room
        drawn = [_draw_phases(row, column_s, room) for row in rows]
    lines = []
    for stage in _rows_to_show(len(rows)):
        lines.append(" " * margin + "⋮" if stage is None else f"{heads[stage]:<{margin}}{drawn[stage]}")
    letters = dict.fromkeys(block.label[0] for block in blocks)
    legend = ", ".join(f"{letter} {name}" for letter, name in _NAMES.items() if letter in letters)
    legend += f", {_MIXED} by turns" if any(_MIXED in line for line in drawn) else ""
    meaning = (
        f"{legend}; {_IDLE} idle, {timeline.bubble_fraction * 100:.1f} % in all; a column is {format_seconds(column_s)}"
    )
    return [*lines, *wrap(meaning, width)]


def _blocks(tasks: Sequence[Task], spans: Sequence[tuple[float, float]]) -> Iterator[_Block]:
    chunks = sorted({task.chunk for task in tasks if task.chunk is not None})
    for task, (begin, end) in zip(tasks, spans, strict=True):
        if task.kind not in LETTERS or end <= begin:
            continue
        number = "" if task.micro_batch is None else str(task.micro_batch)
        # Chunks of one stage: a, b, c, …
        place = "" if task.chunk is None or len(chunks) == 1 else chr(ord("a") + chunks.index(task.chunk) % 26)
        yield _Block(LETTERS[task.kind] + number + place, begin, end)


def _column_s(blocks: Sequence[_Block], step_s: float, room: int) -> float:
    """Seconds a column: the whole step if nearly all cells' labels then fit, else their need plus a line between.

    Once-a-step programs may be much shorter; they are drawn if possible.
    """
    whole_s = step_s / room
    cells = [block for block in blocks if block.label[0] != LETTERS["apply"]] or blocks
    close, apart = (
        sorted((block.end_s - block.begin_s) / (len(block.label) + gap) for block in cells)[len(cells) // 10]
        for gap in (0, 1)
    )
    return whole_s if whole_s <= close else max(apart, step_s / _MAX_COLUMNS)


def _draw_row(row: Sequence[_Block], column_s: float, step_s: float) -> str:
    line = [_IDLE] * max(1, round(step_s / column_s))
    for block in row:
        first, last = round(block.begin_s / column_s), round(block.end_s / column_s)
        size = min(last, len(line)) - first
        if size > 0:
            label = block.label if len(block.label) <= size else block.label[0]
            line[first : first + size] = f"{label:{_BUSY}<{size}}"
    return "".join(line)


def _draw_phases(row: Sequence[_Block], column_s: float, columns: int) -> str:
    """A letter a column: what takes most of it, `x` where several kinds share it, a dot where it is mostly idle."""
    busy: list[dict[str, float]] = [{} for _ in range(columns)]
    for block in row:
        first, last = int(block.begin_s / column_s), min(int(block.end_s / column_s), columns - 1)
        for column in range(first, last + 1):
            shared_s = min(block.end_s, (column + 1) * column_s) - max(block.begin_s, column * column_s)
            busy[column][block.label[0]] = busy[column].get(block.label[0], 0.0) + max(shared_s, 0.0)
    return "".join(_phase(kinds, column_s) for kinds in busy)


def _phase(kinds: dict[str, float], column_s: float) -> str:
    busy_s = sum(kinds.values())
    if busy_s < column_s / 2:
        return _IDLE
    most = max(kinds, key=lambda kind: kinds[kind])
    return most if kinds[most] >= _MOST * busy_s else _MIXED


def _shorten(line: str, room: int) -> str:
    if len(line) <= room:
        return line
    head = (room - len(_CUT)) // 2
    return line[:head] + _CUT + line[-(room - len(_CUT) - head) :]


def _rows_to_show(stages: int) -> Iterator[int | None]:
    if stages <= _MAX_ROWS:
        yield from range(stages)
        return
    half = _MAX_ROWS // 2
    yield from range(half)
    yield None
    yield from range(stages - half, stages)
