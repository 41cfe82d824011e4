"""The Trace Event Format, as its document says it, for the kinds of event that we write.

docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU, sections "JSON Object Format", "Complete
Events", "Counter Events", "Flow Events" and "Metadata Events". It knows nothing of what writes them.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from itertools import pairwise
from typing import Any

#: Names of colours that chrome://tracing knows (catapult, color_scheme.html).
COLOURS = {
    "thread_state_uninterruptible", "thread_state_iowait", "thread_state_running", "thread_state_runnable",
    "thread_state_sleeping", "thread_state_unknown", "background_memory_dump", "light_memory_dump",
    "detailed_memory_dump", "vsync_highlight_color", "generic_work", "good", "bad", "terrible", "black", "grey",
    "white", "yellow", "olive", "rail_response", "rail_animation", "rail_idle", "rail_load", "startup",
    "heap_dump_stack_frame", "heap_dump_object_type", "heap_dump_child_node_arrow", "cq_build_running",
    "cq_build_passed", "cq_build_failed", "cq_build_abandoned", "cq_build_attempt_runnig",
    "cq_build_attempt_passed", "cq_build_attempt_failed",
}  # fmt: skip

_METADATA = {
    "process_name": ("name", str), "thread_name": ("name", str),
    "process_sort_index": ("sort_index", int), "thread_sort_index": ("sort_index", int),
}  # fmt: skip
#: Kind of event → fields that it must have, and those that it may have.
_FIELDS = {
    "X": ({"name", "ph", "ts", "dur", "pid", "tid"}, {"cat", "args", "cname"}),
    "C": ({"name", "ph", "ts", "pid", "args"}, {"cat", "id"}),
    "M": ({"name", "ph", "pid", "args"}, {"tid", "cat", "ts"}),
    "s": ({"name", "cat", "id", "ph", "ts", "pid", "tid"}, {"args"}),
    "t": ({"name", "cat", "id", "ph", "ts", "pid", "tid"}, {"args"}),
    "f": ({"name", "cat", "id", "ph", "ts", "pid", "tid"}, {"args", "bp"}),
}
#: Flow events are bound to a slice: they may be off by a rounded thousandth of a microsecond.
_ROUNDED = 2e-3

Event = dict[str, Any]
#: (process, thread) → (begin, end) of its slices, ascending.
Slices = dict[tuple[int, int], list[tuple[float, float]]]


def require_valid(trace: Any) -> None:
    """AssertionError that says what is wrong with a trace, read from JSON or about to be written."""
    trace = json.loads(json.dumps(trace, allow_nan=False))
    assert set(trace) <= {"traceEvents", "displayTimeUnit", "otherData", "systemTraceEvents", "metadata"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    events: list[Event] = trace["traceEvents"]
    for event in events:
        _require_fields(event)
    slices = _slices(events)
    _require_named(events, slices)
    _require_flows(events, slices)


def _require_fields(event: Event) -> None:
    must, may = _FIELDS[event["ph"]]
    assert must <= set(event) <= must | may, event
    assert isinstance(event["name"], str), event
    assert event["name"], event
    assert all(type(event[key]) is int and 0 <= event[key] < 2**31 for key in ("pid", "tid") if key in event), event
    assert all(_is_time(event[key]) for key in ("ts", "dur") if key in event), event
    assert isinstance(event.get("args", {}), dict), event
    assert event.get("cname", "good") in COLOURS, event
    assert event.get("bp", "e") == "e", event
    assert type(event.get("id", 0)) is int, event  # strings are read as hexadecimal numbers by some
    if event["ph"] == "C":
        assert event["args"], event
        assert all(type(value) in (int, float) for value in event["args"].values()), event
    if event["ph"] == "M":
        key, kind = _METADATA[event["name"]]
        assert list(event["args"]) == [key], event
        assert type(event["args"][key]) is kind, event


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value >= 0


def _slices(events: list[Event]) -> Slices:
    """Slices of a thread follow each other: they must nest, and ours never lie in one another."""
    result: Slices = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            result[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for own in result.values():
        own.sort()
        for (_, end), (begin, _) in pairwise(own):
            assert end <= begin + _ROUNDED, f"slices overlap: one ends at {end}, the next begins at {begin}"
    return result


def _require_named(events: list[Event], slices: Slices) -> None:
    """Each process and thread that has slices is named, once."""
    names: dict[str, list[Any]] = {"process_name": [], "thread_name": []}
    for event in events:
        if event["name"] in names and event["ph"] == "M":
            names[event["name"]].append((event["pid"], event["tid"]) if "tid" in event else event["pid"])
    for own in names.values():
        assert len(own) == len(set(own)), "a process or thread has two names"
    assert set(slices) <= set(names["thread_name"])
    assert {process for process, _ in slices} <= set(names["process_name"])


def _require_flows(events: list[Event], slices: Slices) -> None:
    """Each is known by category, name and id, begins once, ends once, goes forward, and is bound to slices."""
    flows = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            flows[event["cat"], event["name"], event["id"]].append(event)
            spans = slices[event["pid"], event["tid"]]
            assert any(begin - _ROUNDED <= event["ts"] <= end + _ROUNDED for begin, end in spans), event
    for key, steps in flows.items():
        phases = "".join(event["ph"] for event in steps)
        assert phases[0] == "s", key
        assert phases[-1] == "f", key
        assert set(phases[1:-1]) <= {"t"}, key
        assert [event["ts"] for event in steps] == sorted(event["ts"] for event in steps), key
