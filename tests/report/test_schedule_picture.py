"""The text picture of a schedule: exact for a small one, and never wider than asked."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.report.schedule import schedule_picture
from shardwright.tasks import ProgramSpec, Schedule, StepSpec, StepValue, TaskGraph, simulate, task_graph


def chain(stages: int, micro_batches: int, *, chunks: int = 1, schedule: str = "1f1b") -> TaskGraph:
    """Chunks of one second forward, two backward; an update of one second."""
    count = stages * chunks
    at = [chunk % stages for chunk in range(count)]
    pieces = []
    for c in range(count):
        ahead, back = ((f"y{c - 1}",), (f"g{c}",)) if c else ((), ("g0",))
        pieces.append(
            ProgramSpec(
                program=f"f{c}", kind="forward", stage=at[c], chunk=c, reads=ahead, writes=(f"y{c}",), time_s=1.0
            )
        )
        reads = (f"y{c}", *((f"g{c + 1}",) if c + 1 < count else ()))
        pieces.append(
            ProgramSpec(program=f"b{c}", kind="backward", stage=at[c], chunk=c, reads=reads, writes=back, time_s=2.0)
        )
    for stage in range(stages):
        reads = tuple(f"g{c}" for c in range(count) if at[c] == stage)
        pieces.append(
            ProgramSpec(program=f"a{stage}", kind="apply", stage=stage, reads=reads, writes=(f"w{stage}",), time_s=1.0)
        )
    everywhere = dict.fromkeys(range(stages), 1)
    names = {name for piece in pieces for name in piece.writes}
    values = [
        StepValue(name=name, scope="step" if name.startswith("w") else "micro_batch", sizes=everywhere)
        for name in sorted(names)
    ]
    return task_graph(
        StepSpec(micro_batches=micro_batches, stage_of_chunk=tuple(at), values=tuple(values), programs=tuple(pieces)),
        Schedule.parse(schedule),
    )


def test_one_forward_one_backward_of_three_stages() -> None:
    graph = chain(3, 4)
    assert schedule_picture(graph, simulate(graph), width=9 + 57) == [
        "stage 0  F0─F1─F2─············B0────F3─B1────···B2────···B3────A──",
        "stage 1  ···F0─F1─······B0────F2─B1────F3─B2────···B3────A──······",
        "stage 2  ······F0─B0────F1─B1────F2─B2────F3─B3────A──············",
        "F forward, B backward, A update; · idle, 31.6 % in all; a column",
        "is 333 ms",
    ]


@pytest.mark.parametrize("width", [40, 80, 110])
@pytest.mark.parametrize(
    ("stages", "micro_batches", "chunks", "schedule"),
    [(1, 1, 1, "1f1b"), (4, 8, 1, "gpipe"), (4, 8, 2, "interleaved"), (8, 64, 1, "1f1b"), (40, 8, 1, "1f1b")],
)
def test_pictures_fit(stages: int, micro_batches: int, chunks: int, schedule: str, width: int) -> None:
    graph = chain(stages, micro_batches, chunks=chunks, schedule=schedule)
    lines = schedule_picture(graph, simulate(graph), width=width)
    assert max(map(len, lines)) <= width
    rows = [line for line in lines if line.startswith("stage ")]
    assert len(rows) == min(stages, 16)
    assert len({len(row) for row in rows}) == 1
    assert any("⋮" in line for line in lines) == (stages > 16)
    is_whole = stages < 8  # of more stages at 64 micro-batches each column says what is done in it
    assert rows[0].split()[2].startswith("F0a" if chunks > 1 else "F0" if is_whole else "F")


def test_long_steps_show_their_beginning_and_their_end() -> None:
    graph = chain(2, 100)
    first = schedule_picture(graph, simulate(graph), width=80)[0]
    assert "F0──" in first
    assert " ⋯ " in first
    assert "B99" in first
    assert "B50" not in first


def test_sixteen_stages_are_no_dots() -> None:
    for micro_batches in (16, 64, 128):
        graph = chain(16, micro_batches)
        timeline = simulate(graph)
        *rows, legend = schedule_picture(graph, timeline, width=100)
        drawn = [row.partition("  ")[2] for row in rows if row.startswith("stage")]
        assert len(drawn) == 16
        assert all("⋯" not in row and {"B", "x"} & set(row) for row in drawn)
        idle = sum(row.count("·") for row in drawn) / sum(map(len, drawn))
        assert idle < timeline.bubble_fraction + 0.1
        assert "x by turns" in legend


def test_a_graph_that_computes_nothing_has_no_picture() -> None:
    graph = chain(2, 2)
    nothing = replace(graph, stages=((), ()))
    assert schedule_picture(nothing, simulate(nothing)) == []


def test_a_short_update_does_not_stretch_the_picture() -> None:
    graph = chain(3, 4)
    short = replace(
        graph,
        stages=tuple(
            tuple(replace(task, time_s=1e-6) if task.kind == "apply" else task for task in tasks)
            for tasks in graph.stages
        ),
    )
    lines = schedule_picture(short, simulate(short), width=80)
    assert "⋯" not in "".join(lines)
