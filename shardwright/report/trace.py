"""A step in the trace format of Perfetto (ui.perfetto.dev) or chrome://tracing: prediction above measurement.

In the Trace Event Format (docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU): a process for each
of predicted devices, predicted links, measured devices and measured links; in them a track per device, or per direction
between two stages; an arrow from a buffer's producer over the link to its consumer; and the memory of each stage. Both
clocks begin with the step, and both have their arrows.
"""

from __future__ import annotations

import json
import os
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardwright.tasks import COMPUTE_KINDS, Buffer, Task, TaskGraph, Timeline, memory_over_time

Event = dict[str, Any]

#: Devices with a track of their own; of more than that there is one track per stage (and node).
MAX_DEVICE_TRACKS = 64

# Process numbers that no track has: a thread with the number of its process is shown as its main thread.
_PREDICTED, _PREDICTED_LINKS, _MEASURED, _MEASURED_LINKS = range(10**6, 10**6 + 4)
#: Buffers named in the details of a slice.
_MAX_NAMES = 12

_PROCESSES = {
    _PREDICTED: "predicted: devices",
    _PREDICTED_LINKS: "predicted: links",
    _MEASURED: "measured: devices",
    _MEASURED_LINKS: "measured: links",
}

_COLOURS = {"forward": "rail_response", "backward": "rail_animation", "weight": "rail_idle", "apply": "rail_load"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTask:
    """When a task ran on the devices of one node: seconds from the beginning of the step, on the master's clock.

    position: place of the task in the list of its stage. For a send or a receive, until the transfer was done.
    """

    node: int
    stage: int
    position: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlace:
    """A device of a stage: its number in the cluster, and its node."""

    device: int
    node: int = 0


class _TransferSpan(NamedTuple):
    """A transfer: its key, its two stages, and its begin and end."""

    key: Hashable
    pair: tuple[int, int]
    begin_s: float
    end_s: float


class _Track(NamedTuple):
    process: int
    number: int
    name: str
    node: int | None  # None: of all nodes


def write_trace(path: str | os.PathLike[str], trace: Mapping[str, Any]) -> None:
    """Write the trace of `step_trace` to a file for Perfetto."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(trace, file, separators=(",", ":"))


def step_trace(
    graph: TaskGraph,
    timeline: Timeline,
    *,
    devices: Sequence[Sequence[DevicePlace]],
    measured: Sequence[MeasuredTask] = (),
    name: str = "step",
) -> dict[str, Any]:
    """The trace of one step, in data for JSON.

    devices: those of every stage. measured: measured tasks; empty if the step was only planned.
    """
    events = [
        *_trace_prediction(graph, timeline, devices),
        *(_trace_measurement(graph, devices, measured) if measured else ()),
    ]
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "step": name,
            "schedule": graph.schedule,
            "micro_batches": graph.micro_batches,
            "predicted_step_s": timeline.step_s,
            "predicted_bubble_fraction": timeline.bubble_fraction,
            **({"measured_step_s": max(timing.end_s for timing in measured)} if measured else {}),
        },
        "traceEvents": [*_processes(bool(measured)), *events],
    }


def _processes(is_measured: bool) -> Iterator[Event]:
    for process, name in _PROCESSES.items():
        if is_measured or process in (_PREDICTED, _PREDICTED_LINKS):
            yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
            yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}}


# ---- tracks ------------------------------------------------------------------


def _device_tracks(process: int, devices: Sequence[Sequence[DevicePlace]]) -> list[list[_Track]]:
    """Per stage, the tracks of its devices."""
    if sum(map(len, devices)) <= MAX_DEVICE_TRACKS:
        return [
            [_Track(process, place.device, f"device {place.device} (stage {stage})", place.node) for place in places]
            for stage, places in enumerate(devices)
        ]
    return [
        [
            _Track(process, min(numbers), f"stage {stage}, node {node}: {_range(numbers)}", node)
            for node, numbers in _by_node(places).items()
        ]
        for stage, places in enumerate(devices)
    ]


def _by_node(places: Sequence[DevicePlace]) -> dict[int, list[int]]:
    nodes: dict[int, list[int]] = {}
    for place in places:
        nodes.setdefault(place.node, []).append(place.device)
    return nodes


def _range(numbers: Sequence[int]) -> str:
    return f"device {numbers[0]}" if len(numbers) == 1 else f"devices {min(numbers)} to {max(numbers)}"


def _link_tracks(process: int, transfers: Iterable[_TransferSpan]) -> dict[Hashable, _Track]:
    """The track of every transfer, by its key: one per direction between two stages, and further ones for overlapping
    transfers, since slices of a track must not overlap.
    """
    ends: dict[tuple[int, int], list[float]] = {}
    lanes: dict[Hashable, tuple[int, int, int]] = {}
    for transfer in sorted(transfers, key=lambda transfer: (transfer.pair, transfer.begin_s, transfer.end_s)):
        lane_ends = ends.setdefault(transfer.pair, [])
        begin, end = _microseconds(transfer.begin_s), _microseconds(transfer.end_s)
        lane = next((lane for lane, until in enumerate(lane_ends) if until <= begin), len(lane_ends))
        lane_ends[lane:] = [end, *lane_ends[lane + 1 :]]
        lanes[transfer.key] = (*transfer.pair, lane)
    numbers = {lane: number for number, lane in enumerate(sorted(set(lanes.values())))}
    return {
        key: _Track(
            process, numbers[lane], f"stage {lane[0]} → stage {lane[1]}{f' ({lane[2] + 1})' * (lane[2] > 0)}", None
        )
        for key, lane in lanes.items()
    }


def _name_tracks(tracks: Iterable[_Track]) -> Iterator[Event]:
    for track in tracks:
        where = {"pid": track.process, "tid": track.number}
        yield {"ph": "M", "name": "thread_name", **where, "args": {"name": track.name}}
        yield {"ph": "M", "name": "thread_sort_index", **where, "args": {"sort_index": track.number}}


# ---- what was predicted --------------------------------------------------------


def _trace_prediction(
    graph: TaskGraph, timeline: Timeline, devices: Sequence[Sequence[DevicePlace]]
) -> Iterator[Event]:
    tracks = _device_tracks(_PREDICTED, devices)
    sends = [(task, task.transfer) for _, task in graph.tasks() if task.transfer is not None and task.kind == "send"]
    links = _link_tracks(
        _PREDICTED_LINKS,
        [_TransferSpan(number, (task.stage, task.peer or 0), *timeline.transfers[number]) for task, number in sends],
    )
    yield from _name_tracks(track for own in tracks for track in own)
    yield from _name_tracks(dict.fromkeys(links.values()))
    for here, task in graph.tasks():
        begin, end = timeline.tasks[here.stage][here.position]
        if task.kind in COMPUTE_KINDS:
            for track in tracks[here.stage]:
                yield _slice(track, task, begin, end)
    for task, number in sends:
        yield _slice(links[number], task, *timeline.transfers[number], graph)
    yield from _arrows(graph, timeline, tracks, links)
    for stage, memory in enumerate(memory_over_time(graph, timeline)):
        for time_s, size_bytes in memory.bytes_over_time:
            yield _counter(f"stage {stage}: bytes of a device", time_s, size_bytes)
        for time_s, count in memory.micro_batches_over_time:
            yield _counter(f"stage {stage}: micro-batches held", time_s, count)


def _arrows(
    graph: TaskGraph,
    timeline: Timeline,
    tracks: Sequence[Sequence[_Track]],
    links: Mapping[Hashable, _Track],
) -> Iterator[Event]:
    """From the slice that wrote a buffer over its transfer's slice to its first reader's."""
    makers, readers = _makers_and_readers(graph)
    for task in (task for _, task in graph.tasks() if task.kind == "send"):
        stage, peer, number, buffer = task.stage, task.peer or 0, task.transfer or 0, task.reads[0]
        producer, consumer = makers.get((stage, buffer)), readers.get((peer, buffer))
        if producer is None or consumer is None:
            continue  # from the step's arguments, or to its results
        yield from _arrow(
            {"cat": "transfer", "name": str(buffer), "id": number},
            (tracks[stage][0], *timeline.tasks[stage][producer]),
            (links[number], *timeline.transfers[number]),
            (tracks[peer][0], *timeline.tasks[peer][consumer]),
        )


#: Where a slice is, when it begins and ends.
_Span = tuple[_Track, float, float]


def _makers_and_readers(graph: TaskGraph) -> tuple[dict[tuple[int, Buffer], int], dict[tuple[int, Buffer], int]]:
    """By stage and buffer, the positions of the program that writes it, and of its first reader."""
    makers: dict[tuple[int, Buffer], int] = {}
    readers: dict[tuple[int, Buffer], int] = {}
    for here, task in graph.tasks():
        if task.kind in COMPUTE_KINDS:
            makers.update(((here.stage, buffer), here.position) for buffer in task.writes)
            for buffer in task.reads:
                readers.setdefault((here.stage, buffer), here.position)
    return makers, readers


def _arrow(flow: Event, producer: _Span, carried: _Span, consumer: _Span) -> Iterator[Event]:
    """Leaves the middle of the first slice, and touches the second once it has: a receive waits before."""
    leaves_s = (producer[1] + producer[2]) / 2
    yield {"ph": "s", **flow, **_at(producer[0], leaves_s)}
    yield {"ph": "t", **flow, **_at(carried[0], max(carried[1], leaves_s))}
    yield {"ph": "f", "bp": "e", **flow, **_at(consumer[0], consumer[1])}


def _slice(track: _Track, task: Task, begin_s: float, end_s: float, graph: TaskGraph | None = None) -> Event:
    details: dict[str, Any] = {"kind": task.kind, "stage": task.stage}
    details |= {"micro_batch": task.micro_batch} if task.micro_batch is not None else {}
    details |= {"reads": _names(task.reads), "writes": _names(task.writes)}
    if graph is not None:
        details["bytes"] = graph.sent_bytes.get((*task.reads, *task.writes)[0].value, 0)
    colour = {"cname": _COLOURS[task.kind]} if task.kind in _COLOURS else {}
    return {
        "ph": "X", "name": str(task), "cat": task.kind, **_at(track, begin_s),
        "dur": round(_microseconds(end_s) - _microseconds(begin_s), 3),
        "args": details, **colour,
    }  # fmt: skip


def _names(buffers: Sequence[Buffer]) -> str:
    more = f", and {len(buffers) - _MAX_NAMES} more" if len(buffers) > _MAX_NAMES else ""
    return ", ".join(map(str, buffers[:_MAX_NAMES])) + more


def _counter(name: str, time_s: float, value: int) -> Event:
    return {"ph": "C", "name": name, "pid": _PREDICTED, "ts": _microseconds(time_s), "args": {"held": value}}


def _at(track: _Track, time_s: float) -> Event:
    return {"pid": track.process, "tid": track.number, "ts": _microseconds(time_s)}


def _microseconds(time_s: float) -> float:
    return round(time_s * 1e6, 3)


# ---- what was measured ---------------------------------------------------------


def _trace_measurement(
    graph: TaskGraph, devices: Sequence[Sequence[DevicePlace]], measured: Sequence[MeasuredTask]
) -> Iterator[Event]:
    tracks = _device_tracks(_MEASURED, devices)
    receives = [(timing, graph.stages[timing.stage][timing.position]) for timing in measured]
    links = _link_tracks(
        _MEASURED_LINKS,
        [
            _TransferSpan(timing, (task.peer or 0, task.stage), timing.begin_s, timing.end_s)
            for timing, task in receives
            if task.kind == "receive"
        ],
    )
    yield from _name_tracks(track for own in tracks for track in own)
    yield from _name_tracks(dict.fromkeys(links.values()))
    for timing in measured:
        task = graph.stages[timing.stage][timing.position]
        if task.kind in COMPUTE_KINDS:
            for track in tracks[timing.stage]:
                if track.node == timing.node:
                    yield _slice(track, task, timing.begin_s, timing.end_s)
        elif task.kind == "receive":
            yield _slice(links[timing], task, timing.begin_s, timing.end_s, graph)
    yield from _arrows_of_measurement(graph, tracks, measured, links)


def _arrows_of_measurement(
    graph: TaskGraph,
    tracks: Sequence[Sequence[_Track]],
    measured: Sequence[MeasuredTask],
    links: Mapping[Hashable, _Track],
) -> Iterator[Event]:
    """An arrow per receive, on each node that measured one; left out if node clocks differ by enough that a value would
    arrive before it was made.
    """
    makers, readers = _makers_and_readers(graph)
    ran = {(timing.stage, timing.position, timing.node): timing for timing in measured}
    nodes = {(timing.stage, timing.position): timing.node for timing in reversed(measured)}
    node_count = 1 + max(nodes.values(), default=0)

    def span(stage: int, position: int | None, node: int | None) -> _Span | None:
        ran_task = None if position is None or node is None else ran.get((stage, position, node))
        track = next((track for track in tracks[stage] if track.node == node), None)
        return None if ran_task is None or track is None else (track, ran_task.begin_s, ran_task.end_s)

    for timing in measured:
        task = graph.stages[timing.stage][timing.position]
        if task.kind != "receive":
            continue
        peer, buffer = task.peer or 0, task.writes[0]
        maker = makers.get((peer, buffer))
        sender = None if maker is None else span(peer, maker, nodes.get((peer, maker)))
        receiver = span(timing.stage, readers.get((timing.stage, buffer)), timing.node)
        if sender is None or receiver is None or not (sender[1] + sender[2]) / 2 <= min(timing.end_s, receiver[1]):
            continue
        flow = {
            "cat": "measured transfer",
            "name": str(buffer),
            "id": (task.transfer or 0) * node_count + timing.node,
        }
        yield from _arrow(flow, sender, (links[timing], timing.begin_s, timing.end_s), receiver)
