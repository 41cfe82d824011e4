"""Traces: what Perfetto needs of them, and that they say what the timeline says."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from shardwright.clusters.links import Link
from shardwright.report.trace import DevicePlace, MeasuredTask, write_trace
from shardwright.report.trace import step_trace as trace_of_step
from shardwright.tasks import ProgramSpec, Schedule, StepSpec, StepValue, TaskGraph, simulate, task_graph
from tests.report.trace_format import require_valid


def graph(stages: int = 2) -> TaskGraph:
    """Forward parts in a chain, one second each; the last stage joins them."""
    names = [f"y{stage}" for stage in range(stages)]
    pieces = [
        ProgramSpec(
            program=f"f{s}", kind="forward", stage=s, chunk=s, reads=names[s - 1 : s] if s else (), writes=(names[s],),
            time_s=1.0,
        )
        for s in range(stages)
    ]  # fmt: skip
    pieces.append(
        ProgramSpec(program="join", kind="apply", stage=stages - 1, reads=(names[-1],), writes=("all",), time_s=2.0)
    )
    everywhere = dict.fromkeys(range(stages), 8)
    return task_graph(
        StepSpec(
            micro_batches=3,
            stage_of_chunk=tuple(range(stages)),
            values=(
                *(StepValue(name=name, scope="micro_batch", sizes=everywhere, sent_bytes=8) for name in names),
                StepValue(name="all", scope="step", sizes=everywhere),
            ),
            programs=tuple(pieces),
            outputs=(("all", stages - 1),),
            links={(s, s + 1): Link(bandwidth_bytes_per_s=16.0) for s in range(stages)},
        ),
        Schedule.parse("gpipe"),
    )


PLACES = (
    (DevicePlace(device=0), DevicePlace(device=1)),
    (DevicePlace(device=2, node=1), DevicePlace(device=3, node=1)),
)


def step_trace(*args: Any, **options: Any) -> dict[str, Any]:
    """Every trace of these tests is a valid one."""
    trace = trace_of_step(*args, **options)
    require_valid(trace)
    return trace


def named_tracks(trace: dict[str, Any]) -> dict[tuple[int, int], str]:
    """(process, thread) → "process name / thread name"."""
    meta = [event for event in trace["traceEvents"] if event["ph"] == "M"]
    process = {e["pid"]: e["args"]["name"] for e in meta if e["name"] == "process_name"}
    return {
        (e["pid"], e["tid"]): f"{process[e['pid']]} / {e['args']['name']}" for e in meta if e["name"] == "thread_name"
    }


def slices(trace: dict[str, Any]) -> dict[str, list[tuple[str, float, float]]]:
    """Per named track: (name, begin, end) in seconds, in order."""
    tracks = named_tracks(trace)
    result = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            end = event["ts"] + event["dur"]
            result[tracks[event["pid"], event["tid"]]].append((event["name"], event["ts"] / 1e6, end / 1e6))
    return {name: sorted(own, key=lambda entry: entry[1]) for name, own in result.items()}


def test_every_device_has_a_track_with_the_predicted_tasks() -> None:
    result = graph()
    tracks = slices(step_trace(result, simulate(result), devices=PLACES))
    forward = [(f"f0 of micro-batch {i}", float(i), i + 1.0) for i in range(3)]
    assert tracks["predicted: devices / device 0 (stage 0)"] == forward
    assert tracks["predicted: devices / device 1 (stage 0)"] == forward
    assert tracks["predicted: devices / device 3 (stage 1)"] == [
        ("f1 of micro-batch 0", 1.5, 2.5),
        ("f1 of micro-batch 1", 2.5, 3.5),
        ("f1 of micro-batch 2", 3.5, 4.5),
        ("join", 4.5, 6.5),
    ]
    assert tracks["predicted: links / stage 0 → stage 1"] == [
        (f"send y0@{i} to stage 1", i + 1.0, i + 1.5) for i in range(3)
    ]
    assert not any(name.startswith("measured") for name in tracks)


def test_arrows_begin_and_end_in_slices() -> None:
    result = graph(3)
    places = [[DevicePlace(device=stage)] for stage in range(3)]
    trace = step_trace(result, simulate(result), devices=places)
    tracks, own = named_tracks(trace), slices(trace)
    arrows = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] in "stf":
            time_s = event["ts"] / 1e6
            name = tracks[event["pid"], event["tid"]]
            assert any(begin <= time_s <= end for _, begin, end in own[name]), event
            arrows[event["id"]].append((event["ph"], name, time_s))
    assert len(arrows) == 6
    for steps in arrows.values():
        assert [phase for phase, _, _ in steps] == ["s", "t", "f"]
        assert all(a[2] <= b[2] for a, b in pairwise(steps))
        assert "links" in steps[1][1]


def test_transfers_at_the_same_time_lie_on_tracks_beside_each_other() -> None:
    """Half a second on the link, a second until it arrives; the third is posted when the first was read."""
    result = replace(graph(), links={(0, 1): Link(bandwidth_bytes_per_s=16.0, latency_s=1.0)})
    tracks = slices(step_trace(result, simulate(result), devices=PLACES))
    assert [span[1:] for span in tracks["predicted: links / stage 0 → stage 1"]] == [(1.0, 2.5), (3.5, 5.0)]
    assert [span[1:] for span in tracks["predicted: links / stage 0 → stage 1 (2)"]] == [(2.0, 3.5)]
    receives = [position for position, task in enumerate(result.stages[1]) if task.kind == "receive"]
    measured = [
        MeasuredTask(node=1, stage=1, position=position, begin_s=0.0, end_s=1.0 + position) for position in receives
    ]
    tracks = slices(step_trace(result, simulate(result), devices=PLACES, measured=measured))
    assert sum(name.startswith("measured: links") for name in tracks) == len(receives) == 3


def test_memory_is_a_counter_of_each_stage() -> None:
    result = graph()
    trace = step_trace(result, simulate(result), devices=PLACES)
    counters = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "C":
            counters[event["name"]].append(event["args"]["held"])
    assert max(counters["stage 0: bytes of a device"]) == 16
    assert max(counters["stage 1: micro-batches held"]) == 3
    assert all(values[-1] == 0 for values in counters.values())


def test_measured_tasks_lie_on_the_devices_of_their_node(tmp_path: Path) -> None:
    result = graph()
    receive = next(i for i, task in enumerate(result.stages[1]) if task.kind == "receive")
    measured = [
        MeasuredTask(node=0, stage=0, position=0, begin_s=0.25, end_s=1.5),
        MeasuredTask(node=1, stage=1, position=receive, begin_s=1.0, end_s=1.75),
        MeasuredTask(node=1, stage=1, position=len(result.stages[1]) - 2, begin_s=6.0, end_s=8.0),
    ]
    trace = step_trace(result, simulate(result), devices=PLACES, measured=measured)
    path = tmp_path / "out.json"
    write_trace(str(path), trace)
    tracks = slices(json.loads(path.read_text()))
    assert tracks["measured: devices / device 1 (stage 0)"] == [("f0 of micro-batch 0", 0.25, 1.5)]
    assert tracks["measured: devices / device 2 (stage 1)"] == [("join", 6.0, 8.0)]
    assert tracks["measured: links / stage 0 → stage 1"] == [("receive y0@0 from stage 0", 1.0, 1.75)]
    assert trace["otherData"]["measured_step_s"] == 8.0
    order = [
        (event["args"]["sort_index"], event["pid"])
        for event in trace["traceEvents"]
        if event["name"] == "process_sort_index"
    ]
    assert order == sorted(order)


def test_what_was_measured_has_arrows_from_maker_over_link_to_reader() -> None:
    """As measured: every task as the simulation says, the links a little later."""
    result = graph()
    timeline = simulate(result)
    measured = [
        MeasuredTask(node=stage, stage=stage, position=position, begin_s=begin, end_s=end)
        for stage, times in enumerate(timeline.tasks)
        for position, (begin, end) in enumerate(times)
        if result.stages[stage][position].kind != "receive"
    ] + [
        MeasuredTask(
            node=1, stage=1, position=position, begin_s=timeline.tasks[1][position][0],
            end_s=timeline.transfers[task.transfer or 0][1],
        )
        for position, task in enumerate(result.stages[1]) if task.kind == "receive"
    ]  # fmt: skip
    trace = step_trace(result, timeline, devices=PLACES, measured=measured)
    tracks = named_tracks(trace)
    arrows = defaultdict(list)
    for event in trace["traceEvents"]:
        if event.get("cat") == "measured transfer":
            arrows[event["name"]].append((event["ph"], tracks[event["pid"], event["tid"]]))
    assert set(arrows) == {"y0@0", "y0@1", "y0@2"}
    for steps in arrows.values():
        (_, first), (_, second), (_, last) = steps
        assert first == "measured: devices / device 0 (stage 0)"
        assert second.startswith("measured: links / stage 0 → stage 1")
        assert last == "measured: devices / device 2 (stage 1)"


def test_large_clusters_have_a_track_per_stage_and_node() -> None:
    result = graph()
    places = [[DevicePlace(device=64 * s + d, node=2 * s + d // 32) for d in range(64)] for s in range(2)]
    names = set(named_tracks(step_trace(result, simulate(result), devices=places)).values())
    assert "predicted: devices / stage 1, node 3: devices 96 to 127" in names
    assert len(names) == 5
