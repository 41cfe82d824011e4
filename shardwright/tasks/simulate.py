"""The timeline of a task graph: when every task and transfer begins and ends, and what is in memory meanwhile.

The same lists that the workers run, followed by `engine` with predicted (or given) seconds. Transfers take bytes of
one device over the bandwidth of its link, and arrive a latency later; each direction between two stages is a
channel of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardwright.errors import PlanError
from shardwright.tasks.check import operations
from shardwright.tasks.engine import Compute, Transfer, run_operations
from shardwright.tasks.graph import MICRO_BATCH, Buffer, Task, TaskGraph

#: Begin and end, seconds from the beginning of the step.
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Times of one step.

    tasks: per stage, (begin, end) of every task in order; sends and receives take no time of the stage.
    transfers: (begin, end) by transfer number, None at unused numbers.
    busy_s: per stage, compute time.
    """

    step_s: float
    busy_s: tuple[float, ...]
    tasks: tuple[tuple[Interval, ...], ...]
    transfers: tuple[Interval, ...]

    @property
    def bubble_fraction(self) -> float:
        """Idle part of the stages' time, 0 to 1."""
        return idle_part(self.busy_s, self.step_s)


def idle_part(busy_s: Sequence[float], step_s: float) -> float:
    """1 − the mean of `busy_s` over `step_s`; 0 if the step takes no time."""
    return 1.0 - sum(busy_s) / (len(busy_s) * step_s) if step_s > 0 else 0.0


def simulate(
    graph: TaskGraph,
    *,
    time_of: Callable[[Task], float] | None = None,
) -> Timeline:
    """Simulate a checked graph through one step.

    time_of: seconds of a task, instead of its own prediction; also of kinds that compute nothing.

    Raises PlanError if the graph has links, but one is missing.
    """
    stages, transfers = operations(graph)
    busy = [0.0] * len(stages)
    for stage, tasks in enumerate(graph.stages):
        for index, task in enumerate(tasks):
            operation = stages[stage][index]
            if isinstance(operation, Compute):
                if time_of is not None:
                    operation = stages[stage][index] = operation._replace(time_s=time_of(task))
                busy[stage] += operation.time_s
            elif graph.links and task.kind == "send" and task.transfer is not None:
                transfers[task.transfer] = _with_time(transfers[task.transfer], task, graph)
    times = run_operations(stages, transfers)
    return Timeline(
        step_s=max((own[-1][1] for own in times.operations if own), default=0.0),
        busy_s=tuple(busy),
        tasks=tuple(tuple(own) for own in times.operations),
        transfers=tuple(times.transfers),
    )


def _with_time(transfer: Transfer, task: Task, graph: TaskGraph) -> Transfer:
    link = graph.links.get((transfer.source, transfer.target))
    if link is None:
        raise PlanError(f"no link from stage {transfer.source} to stage {transfer.target}", where=str(task))
    size_bytes = graph.sent_bytes.get(task.reads[0].value, 0)
    return transfer._replace(busy_s=size_bytes / link.bandwidth_bytes_per_s, latency_s=link.latency_s or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Memory of one device of a stage during a step: (seconds, bytes from then on), and the number of micro-batches.

    Bytes include arguments, results and the programs' workspace; a buffer being sent counts until it has arrived. A
    micro-batch counts while the stage keeps at least one buffer of it.
    """

    bytes_over_time: tuple[tuple[float, int], ...]
    micro_batches_over_time: tuple[tuple[float, int], ...]

    @property
    def peak_bytes(self) -> int:
        return max((size for _, size in self.bytes_over_time), default=0)

    @property
    def peak_micro_batches(self) -> int:
        return max((count for _, count in self.micro_batches_over_time), default=0)


def memory_over_time(graph: TaskGraph, timeline: Timeline) -> tuple[StageMemory, ...]:
    """Per stage, live memory when the tasks run at the times of `timeline`."""
    return tuple(_stage_memory(graph, timeline, stage) for stage in range(len(graph.stages)))


def _stage_memory(graph: TaskGraph, timeline: Timeline, stage: int) -> StageMemory:
    sizes = graph.sizes[stage]
    changes: list[tuple[float, int]] = []
    counts: list[tuple[float, int]] = []
    kept: Counter[int] = Counter()
    sent_until: dict[Buffer, float] = {}
    for task, (begin, end) in zip(graph.stages[stage], timeline.tasks[stage], strict=True):
        allocated = sum(sizes[b.value] for b in task.writes) - sum(sizes[b.value] for b in task.donates)
        changes += [(begin, allocated + task.workspace_bytes), (end, -task.workspace_bytes)]
        if task.kind == "send" and task.transfer is not None:
            arrived = timeline.transfers[task.transfer][1]
            sent_until[task.reads[0]] = max(sent_until.get(task.reads[0], 0.0), arrived)
        for buffer in task.frees:
            if buffer not in task.donates:
                changes.append((max(end, sent_until.pop(buffer, end)), -sizes[buffer.value]))
        before = len(kept)
        _count(kept, task)
        if len(kept) > before:
            counts.append((begin, len(kept)))
        for buffer in task.frees:
            if buffer.micro_batch is not None:
                kept[buffer.micro_batch] -= 1
                if not kept[buffer.micro_batch]:
                    del kept[buffer.micro_batch]
                    counts.append((end, len(kept)))
    return StageMemory(bytes_over_time=_accumulate(changes), micro_batches_over_time=tuple(counts))


def _count(counter: Counter[int], task: Task) -> None:
    written = [b for b in task.writes if b not in task.donates]
    counter.update(b.micro_batch for b in written if b.micro_batch is not None and b.value != MICRO_BATCH)


def _accumulate(changes: Sequence[tuple[float, int]]) -> tuple[tuple[float, int], ...]:
    """Running sums over time; memory released at a moment is available to allocations at the same moment."""
    live = 0
    out: list[tuple[float, int]] = []
    for time_s, change in sorted(changes):
        live += change
        if out and out[-1][0] == time_s:
            out[-1] = (time_s, live)
        else:
            out.append((time_s, live))
    return tuple(out)
