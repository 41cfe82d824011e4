"""A step as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing: what was predicted above what was measured.

In the Trace Event Format (docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU): a process for
each of predicted devices, predicted links, measured devices and measured links; in them a track per device, or per
direction between two stages; an arrow from who made a value over the link to who reads it; and how much memory each
stage holds. Both clocks begin with the step, and both have their arrows.
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
    """A transfer: what it is known by, from which stage to which, and when."""

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
    """Write what `step_trace` made, so that Perfetto opens it."""
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
    """The trace of one step, as data for JSON.

    devices: those of every stage. measured: what ran; none where the step was only planned.
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
            **({"measured_step_s": max(each.end_s for each in measured)} if measured else {}),
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
    """The track of every transfer, by its key: one for each direction between two stages, and further ones for what
    goes beside something else, since slices of a track must not overlap."""
    ends: dict[tuple[int, int], list[float]] = {}
    lanes: dict[Hashable, tuple[int, int, int]] = {}
    for each in sorted(transfers, key=lambda each: (each.pair, each.begin_s, each.end_s)):
        taken = ends.setdefault(each.pair, [])
        begin, end = _microseconds(each.begin_s), _microseconds(each.end_s)
        lane = next((lane for lane, until in enumerate(taken) if until <= begin), len(taken))
        taken[lane:] = [end, *taken[lane + 1 :]]
        lanes[each.key] = (*each.pair, lane)
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
    """From the slice that wrote a buffer over the slice of its transfer to the first one that reads it."""
    makers, readers = _makers_and_readers(graph)
    for task in (task for _, task in graph.tasks() if task.kind == "send"):
        stage, peer, number, buffer = task.stage, task.peer or 0, task.transfer or 0, task.reads[0]
        made, read = makers.get((stage, buffer)), readers.get((peer, buffer))
        if made is None or read is None:
            continue  # from the step's arguments, or to its results
        yield from _arrow(
            {"cat": "transfer", "name": str(buffer), "id": number},
            (tracks[stage][0], *timeline.tasks[stage][made]),
            (links[number], *timeline.transfers[number]),
            (tracks[peer][0], *timeline.tasks[peer][read]),
        )


#: Where a slice is, when it begins and ends.
_Span = tuple[_Track, float, float]


def _makers_and_readers(graph: TaskGraph) -> tuple[dict[tuple[int, Buffer], int], dict[tuple[int, Buffer], int]]:
    """By stage and buffer, the position of the program that writes it, and of the first one that reads it."""
    makers: dict[tuple[int, Buffer], int] = {}
    readers: dict[tuple[int, Buffer], int] = {}
    for here, task in graph.tasks():
        if task.kind in COMPUTE_KINDS:
            makers.update(((here.stage, buffer), here.position) for buffer in task.writes)
            for buffer in task.reads:
                readers.setdefault((here.stage, buffer), here.position)
    return makers, readers


def _arrow(flow: Event, made: _Span, carried: _Span, read: _Span) -> Iterator[Event]:
    """Leaves the middle of the first slice, and touches the second once it has: a receive waits before."""
    leaves_s = (made[1] + made[2]) / 2
    yield {"ph": "s", **flow, **_at(made[0], leaves_s)}
    yield {"ph": "t", **flow, **_at(carried[0], max(carried[1], leaves_s))}
    yield {"ph": "f", "bp": "e", **flow, **_at(read[0], read[1])}


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
    receives = [(each, graph.stages[each.stage][each.position]) for each in measured]
    links = _link_tracks(
        _MEASURED_LINKS,
        [
            _TransferSpan(each, (task.peer or 0, task.stage), each.begin_s, each.end_s)
            for each, task in receives
            if task.kind == "receive"
        ],
    )
    yield from _name_tracks(track for own in tracks for track in own)
    yield from _name_tracks(dict.fromkeys(links.values()))
    for each in measured:
        task = graph.stages[each.stage][each.position]
        if task.kind in COMPUTE_KINDS:
            for track in tracks[each.stage]:
                if track.node == each.node:
                    yield _slice(track, task, each.begin_s, each.end_s)
        elif task.kind == "receive":
            yield _slice(links[each], task, each.begin_s, each.end_s, graph)
    yield from _arrows_of_measurement(graph, tracks, measured, links)


def _arrows_of_measurement(
    graph: TaskGraph,
    tracks: Sequence[Sequence[_Track]],
    measured: Sequence[MeasuredTask],
    links: Mapping[Hashable, _Track],
) -> Iterator[Event]:
    """Of each receive, on each node that measured one; left out where the clocks of nodes are so far apart that a value
    would arrive before it was made."""
    makers, readers = _makers_and_readers(graph)
    ran = {(each.stage, each.position, each.node): each for each in measured}
    nodes = {(each.stage, each.position): each.node for each in reversed(measured)}
    node_count = 1 + max(nodes.values(), default=0)

    def span(stage: int, position: int | None, node: int | None) -> _Span | None:
        found = None if position is None or node is None else ran.get((stage, position, node))
        track = next((track for track in tracks[stage] if track.node == node), None)
        return None if found is None or track is None else (track, found.begin_s, found.end_s)

    for each in measured:
        task = graph.stages[each.stage][each.position]
        if task.kind != "receive":
            continue
        peer, buffer = task.peer or 0, task.writes[0]
        maker = makers.get((peer, buffer))
        made = None if maker is None else span(peer, maker, nodes.get((peer, maker)))
        read = span(each.stage, readers.get((each.stage, buffer)), each.node)
        if made is None or read is None or not (made[1] + made[2]) / 2 <= min(each.end_s, read[1]):
            continue
        flow = {"cat": "measured transfer", "name": str(buffer), "id": (task.transfer or 0) * node_count + each.node}
        yield from _arrow(flow, made, (links[each], each.begin_s, each.end_s), read)
