"""Timelines against closed forms of the literature, and against a simulation in ticks that shares no code with ours."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_pieces import step_pieces

from shardwright.clusters.links import Link
from shardwright.errors import PlanError
from shardwright.tasks import (
    Buffer,
    ChunkEdge,
    ChunkTime,
    ProgramSpec,
    Schedule,
    StepSpec,
    StepValue,
    Task,
    TaskGraph,
    Timeline,
    estimate_step,
    in_flight,
    memory_over_time,
    simulate,
    task_graph,
)

GRID = [(stages, micro_batches) for stages in range(1, 7) for micro_batches in range(1, 13)]


def graph_of(name: str, stages: int, micro_batches: int, **how: object) -> TaskGraph:
    return task_graph(step_pieces(stages, micro_batches, **how), Schedule.parse(name))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_equal_stages_idle_for_as_many_micro_batches_as_other_stages(name: str) -> None:
    """(S − 1) / (M + S − 1): Huang et al. 2019, Narayanan et al. 2021."""
    for stages, micro_batches in GRID:
        timeline = simulate(graph_of(name, stages, micro_batches, is_last_fused=False))
        assert timeline.step_s == pytest.approx(3.0 * (micro_batches + stages - 1))
        assert timeline.bubble_fraction == pytest.approx((stages - 1) / (micro_batches + stages - 1))


@pytest.mark.dear
@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_chunks_shrink_the_idle_time(chunks: int) -> None:
    """(S − 1) / (v M + S − 1) where S divides M: Narayanan et al. 2021. Else no more than rounding M up costs."""
    for stages, micro_batches in GRID:
        graph = graph_of("interleaved", stages, micro_batches, chunks=chunks, is_last_fused=False)
        timeline = simulate(graph)
        least = 3.0 * (chunks * micro_batches + stages - 1)
        whole = -(-micro_batches // stages) * stages
        if micro_batches == whole:
            assert timeline.step_s == pytest.approx(least)
            assert timeline.bubble_fraction == pytest.approx((stages - 1) / (chunks * micro_batches + stages - 1))
        assert least <= timeline.step_s + 1e-9
        assert timeline.step_s <= 3.0 * (chunks * whole + stages - 1) + 1e-9


def test_gradients_of_variables_fill_what_would_be_idle() -> None:
    """3 M + S − 1 with equal thirds where M ≥ S, instead of 3 (M + S − 1): ZB-H1, Qi et al. 2023."""
    for stages, micro_batches in GRID:
        how = {"has_weight": True, "backward_s": 1.0, "is_last_fused": False}
        step_s = simulate(graph_of("zero-bubble", stages, micro_batches, **how)).step_s
        if micro_batches >= stages:
            assert step_s == pytest.approx(3 * micro_batches + stages - 1)
        assert step_s <= simulate(graph_of("1f1b", stages, micro_batches, **how)).step_s


def test_the_slowest_stage_sets_the_pace() -> None:
    """(M − 1) times the slowest stage, and one micro-batch through all of them: for stages of any speed."""
    times = [1.0, 4.0, 2.0]
    graph = graph_of("gpipe", 3, 20, forward_s=times, backward_s=times, is_last_fused=False)
    assert simulate(graph).step_s == pytest.approx(2 * (19 * 4.0 + 7.0))


def test_transfers_run_beside_computing_and_only_the_first_and_last_are_waited_for() -> None:
    """GPipe waits for S − 1 transfers each way however many micro-batches there are; one forward one backward waits
    for round trips again and again, which groups of two hide."""
    stages, micro_batches, link_s = 4, 16, 0.5
    free, waited = (
        {
            name: estimate_step(
                Schedule.parse(name),
                stage_of_chunk=range(stages),
                micro_batches=micro_batches,
                chunks=[ChunkTime(forward_s=1.0, backward_s=2.0)] * stages,
                edges=[ChunkEdge(source=c, target=c + 1, forward_s=s, backward_s=s) for c in range(stages - 1)],
            ).step_s
            for name in ("gpipe", "1f1b", "2f2b")
        }
        for s in (0.0, link_s)
    )
    assert waited["gpipe"] == pytest.approx(3 * (micro_batches + stages - 1) + 2 * (stages - 1) * link_s)
    assert waited["1f1b"] > free["1f1b"] + 2 * (stages - 1) * link_s
    assert waited["2f2b"] == pytest.approx(free["2f2b"] + 2 * (stages - 1) * link_s)


def test_links_must_be_given_for_all_transfers() -> None:
    with pytest.raises(PlanError, match="no link from stage 1 to stage 0"):
        simulate(replace(graph_of("1f1b", 2, 2), links={(0, 1): Link(bandwidth_bytes_per_s=1.0)}))


def test_memory_is_counted_from_first_write_to_last_read_and_until_what_is_sent_has_arrived() -> None:
    """Three times 10 bytes, 10 seconds each on the link; stage 1 adds them to 4 bytes with 2 bytes of workspace."""
    pieces = StepSpec(
        micro_batches=3,
        stage_of_chunk=(0, 1),
        values=(
            StepValue(name="y", scope="micro_batch", sizes={0: 10, 1: 10}, sent_bytes=10),
            StepValue(name="sum", scope="step", sizes={1: 4}),
        ),
        programs=(
            ProgramSpec(program="make", kind="forward", stage=0, chunk=0, writes=("y",), time_s=1.0),
            ProgramSpec(
                program="add", kind="backward", stage=1, chunk=1, reads=("y", "sum"), writes=("sum",), donates=("sum",),
                time_s=1.0, workspace_bytes=2,
            ),
        ),
        arguments=(("sum", 1),),
        outputs=(("sum", 1),),
        links={(0, 1): Link(bandwidth_bytes_per_s=1.0)},
    )  # fmt: skip
    graph = task_graph(pieces, Schedule.parse("gpipe"))
    timeline = simulate(graph)
    source, target = memory_over_time(graph, timeline)
    assert source.bytes_over_time == ((0.0, 10), (1.0, 20), (2.0, 30), (3.0, 30), (11.0, 20), (21.0, 10), (31.0, 0))
    # Posted at once: the first two; the third when the first was added.
    assert target.bytes_over_time == (
        (0.0, 24), (11.0, 26), (12.0, 24), (21.0, 26), (22.0, 14), (31.0, 16), (32.0, 0)
    )  # fmt: skip
    assert (source.peak_bytes, target.peak_bytes) == (30, 26)
    assert timeline.transfers == ((1.0, 11.0), (11.0, 21.0), (21.0, 31.0))


# ---- a second simulation ----------------------------------------------------


def ticks(graph: TaskGraph, transfer_ticks: dict[int, int]) -> tuple[int, dict[tuple[int, int], tuple[int, int]]]:
    """(Length of the step, task → begin, end) in whole ticks: at each one, stages and channels do what they can."""
    place = [0] * len(graph.stages)
    left: dict[int, tuple[int, int]] = {}  # stage → (position, ticks left)
    queued: dict[tuple[int, int], list[int]] = defaultdict(list)
    posted: set[int] = set()
    on_channel: dict[tuple[int, int], tuple[int, int]] = {}
    arrived: set[int] = set()
    number_of = {(t.stage, t.writes[0]): t.transfer for _, t in graph.tasks() if t.kind == "receive"}
    spans: dict[tuple[int, int], tuple[int, int]] = {}
    now = 0
    while any(at < len(tasks) for at, tasks in zip(place, graph.stages, strict=True)):
        moved = True
        while moved:
            moved = False
            for channel, numbers in queued.items():
                if channel in on_channel and on_channel[channel][1] == now:
                    arrived.add(on_channel.pop(channel)[0])
                    moved = True
                if channel not in on_channel and numbers and numbers[0] in posted:
                    number = numbers.pop(0)
                    on_channel[channel] = (number, now + transfer_ticks[number])
                    moved = True
            for stage, tasks in enumerate(graph.stages):
                if stage in left and left[stage][1] == now:
                    spans[stage, left[stage][0]] = (spans[stage, left[stage][0]][0], now)
                    place[stage] = left.pop(stage)[0] + 1
                    moved = True
                if stage in left or place[stage] == len(tasks):
                    continue
                task = tasks[place[stage]]
                if task.kind == "send":
                    queued[stage, task.peer or 0].append(task.transfer or 0)
                    place[stage] += 1
                elif task.kind == "receive":
                    posted.add(task.transfer or 0)
                    place[stage] += 1
                elif all(number_of.get((stage, buffer)) in (None, *arrived) for buffer in task.reads):
                    left[stage] = (place[stage], now + int(task.time_s))
                    spans[stage, place[stage]] = (now, now)
                else:
                    continue
                moved = True
        now += 1
    return now - 1, spans


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([("gpipe", 1), ("1f1b", 1), ("2f2b", 1), ("zero-bubble", 1), ("interleaved", 2), ("gpipe", 2)]),
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(0, 2**30),
    st.booleans(),
)
def test_random_durations_give_the_timeline_of_a_simulation_in_ticks(
    kind: tuple[str, int], stages: int, micro_batches: int, seed: int, is_last_fused: bool
) -> None:
    rng = random.Random(seed)
    count = stages * kind[1]
    graph = graph_of(
        kind[0],
        stages,
        micro_batches,
        chunks=kind[1],
        has_weight=kind[0] == "zero-bubble",
        forward_s=[float(rng.randint(0, 5)) for _ in range(count)],
        backward_s=[float(rng.randint(1, 9)) for _ in range(count)],
        weight_s=float(rng.randint(0, 4)),
        is_last_fused=is_last_fused,
    )
    speeds = {(a, b): rng.choice([1, 2, 5, 10, 50]) for a in range(stages) for b in range(stages)}
    graph = replace(graph, sent_bytes={value: 50 * rng.randint(0, 9) for value in sorted(graph.sent_bytes)})
    transfer_ticks = {
        task.transfer: graph.sent_bytes[task.reads[0].value] // speeds[task.stage, task.peer or 0]
        for _, task in graph.tasks()
        if task.kind == "send" and task.transfer is not None
    }
    links = {pair: Link(bandwidth_bytes_per_s=speed) for pair, speed in speeds.items()}
    timeline = simulate(replace(graph, links=links))
    step, spans = ticks(graph, transfer_ticks)
    assert timeline.step_s == step
    for (stage, position), span in spans.items():
        assert timeline.tasks[stage][position] == span


# ---- without buffers ---------------------------------------------------------


def lean(graph: TaskGraph) -> Timeline:
    """The timeline of cells alone: everything else takes no time."""
    return simulate(graph, time_of=lambda task: task.time_s if task.chunk is not None else 0.0)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([("gpipe", 1), ("1f1b", 1), ("3f3b", 1), ("zero-bubble", 1), ("interleaved", 2)]),
    st.integers(1, 6),
    st.integers(1, 12),
    st.integers(0, 2**30),
    st.booleans(),
)
def test_the_pace_is_that_of_the_task_graph(
    kind: tuple[str, int], stages: int, micro_batches: int, seed: int, is_last_fused: bool
) -> None:
    rng = random.Random(seed)
    count = stages * kind[1]
    forward = [rng.random() for _ in range(count)]
    backward = [rng.random() for _ in range(count)]
    weight_s = rng.random() if kind[0] == "zero-bubble" else None
    graph = graph_of(
        kind[0], stages, micro_batches, chunks=kind[1], has_weight=weight_s is not None, weight_s=weight_s or 0.0,
        forward_s=forward, backward_s=backward, is_last_fused=is_last_fused,
    )  # fmt: skip
    chunks = [ChunkTime(forward_s=f, backward_s=b, weight_s=weight_s) for f, b in zip(forward, backward, strict=True)]
    if is_last_fused:
        chunks[-1] = ChunkTime(forward_s=None, backward_s=backward[-1], weight_s=weight_s)
    pairs = [(c, c + 1) for c in range(count - 1)] + ([(0, count - 1)] if count > 2 else [])
    quick = estimate_step(
        Schedule.parse(kind[0]),
        stage_of_chunk=[chunk % stages for chunk in range(count)],
        micro_batches=micro_batches,
        chunks=chunks,
        edges=[ChunkEdge(source=a, target=b, forward_s=0.0, backward_s=0.0) for a, b in pairs],
    )
    assert quick.step_s == pytest.approx(lean(graph).step_s)
    assert quick.bubble_fraction == pytest.approx(lean(graph).bubble_fraction)


def test_the_pace_knows_what_links_take() -> None:
    """One micro-batch over three stages: every chunk and every transfer after the other."""
    quick = estimate_step(
        Schedule.parse("1f1b"),
        stage_of_chunk=(0, 1, 2),
        micro_batches=1,
        chunks=[ChunkTime(forward_s=1.0, backward_s=2.0)] * 2 + [ChunkTime(forward_s=None, backward_s=4.0)],
        edges=[ChunkEdge(source=c, target=c + 1, forward_s=10.0, backward_s=20.0) for c in range(2)],
        before_s=(100.0, 0.0, 0.0),
        after_s=(1000.0, 0.0, 0.0),
    )
    assert quick.step_s == 2 * 3.0 + 4.0 + 2 * 30.0 + 1100.0
    assert quick.busy_s == (1103.0, 3.0, 4.0)


@pytest.mark.parametrize(
    ("name", "chunks"), [("1f1b", 1), ("gpipe", 1), ("2f2b", 1), ("zero-bubble", 1), ("interleaved", 3)]
)
def test_micro_batches_in_flight_are_those_whose_activations_the_lists_keep(name: str, chunks: int) -> None:
    for stages, micro_batches in GRID[::5]:
        how = {"chunks": chunks, "has_weight": name == "zero-bubble", "is_last_fused": False}
        graph = graph_of(name, stages, micro_batches, **how)
        moments = in_flight(Schedule.parse(name), stages=stages, chunks=chunks, micro_batches=micro_batches)
        for stage, tasks in enumerate(graph.stages):
            seen = hold_bytes(tasks, "delayed" if name == "zero-bubble" else "res")
            assert max(seen) == max(map(sum, moments[stage])), (stages, micro_batches, stage)


def hold_bytes(tasks: tuple[Task, ...], value: str) -> list[int]:
    """How many (chunk, micro-batch) pairs are in flight in each task: those whose `value` or `res` is there."""
    live: set[Buffer] = set()
    seen = [0]
    for task in tasks:
        live.update(b for b in task.writes if b.value.startswith(("res.", f"{value}.")))
        seen.append(len({(b.value.split(".")[1], b.micro_batch) for b in live}))
        live.difference_update(task.frees)
    return seen
