"""A timeline of all ranks' collectives: one Chrome trace, on one clock (open it in Perfetto or chrome://tracing).

Each rank keeps its events; `stop_timeline`, or the end of the program, brings them together at rank 0. Ranks of one
host share a clock. The clocks of other hosts are compared with rank 0's at the start: an all-gather ends everywhere at
about the same time, and the median difference of several is taken.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwright.errors import CollectiveError, OptionError, ShardwrightError
from shardwright.ranks import job, process_exit, watch
from shardwright.ranks.objects import allgather_object
from shardwright.ranks.tuning import CLOCK_ROUNDS, TIMELINE_END_S
from shardwright.ranks.watch import Position

VARIABLE = "SHARDWRIGHT_TIMELINE"

#: One event: name, rank, start and end in seconds of rank 0's clock, what is known besides.
_Event = tuple[str, int, float, float, dict[str, Any]]


@dataclass(slots=True)
class _Timeline:
    """A timeline that runs. offset_s: what this rank's clock is ahead of rank 0's."""

    path: Path
    offset_s: float
    events: list[_Event] = field(default_factory=list)
    programs: queue.SimpleQueue[tuple[Position, Any] | None] = field(default_factory=queue.SimpleQueue)
    thread: threading.Thread | None = None

    def add(self, name: str, start_s: float, end_s: float, **details: Any) -> None:
        self.events.append((name, job.rank(), start_s - self.offset_s, end_s - self.offset_s, details))

    def follow_programs(self) -> None:
        """Note each program once it has run."""
        while (item := self.programs.get()) is not None:
            here, result = item
            with contextlib.suppress(RuntimeError, ValueError):  # donated since, or broken
                result.block_until_ready()
            with contextlib.suppress(CollectiveError):  # the job was left meanwhile
                self.add(here.call, here.since_s, time.monotonic(), ranks=list(here.ranks))


class _Process:
    timeline: _Timeline | None = None
    at_exit = False


def start_timeline(path: str | os.PathLike[str]) -> None:
    """Record the collectives of all ranks from now on; every rank calls it. `stop_timeline` writes the file.

    path: of a Chrome trace in JSON, on rank 0's host. Raises OptionError where one runs already.
    """
    if _Process.timeline is not None:
        raise OptionError("a timeline runs already", where=str(_Process.timeline.path), remedy="call stop_timeline()")
    offset_s = _clock_offset_s()
    started = _Timeline(Path(path), offset_s)
    started.thread = threading.Thread(target=started.follow_programs, name="timeline", daemon=True)
    started.thread.start()
    watch.observe(_on_collective, _on_program)
    _Process.timeline = started
    if not _Process.at_exit:
        _Process.at_exit = True
        atexit.register(_at_exit)


def stop_timeline() -> None:
    """Write the timeline of all ranks; every rank calls it. Raises OptionError where the file cannot be written."""
    timeline = _stop()
    if timeline is None:
        raise OptionError("no timeline runs", where="stop_timeline", remedy="call start_timeline(path) first")
    everything = allgather_object([list(event) for event in timeline.events], name="timeline")
    if job.rank() == 0:
        _write(timeline.path, [tuple(event) for events in everything for event in events])


@contextlib.contextmanager
def timeline_span(name: str) -> Iterator[None]:
    """A span of one's own in the timeline, while one runs: `with sw.ranks.timeline_span(f"step {step}"): …`."""
    start_s = time.monotonic()
    try:
        yield
    finally:
        if (timeline := _Process.timeline) is not None:
            timeline.add(name, start_s, time.monotonic())


def begin_generation(path: str) -> None:
    """Start the launcher's timeline, or go on with it among other ranks."""
    if _Process.timeline is None:
        start_timeline(path)
    else:
        _Process.timeline.offset_s = _clock_offset_s()


# ---- recording -------------------------------------------------------------------
def _on_collective(here: Position, end_s: float) -> None:
    if (timeline := _Process.timeline) is not None:
        timeline.add(here.call, here.since_s, end_s, ranks=list(here.ranks), number=here.count)


def _on_program(here: Position, result: Any) -> None:
    if (timeline := _Process.timeline) is not None:
        timeline.programs.put((here, result))


def _stop() -> _Timeline | None:
    timeline, _Process.timeline = _Process.timeline, None
    if timeline is None:
        return None
    watch.observe(None, None)
    timeline.programs.put(None)
    if timeline.thread is not None:
        timeline.thread.join(TIMELINE_END_S)
    return timeline


def _clock_offset_s() -> float:
    """What this rank's clock is ahead of rank 0's."""
    ends: list[float] = []
    for _ in range(CLOCK_ROUNDS):
        allgather_object(None, name="timeline: clocks")
        ends.append(time.monotonic())
    clocks = allgather_object((_boot(), ends), name="timeline: clocks")
    boot, first_ends = clocks[0]
    if boot and boot == _boot():
        return 0.0
    return float(statistics.median(mine - first for mine, first in zip(ends, first_ends, strict=True)))


def _boot() -> str:
    """Names the run of this machine's kernel, which is a clock; "" where there is no such name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


# ---- writing ---------------------------------------------------------------------
def _at_exit() -> None:
    """At the end of the program: all ranks' events, or this rank's alone where the job has broken."""
    if _Process.timeline is None:
        return
    path, rank = _Process.timeline.path, job.rank() if job.is_initialized() else 0
    events = _Process.timeline.events
    if job.is_initialized() and not process_exit.has_failed():
        with contextlib.suppress(ShardwrightError):
            stop_timeline()
            return
    _stop()
    with contextlib.suppress(OptionError):
        _write(path.with_name(f"{path.name}.rank-{rank}"), events)


def _write(path: Path, events: list[_Event]) -> None:
    first_s = min((start_s for _, _, start_s, _, _ in events), default=0.0)
    ranks = sorted({rank for _, rank, _, _, _ in events})
    names: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}} for rank in ranks
    ]
    spans = [
        {"name": name, "ph": "X", "pid": rank, "tid": 0, "ts": (start_s - first_s) * 1e6,
         "dur": (end_s - start_s) * 1e6, "args": details}
        for name, rank, start_s, end_s, details in events
    ]  # fmt: skip
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"traceEvents": names + spans, "displayTimeUnit": "ms"}))
    except OSError as error:
        raise OptionError(
            f"the timeline cannot be written ({error.strerror})", where=str(path), remedy="name another file"
        ) from None
