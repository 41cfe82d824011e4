"""Cost of a cut: seconds from the pace of its schedule, transfers between its chunks included."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from shardwright.planner.stages.device_groups import DeviceGroups
from shardwright.planner.stages.stage_graph import CutProblem, NodeCost, StageCut, of_kind
from shardwright.planner.stages.tuning import FULL
from shardwright.tasks import ChunkEdge, ChunkTime, Schedule, StepEstimate, estimate_step, in_flight


@dataclass(slots=True, kw_only=True, eq=False)
class LinkTraffic:
    """Bytes sent by one device per micro-batch, the larger of the two stages' values.

    ahead, back: pair of chunks, the lower one first → bytes in the forward and in the backward direction.
    """

    ahead: dict[tuple[int, int], float] = field(default_factory=dict)
    back: dict[tuple[int, int], float] = field(default_factory=dict)

    @classmethod
    def of(cls, problem: CutProblem, chunk_of: tuple[int, ...]) -> LinkTraffic:
        traffic, stages = cls(), len(problem.stage_slots)
        for value in problem.graph.values:
            source = chunk_of[value.producer]
            reached: dict[int, int] = {}  # stage → the first of its chunks that reads the value
            for reader in (*value.readers, *value.saved_by):
                chunk = chunk_of[reader]
                if chunk % stages != source % stages:
                    reached[chunk % stages] = min(chunk, reached.get(chunk % stages, chunk))
            for chunk in reached.values():
                way = traffic.ahead if chunk > source else traffic.back
                pair = (min(source, chunk), max(source, chunk))
                kinds = (problem.stage_slot(source).kind, problem.stage_slot(chunk).kind)
                way[pair] = way.get(pair, 0.0) + max(of_kind(value.sent_bytes, kind) for kind in kinds)
        return traffic

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        return tuple(sorted({*self.ahead, *self.back}))


def micro_batches_in_flight(
    schedule: Schedule, stages: int, chunks: int, micro_batches: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """The result of `in_flight`; all schedules but GPipe hold no more once the pipeline is full."""
    enough = micro_batches if schedule.kind == "gpipe" else min(micro_batches, FULL * stages * chunks)
    return in_flight(schedule, stages=stages, chunks=chunks, micro_batches=enough)


def step_pace(problem: CutProblem, cut: StageCut, schedule: Schedule, groups: DeviceGroups) -> StepEstimate:
    """Seconds of a step of a cut under a schedule.

    Once a pipeline is full, micro-batches follow at one pace: of many, only the first are simulated.
    """
    stages = len(problem.stage_slots)
    less, more = (FULL - 1) * stages * problem.chunks, FULL * stages * problem.chunks
    if problem.micro_batches <= more:
        return _pace(problem, cut, schedule, groups, problem.micro_batches)
    first, second = (_pace(problem, cut, schedule, groups, count) for count in (less, more))
    rest = (problem.micro_batches - more) / (more - less)
    return StepEstimate(
        step_s=second.step_s + rest * (second.step_s - first.step_s),
        busy_s=tuple(b + rest * (b - a) for a, b in zip(first.busy_s, second.busy_s, strict=True)),
    )


def _pace(
    problem: CutProblem,
    cut: StageCut,
    schedule: Schedule,
    groups: DeviceGroups,
    micro_batches: int,
) -> StepEstimate:
    traffic = LinkTraffic.of(problem, cut.chunk_of)
    stages = len(problem.stage_slots)
    edges = [
        ChunkEdge(
            source=low,
            target=high,
            forward_s=_transfer_s(traffic.ahead, (low, high), groups),
            backward_s=_transfer_s(traffic.back, (low, high), groups),
        )
        for low, high in traffic.pairs
    ]
    before, after = state_transfer_s(problem, cut, groups)
    return estimate_step(
        schedule,
        stage_of_chunk=tuple(chunk % stages for chunk in range(problem.chunk_count)),
        micro_batches=micro_batches,
        chunks=chunk_times(problem, cut, schedule),
        edges=edges,
        before_s=[a + b for a, b in zip(_once_s(problem, cut, lambda work: work.arrival_s), before, strict=True)],
        after_s=[a + b for a, b in zip(update_s(problem, cut), after, strict=True)],
    )


def chunk_times(problem: CutProblem, cut: StageCut, schedule: Schedule) -> list[ChunkTime]:
    """Seconds of each chunk; forward and backward of the last one are one program.

    If the schedule has weight tasks, gradients of variables are separate programs, except in the first chunk: no other
    chunk waits on it.
    """
    forward, backward, weight = ([0.0] * problem.chunk_count for _ in range(3))
    for node, chunk in enumerate(cut.chunk_of):
        work = problem.node_cost(node, chunk)
        forward[chunk] += work.forward_s
        backward[chunk] += work.backward_s
        weight[chunk] += work.weight_s if schedule.has_weight and chunk else 0.0
    backward[-1] += forward[-1]
    last = problem.chunk_count - 1
    return [
        ChunkTime(
            forward_s=None if chunk == last else forward[chunk],
            backward_s=backward[chunk] - weight[chunk],
            weight_s=weight[chunk] or None,
        )
        for chunk in range(problem.chunk_count)
    ]


def update_s(problem: CutProblem, cut: StageCut) -> list[float]:
    """Seconds of each stage after the last micro-batch."""
    return _once_s(problem, cut, lambda work: work.update_s)


def _once_s(problem: CutProblem, cut: StageCut, seconds: Callable[[NodeCost], float]) -> list[float]:
    stage_s = [0.0] * len(problem.stage_slots)
    for node, chunk in enumerate(cut.chunk_of):
        stage_s[chunk % len(stage_s)] += seconds(problem.node_cost(node, chunk))
    return stage_s


def state_transfer_s(problem: CutProblem, cut: StageCut, groups: DeviceGroups) -> tuple[list[float], list[float]]:
    """Seconds each stage waits to receive shared variables before a step, and their gradients after it."""
    stages = len(problem.stage_slots)
    before, after = [0.0] * stages, [0.0] * stages
    for shared in problem.graph.shared:
        owner = cut.chunk_of[shared.owner] % stages
        for stage in sorted({cut.chunk_of[reader] % stages for reader in shared.readers} - {owner}):
            size = max(of_kind(shared.shard_bytes, problem.stage_slots[end].kind) for end in (stage, owner))
            seconds = link_s(size / 2, stage, owner, groups)
            before[stage] += seconds
            after[owner] += seconds
    return before, after


def _transfer_s(way: Mapping[tuple[int, int], float], pair: tuple[int, int], groups: DeviceGroups) -> float | None:
    if pair not in way:
        return None
    return link_s(way[pair], pair[0] % groups.stages, pair[1] % groups.stages, groups)


def link_s(size_bytes: float, stage: int, other: int, groups: DeviceGroups) -> float:
    """Seconds until each device of one stage has sent `size_bytes` to another stage's."""
    link = groups.link(stage, other)
    return link.latency_s + size_bytes / link.bandwidth_bytes_per_s


def estimate_step_s(problem: CutProblem, cut: StageCut) -> float:
    """A quick estimate of `step_pace`: the slowest stage all the time, the others during fill and drain."""
    stages = len(problem.stage_slots)
    busy = [0.0] * stages
    for node, chunk in enumerate(cut.chunk_of):
        work = problem.node_cost(node, chunk)
        busy[chunk % stages] += work.forward_s + work.backward_s
    slowest = max(busy)
    once_s = max(update_s(problem, cut)) + max(_once_s(problem, cut, lambda work: work.arrival_s))
    return slowest * problem.micro_batches + (sum(busy) - slowest) / problem.chunks + once_s
