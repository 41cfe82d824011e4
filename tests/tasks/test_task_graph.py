"""Task graphs of every schedule: run by an interpreter with threads and bounded channels, and held against the step
done piece by piece; and what the check must find."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import Interpreter, whole_step
from made_pieces import step_pieces

from shardwright.errors import OptionError, PlanCheckError, PlanError
from shardwright.tasks import (
    MICRO_BATCH,
    Buffer,
    ProgramSpec,
    Schedule,
    StepSpec,
    StepValue,
    Task,
    TaskGraph,
    channel_capacity,
    simulate,
    task_graph,
)
from shardwright.tasks.simulate import memory_over_time

SIMPLE = ("gpipe", "1f1b", "2f2b", "3f3b", "zero-bubble")

#: (schedule, chunks a stage)
KINDS = (*((name, 1) for name in SIMPLE), ("gpipe", 2), ("interleaved", 1), ("interleaved", 2), ("interleaved", 3))


def built(name: str, stages: int, micro_batches: int, chunks: int = 1, *, is_last_fused: bool = True) -> TaskGraph:
    return task_graph(made(name, stages, micro_batches, chunks, is_last_fused=is_last_fused), Schedule.parse(name))


def made(name: str, stages: int, micro_batches: int, chunks: int = 1, *, is_last_fused: bool = True) -> StepSpec:
    return step_pieces(
        stages, micro_batches, chunks=chunks, has_weight=name == "zero-bubble", is_last_fused=is_last_fused
    )


@pytest.mark.dear
@pytest.mark.parametrize(("name", "chunks"), KINDS)
def test_every_grid_point_has_each_task_once_and_runs_to_its_end(name: str, chunks: int) -> None:
    """`task_graph` checks the lists; here that all work is there, and how much channels must hold."""
    for stages in range(1, 7):
        for micro_batches in range(1, 13):
            graph = built(name, stages, micro_batches, chunks)
            count = Counter((task.kind, task.program, task.micro_batch) for _, task in graph.tasks() if task.is_compute)
            assert set(count.values()) == {1}
            kinds = Counter(kind for kind, _, _ in count)
            assert kinds["forward"] == (stages * chunks - 1) * micro_batches
            assert kinds["backward"] == stages * chunks * micro_batches
            assert kinds["split"] == 2 * micro_batches
            assert kinds["weight"] == (stages * micro_batches if name == "zero-bubble" else 0)
            assert kinds["apply"] == 2 * stages + 1
            assert channel_capacity(graph) <= most_waiting(name, stages, micro_batches, chunks)


def most_waiting(name: str, stages: int, micro_batches: int, chunks: int) -> int:
    """As many as micro-batches are in flight on a stage."""
    if name == "gpipe":
        return micro_batches * chunks
    return stages * chunks * (Schedule.parse(name).group if "f" in name else 1)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(KINDS), st.integers(1, 6), st.integers(1, 12), st.booleans())
def test_threads_and_bounded_channels_compute_the_step(
    kind: tuple[str, int], stages: int, micro_batches: int, is_last_fused: bool
) -> None:
    pieces = made(kind[0], stages, micro_batches, kind[1], is_last_fused=is_last_fused)
    arguments = {name: number + 7 for number, (name, _) in enumerate(pieces.arguments)}
    graph = task_graph(pieces, Schedule.parse(kind[0]))
    run = Interpreter(graph, arguments, capacity=channel_capacity(graph))
    assert run.run() == whole_step(pieces, arguments)
    assert all(not table for table in run.left)


@pytest.mark.parametrize("stages", range(1, 7))
@pytest.mark.parametrize("micro_batches", [1, 3, 8, 12])
def test_one_forward_one_backward_holds_at_most_as_many_micro_batches_as_stages_follow(
    stages: int, micro_batches: int
) -> None:
    graph = built("1f1b", stages, micro_batches, is_last_fused=False)
    memory = memory_over_time(graph, simulate(graph))
    assert memory[0].peak_micro_batches == min(stages, micro_batches)
    for stage, each in enumerate(memory[1:], start=1):
        # and what is received ahead for the next one
        assert each.peak_micro_batches <= min(stages - stage + 1, micro_batches)
    all_at_once = built("gpipe", stages, micro_batches, is_last_fused=False)
    assert memory_over_time(all_at_once, simulate(all_at_once))[0].peak_micro_batches == micro_batches


def test_a_value_goes_straight_to_every_stage_that_reads_it_once() -> None:
    graph = built("1f1b", 4, 2)
    sends = Counter((str(task.reads[0]), task.stage, task.peer) for _, task in graph.tasks() if task.kind == "send")
    assert set(sends.values()) == {1}
    assert ("act.0@1", 0, 1) in sends
    assert ("act.0@1", 0, 3) in sends  # the skip connection, past stages 1 and 2
    assert ("w.0", 0, 3) in sends  # once a step
    assert ("acc.tied", 3, 0) in sends
    assert not any(name.startswith("res.") for name, _, _ in sends)


def test_a_sum_is_sent_when_the_last_micro_batch_is_in_it() -> None:
    graph = built("1f1b", 3, 4)
    tasks = graph.stages[2]
    sent = next(i for i, task in enumerate(tasks) if task.kind == "send" and task.reads[0].value == "acc.tied")
    assert sent > max(i for i, task in enumerate(tasks) if task.kind == "backward")


def test_receives_are_posted_while_the_stage_computes_what_is_before() -> None:
    graph = built("gpipe", 2, 4, is_last_fused=False)
    names = [str(task) for task in graph.stages[1]]
    first = names.index("forward.1 of micro-batch 0")
    assert names.index("receive act.0@1 from stage 0") < first < names.index("receive act.0@2 from stage 0")


def test_a_once_piece_reads_the_buffers_of_all_micro_batches() -> None:
    pieces = StepSpec(
        micro_batches=3,
        stage_of_chunk=(0, 1),
        values=(
            StepValue(name="y", scope="micro_batch", sizes={0: 4, 1: 4}),
            StepValue(name="all", scope="step", sizes={1: 12}),
        ),
        programs=(
            ProgramSpec(program="f", kind="forward", stage=0, chunk=0, writes=("y",)),
            ProgramSpec(program="join", kind="apply", stage=1, reads=("y",), writes=("all",)),
        ),
        outputs=(("all", 1),),
    )
    join = next(t for _, t in task_graph(pieces, Schedule.parse("1f1b")).tasks() if t.program == "join")
    assert join.reads == (Buffer("y", 0), Buffer("y", 1), Buffer("y", 2))


def test_accumulate_pieces_follow_what_they_add() -> None:
    pieces = step_pieces(1, 2)
    term = StepValue(name="term", scope="micro_batch", sizes={0: 1})
    backward = next(p for p in pieces.programs if p.kind == "backward")
    add = ProgramSpec(
        program="add", kind="accumulate", stage=0, reads=("term", "acc.0"), writes=("acc.0",), donates=("acc.0",)
    )
    rest = tuple(p for p in pieces.programs if p is not backward)
    changed = replace(
        backward,
        reads=tuple(n for n in backward.reads if n != "acc.0"),
        writes=("term", *(n for n in backward.writes if n != "acc.0")),
        donates=tuple(n for n in backward.donates if n != "acc.0"),
    )
    graph = task_graph(
        replace(pieces, programs=(*rest, changed, add), values=(*pieces.values, term)), Schedule("gpipe")
    )
    names = [str(task) for task in graph.stages[0] if task.kind in ("backward", "accumulate")]
    assert names == [f"{program} of micro-batch {i}" for i in range(2) for program in ("backward.0", "add")]


# ---- what cannot be ordered ------------------------------------------------


def with_piece(program: str, **changes: object) -> StepSpec:
    pieces = step_pieces(3, 2)
    assert any(piece.program == program for piece in pieces.programs)
    return replace(
        pieces,
        programs=tuple(replace(p, **changes) if p.program == program else p for p in pieces.programs),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        (with_piece("forward.1", reads=("w.1", "act.0", "nothing")), "forward.1: nothing is not among the values"),
        (with_piece("forward.1", stage=2), "chunk 1 is not on stage 2"),
        (with_piece("forward.1", chunk=0), "chunk 0 has two forward programs"),
        (with_piece("forward.1", writes=("res.1",)), "act.1 is written by nothing"),
        (with_piece("forward.1", writes=("act.0", "act.1", "res.1")), "act.0 is written by forward.0, forward.1"),
        (with_piece("forward.1", writes=("w.2", "act.1", "res.1")), "w.2 is written by forward.1 and is an argument"),
        (with_piece("apply.0.0", reads=("norm",)), "wait for each other"),
        (with_piece("forward.0", reads=("w.0", "token", "act.1")), "stages wait for each other"),
    ],
)
def test_pieces_that_do_not_fit_are_refused(pieces: StepSpec, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        task_graph(pieces, Schedule.parse("1f1b"))


def test_schedules_say_which_chunks_they_want() -> None:
    pieces = step_pieces(2, 2, chunks=2)
    with pytest.raises(OptionError, match="1f1b wants chunk c on stage c"):
        task_graph(pieces, Schedule.parse("1f1b"))
    for text in ("", "0f0b", "2f1b", "1F1B", "pipe"):
        with pytest.raises(OptionError, match="is no schedule"):
            Schedule.parse(text)


# ---- what the check finds ---------------------------------------------------


def edited(edit: object, *, stages: int = 2) -> TaskGraph:
    graph = built("1f1b", stages, 2)
    lists = [list(tasks) for tasks in graph.stages]
    edit(lists)  # type: ignore[operator]
    return replace(graph, stages=tuple(tuple(tasks) for tasks in lists))


def find(tasks: list[Task], text: str) -> int:
    return next(index for index, task in enumerate(tasks) if str(task).startswith(text))


def swap(tasks: list[Task], first: str, second: str) -> None:
    a, b = find(tasks, first), find(tasks, second)
    tasks[a], tasks[b] = tasks[b], tasks[a]


def change(tasks: list[Task], text: str, **changes: object) -> None:
    index = find(tasks, text)
    tasks[index] = replace(tasks[index], **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda s: swap(s[0], "split.in of micro-batch 0", "forward.0 of micro-batch 0"), "token@0 is read, but not"),
        (lambda s: change(s[0], "forward.0 of micro-batch 1", frees=()), "token@1 is kept after its last use"),
        (lambda s: change(s[0], "send w.0", frees=(Buffer("w.0"),)), "w.0 is read, but not there"),
        (lambda s: change(s[0], "send w.0", frees=(Buffer("act.0", 0),)), "dropped later than after its last use"),
        (lambda s: change(s[0], "backward.0 of micro-batch 0", donates=(Buffer("token", 0),)), "does not read"),
        (lambda s: change(s[0], "backward.0 of micro-batch 0", donates=()), "acc.0 is written over"),
        (lambda s: change(s[0], "backward.0 of micro-batch 1", frees=()), "res.0@1 is donated and not dropped"),
        (lambda s: s[0].pop(find(s[0], "send w.0")), "needs one send and one receive"),
        (lambda s: change(s[0], "send act.0@1", peer=0), "do not fit"),
        (lambda s: change(s[0], "send act.0@1", transfer=None), "has no number"),
        (lambda s: swap(s[1], "receive act.0@0", "receive act.0@1"), "not received in the order sent"),
        (lambda s: s[0].append(s[1][0]), "of stage 1 stands here"),
        (lambda s: s[0].append(s[0].pop(find(s[0], "receive grad.0@0"))), "is read, but not there"),
    ],
)
def test_the_check_finds_what_could_go_wrong(edit: object, message: str) -> None:
    with pytest.raises(PlanCheckError, match=message):
        edited(edit).check()


def test_the_check_finds_stages_that_wait_for_each_other() -> None:
    def late(lists: list[list[Task]]) -> None:
        """Stage 0 computes its second micro-batch backward before it sends the activations of it."""
        tasks = lists[0]
        send = tasks.pop(find(tasks, "send act.0@1"))
        tasks.insert(find(tasks, "backward.0 of micro-batch 1") + 1, send)

    graph = edited(late)
    with pytest.raises(PlanCheckError, match=r"wait for each other without end: stage 0 in task .* stage 1 in task"):
        graph.check()


@pytest.mark.parametrize(("name", "chunks"), KINDS)
def test_a_step_without_a_backward_part_runs_its_forward_cells(name: str, chunks: int) -> None:
    """An evaluation: the batch goes through, and what the last chunk makes of each micro-batch is joined."""
    stages, micro_batches = 3, 5
    count = stages * chunks
    values = [
        StepValue(name=f"y{chunk}", scope="micro_batch", sizes=dict.fromkeys(range(stages), 1))
        for chunk in range(count)
    ]
    pieces = [
        ProgramSpec(
            program=f"f{chunk}", kind="forward", stage=chunk % stages, chunk=chunk,
            reads=(f"y{chunk - 1}",) if chunk else ("x", MICRO_BATCH), writes=(f"y{chunk}",),
        )
        for chunk in range(count)
    ]  # fmt: skip
    last = (count - 1) % stages
    step = StepSpec(
        micro_batches=micro_batches,
        stage_of_chunk=tuple(chunk % stages for chunk in range(count)),
        values=(
            *values,
            StepValue(name="x", scope="step", sizes={0: 1}),
            StepValue(name="all", scope="step", sizes={last: micro_batches}),
        ),
        programs=(
            *pieces,
            ProgramSpec(program="join", kind="apply", stage=last, reads=(f"y{count - 1}",), writes=("all",)),
        ),
        arguments=(("x", 0),),
        outputs=(("all", last),),
    )
    graph = task_graph(step, Schedule.parse(name))
    done = Counter(task.program for _, task in graph.tasks() if task.is_compute)
    assert done == {**{f"f{chunk}": micro_batches for chunk in range(count)}, "join": 1}
