"""Step time of a pipeline from seconds per chunk alone: a search asks for thousands of candidates.

It uses the task graph's orders, placement of sends and receives, and engine, without buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardwright.tasks.engine import Compute, Operation, Receive, Send, Transfer, run_operations
from shardwright.tasks.schedules import Cell, Schedule
from shardwright.tasks.simulate import idle_part
from shardwright.tasks.transfer_placement import Route, Slot, place_transfers


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkTime:
    """Seconds of one chunk for one micro-batch.

    forward_s: None if forward and backward parts are one program (of `backward_s`), like the last chunk's. weight_s:
    gradients of variables in a program of their own, not in `backward_s`; otherwise None.
    """

    forward_s: float | None
    backward_s: float
    weight_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkEdge:
    """The values from chunk `source` to a higher one per micro-batch, and the gradient coming back.

    forward_s, backward_s: seconds on the link, latency included; None: nothing is sent in that direction.
    """

    source: int
    target: int
    forward_s: float | None
    backward_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEstimate:
    """One step: seconds, and the compute seconds of each stage."""

    step_s: float
    busy_s: tuple[float, ...]

    @property
    def bubble_fraction(self) -> float:
        return idle_part(self.busy_s, self.step_s)


class _ChunkEnd(NamedTuple):
    kind: str
    chunk: int


def estimate_step(
    schedule: Schedule,
    *,
    stage_of_chunk: Sequence[int],
    micro_batches: int,
    chunks: Sequence[ChunkTime],
    edges: Sequence[ChunkEdge],
    before_s: Sequence[float] | None = None,
    after_s: Sequence[float] | None = None,
) -> StepEstimate:
    """Seconds of a step: every stage does `before_s`, its cells of all micro-batches, and `after_s`.

    Raises OptionError if the schedule does not suit `stage_of_chunk`.
    """
    orders = schedule.orders(stage_of_chunk, micro_batches)
    seconds = {
        (kind, chunk): value
        for chunk, time in enumerate(chunks)
        for kind, value in (("forward", time.forward_s), ("backward", time.backward_s), ("weight", time.weight_s))
        if value is not None
    }
    cells = [[cell for cell in order if cell[:2] in seconds] for order in orders]
    routes, transfers = _routes(cells, edges, chunks, stage_of_chunk, micro_batches)
    operations: list[list[Operation]] = []
    busy = []
    for stage, woven in enumerate(place_transfers(routes, len(cells))):
        before = before_s[stage] if before_s else 0.0
        after = after_s[stage] if after_s else 0.0
        own: list[Operation] = [Compute(before)]
        arrivals: dict[int, list[int]] = {}
        for numbers in woven.receives.values():
            for number in numbers:
                arrivals.setdefault(routes[number].read.group, []).append(number)
        busy_s = before + after
        for place, cell in enumerate(cells[stage]):
            own += map(Receive, woven.receives.get(place, ()))
            time_s = seconds[cell.kind, cell.chunk]
            busy_s += time_s
            own.append(Compute(time_s, tuple(arrivals.get(place, ()))))
            own += map(Send, woven.sends.get(Slot(place, 0), ()))
        own.append(Compute(after))
        operations.append(own)
        busy.append(busy_s)
    times = run_operations(operations, transfers)
    return StepEstimate(step_s=max(times_of_stage[-1][1] for times_of_stage in times.operations), busy_s=tuple(busy))


def _routes(
    cells: Sequence[Sequence[Cell]],
    edges: Sequence[ChunkEdge],
    chunks: Sequence[ChunkTime],
    stage_of_chunk: Sequence[int],
    micro_batches: int,
) -> tuple[list[Route], list[Transfer]]:
    place = {cell: Slot(number, 0) for order in cells for number, cell in enumerate(order)}
    routes: list[Route] = []
    transfers: list[Transfer] = []
    for edge in edges:
        reader = "backward" if chunks[edge.target].forward_s is None else "forward"
        ways = (
            (edge.forward_s, _ChunkEnd("forward", edge.source), _ChunkEnd(reader, edge.target)),
            (edge.backward_s, _ChunkEnd("backward", edge.target), _ChunkEnd("backward", edge.source)),
        )
        for time_s, producer, consumer in ways:
            source, target = stage_of_chunk[producer.chunk], stage_of_chunk[consumer.chunk]
            if time_s is None or source == target:
                continue
            for i in range(micro_batches):
                routes.append(Route(source, place[Cell(*producer, i)], target, place[Cell(*consumer, i)]))
            transfers += [Transfer(source, target, time_s)] * micro_batches
    return routes, transfers
